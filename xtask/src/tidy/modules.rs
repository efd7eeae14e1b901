//! A module with files of its own is `x/mod.rs`, never `x.rs` beside `x/`, for one style throughout.

use super::Source;
use std::collections::HashSet;

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let rust = || sources.iter().map(|s| s.path.as_str()).filter(|path| path.ends_with(".rs"));
    let folders: HashSet<&str> = rust().filter_map(|path| Some(path.rsplit_once('/')?.0)).collect();
    let mut found = Vec::new();
    for path in rust() {
        let module = path.trim_end_matches(".rs");
        if folders.contains(module) {
            found.push(format!("{path}: has files of its own: move it to {module}/mod.rs"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_style_of_modules() {
        let found = |paths: &[&str]| {
            let source = |path: &&str| Source { path: (*path).into(), text: String::new() };
            check(&paths.iter().map(source).collect::<Vec<_>>()).len()
        };
        assert_eq!(found(&["a/src/x/mod.rs", "a/src/x/y.rs", "a/src/z.rs"]), 0);
        assert_eq!(found(&["a/src/x.rs", "a/src/x/y.rs"]), 1);
    }
}
