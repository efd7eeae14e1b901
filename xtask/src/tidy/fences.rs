//! Allows `unsafe` only inside its named fences, and requires that every crate uses the workspace's lints, which deny it. That each block
//! has a safety comment is checked by clippy (`undocumented_unsafe_blocks`).

use super::Source;

/// Folders and files that may contain `unsafe`.
const FENCES: &[&str] = &[
    "kv-transfer/src/ucx",
    "memory/src/host",
    "kernels/src/cpu",
    "kernels/src/cuda/driver/native",
    "engine/src/formats/mmap.rs",
    "xtask/src/cubins/nvrtc.rs",
];
/// It must name what it refuses.
const THIS: &str = "xtask/src/tidy/fences.rs";

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let outside = sources.iter().filter(|s| s.path.ends_with(".rs") && s.path != THIS);
    let outside = outside.filter(|s| !FENCES.iter().any(|f| s.path.starts_with(f)));
    let lax =
        sources.iter().filter(|s| s.path.ends_with("/Cargo.toml") && !s.text.contains("[lints]\nworkspace = true"));
    let lax = lax.map(|s| format!("{}: the workspace's lints have to hold here: [lints] workspace = true", s.path));
    outside.flat_map(findings).chain(lax).collect()
}

fn findings(source: &Source) -> Vec<String> {
    let opens = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        // `unsafe impl` in tests would be a hole too: there is no exemption outside a fence.
        ["unsafe {", "unsafe fn", "unsafe impl", "unsafe trait", "unsafe extern", "#[unsafe(", "(unsafe_code)"]
            .iter()
            .any(|u| code.contains(u))
    };
    let lines = source.text.lines().enumerate().filter(|(_, l)| opens(l));
    lines.map(|(i, _)| format!("{}:{}: unsafe outside its fences", source.path, i + 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_outside_its_fences_is_found() {
        let found = |path: &str, text: &str| check(&[Source { path: path.into(), text: text.into() }]).len();
        for text in
            ["let a = unsafe { f() };", "unsafe impl Send for A {}", "#![allow(unsafe_code)]", "#[unsafe(no_mangle)]"]
        {
            assert_eq!((found("router/src/a.rs", text), found("kernels/src/cpu/a.rs", text)), (1, 0), "{text}");
        }
        assert_eq!(found("xtask/src/a.rs", "unsafe { f() }"), 1);
        assert_eq!(found("router/src/a.rs", "// unsafe { }\nlet unsafe_blocks = 1;"), 0);
    }

    #[test]
    fn a_crate_without_the_lints_is_found() {
        let found = |text: &str| check(&[Source { path: "a/Cargo.toml".into(), text: text.into() }]).len();
        assert_eq!([found("[package]\n"), found("[package]\n\n[lints]\nworkspace = true\n")], [1, 0]);
    }
}
