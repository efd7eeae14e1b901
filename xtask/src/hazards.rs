//! Searches binaries for deliberate hazards: no released binary may contain one.

use std::path::Path;
use std::process::ExitCode;

/// Text of a `#[used]` static in every crate whose feature `testing` compiles hazards: a binary that contains it was built with them.
pub(crate) const MARKER: &str = "BATON_TESTING_HAZARD";

/// Fails if a binary contains the marker. With `--present` first, fails if a binary lacks it, to show that the search works.
pub(crate) fn run(arguments: &[&str]) -> anyhow::Result<ExitCode> {
    let (present, binaries) = match arguments {
        ["--present", binaries @ ..] => (true, binaries),
        binaries => (false, binaries),
    };
    anyhow::ensure!(!binaries.is_empty(), "no binary is named");
    let mut wrong = 0;
    for binary in binaries {
        let found = markers(&std::fs::read(Path::new(binary)).map_err(|error| anyhow::anyhow!("{binary}: {error}"))?);
        println!("hazards: {binary}: {}", if found.is_empty() { "none".to_owned() } else { found.join(", ") });
        wrong += usize::from(found.is_empty() == present);
    }
    let expected = if present { "hold no hazard, so nothing would be noticed" } else { "hold hazards of tests" };
    anyhow::ensure!(wrong == 0, "{wrong} of {} binaries {expected}", binaries.len());
    Ok(ExitCode::SUCCESS)
}

/// The crates whose hazards a binary contains: the word after each marker.
fn markers(binary: &[u8]) -> Vec<String> {
    let at = binary.windows(MARKER.len()).enumerate().filter(|(_, bytes)| *bytes == MARKER.as_bytes());
    let word = |(at, _): (usize, &[u8])| {
        let behind = &binary[at + MARKER.len()..];
        let behind = behind.strip_prefix(b" ").unwrap_or_default();
        let text = behind.iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'-').map(|b| char::from(*b));
        text.collect::<String>()
    };
    let mut words: Vec<String> = at.map(word).collect();
    words.sort();
    words.dedup();
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_in_a_binary_is_found() {
        let folder = std::env::temp_dir().join(format!("baton-xtask-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            std::fs::write(&path, bytes).unwrap();
            path.to_string_lossy().into_owned()
        };
        let clean = write("clean", b"\x7fELF\0 BATON_TESTING");
        let hazard = write("hazard", b"\x7fELF\0BATON_TESTING_HAZARD kernels\0\xff");
        assert!(run(&[&clean]).is_ok() && run(&["--present", &hazard]).is_ok());
        assert!(run(&[&clean, &hazard]).is_err() && run(&["--present", &hazard, &clean]).is_err());
        assert!(run(&[]).is_err() && run(&["/does/not/exist"]).is_err());
        assert_eq!(markers(b"..BATON_TESTING_HAZARD kv-cache, BATON_TESTING_HAZARD kernels"), ["kernels", "kv-cache"]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
