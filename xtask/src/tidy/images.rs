//! Checks the files that container images are built from: cargo reads the manifest of every workspace member, so none may be missing.

use super::Source;

/// The files sent to container builds, one pattern per line: everything is excluded except what follows a `!`.
const SENT: &str = ".dockerignore";

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let Some(ignore) = sources.iter().find(|source| source.path == SENT) else {
        return vec![format!("{SENT} is not there: images would be built from everything")];
    };
    let sent: Vec<&str> = ignore.text.lines().filter_map(|line| line.strip_prefix('!')).collect();
    let is_sent = |path: &str| sent.iter().any(|sent| path.strip_prefix(sent).is_some_and(is_below));
    let manifests = sources.iter().map(|source| &source.path).filter(|path| path.ends_with("Cargo.toml"));
    manifests
        .filter(|path| !is_sent(path))
        .map(|path| format!("{SENT} keeps {path} from the images: add its folder"))
        .collect()
}

/// Whether the rest of a path denotes a folder or something in it.
fn is_below(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_that_is_not_sent_is_found() {
        let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
        let found = |sent: &str| {
            let sources =
                ["Cargo.toml", "a/Cargo.toml", "a-b/Cargo.toml", "tests/c/Cargo.toml"].map(|path| source(path, ""));
            check(&[&sources[..], &[source(SENT, sent)]].concat()).len()
        };
        assert_eq!(found("*\n!Cargo.toml\n!a\n!a-b\n!tests/c\n"), 0);
        assert_eq!(found("*\n!Cargo.toml\n!a\n!tests/src\n"), 2);
        assert_eq!(check(&[]).len(), 1);
    }
}
