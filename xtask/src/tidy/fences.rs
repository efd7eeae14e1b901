//! `unsafe` only inside its named fences. That each block says why it holds is clippy's part (`undocumented_unsafe_blocks`).

use super::Source;

/// Folders and files inside which `unsafe` may stand.
const FENCES: &[&str] = &[
    "kv-transfer/src/ucx",
    "kv-transfer/src/region",
    "kernels/src/cpu",
    "kernels/src/cuda",
    "engine/src/weights/mmap.rs",
    // Declares the contract of pool memory (`unsafe trait`); holds no unsafe code.
    "types/src/memory.rs",
];

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let outside = sources.iter().filter(|s| s.path.ends_with(".rs") && !s.path.starts_with("xtask/"));
    let outside = outside.filter(|s| !FENCES.iter().any(|f| s.path.starts_with(f)));
    outside.flat_map(findings).collect()
}

fn findings(source: &Source) -> Vec<String> {
    let opens = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        // `unsafe impl PoolMemory` in tests would be a hole too: nothing outside a fence is exempt.
        ["unsafe {", "unsafe fn", "unsafe impl", "unsafe trait", "unsafe extern", "allow(unsafe_code)"]
            .iter()
            .any(|u| code.contains(u))
    };
    let lines = source.text.lines().enumerate().filter(|(_, l)| opens(l));
    lines.map(|(i, _)| format!("{}:{}: unsafe outside its fences", source.path, i + 1)).collect()
}
