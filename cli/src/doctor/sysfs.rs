//! The kernel's information on devices, below a root that is `/` except in tests.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::path::Path;

/// Names in a folder, sorted; empty if it cannot be read.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// First line of a file.
pub(super) fn line(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    Some(text.lines().next()?.trim().to_owned())
}

/// A device node of `/dev`. `/sys` and `/proc` show the host's devices; `/dev` shows those that a container was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Opens,
    Missing,
    /// It exists and cannot be opened, for this reason.
    Closed(String),
}

/// Opens the node as the drivers' libraries do, to read and write, and closes it again.
pub(super) fn node(path: &Path) -> Node {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Node::Opens,
        Err(error) if error.kind() == ErrorKind::NotFound => Node::Missing,
        Err(error) => Node::Closed(error.to_string()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A root with these files; a path that ends with `/` is a folder, which cannot be opened for writing.
    pub(in crate::doctor) fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let file = root.path().join(path);
            match path.ends_with('/') {
                true => fs::create_dir_all(file).unwrap(),
                false => {
                    fs::create_dir_all(file.parent().unwrap()).unwrap();
                    fs::write(file, text).unwrap();
                }
            }
        }
        root
    }

    #[test]
    fn nodes_are_missing_or_closed_or_open() {
        let root = root(&[("dev/open", ""), ("dev/closed/", "")]);
        let at = |name: &str| node(&root.path().join("dev").join(name));
        assert_eq!((at("open"), at("none")), (Node::Opens, Node::Missing));
        assert!(matches!(at("closed"), Node::Closed(why) if !why.is_empty()));
    }
}
