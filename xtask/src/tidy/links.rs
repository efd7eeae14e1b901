//! Links between files in Markdown resolve, line anchors and heading anchors aside.

use super::Source;
use std::path::Path;

pub(super) fn check(root: &Path, sources: &[Source]) -> Vec<String> {
    let pages = sources.iter().filter(|s| s.path.ends_with(".md"));
    pages.flat_map(|page| broken(root, page)).collect()
}

fn broken(root: &Path, page: &Source) -> Vec<String> {
    let folder = root.join(&page.path).parent().map(Path::to_path_buf).unwrap_or_default();
    let mut found = Vec::new();
    for (number, line) in page.text.lines().enumerate() {
        for target in targets(line) {
            let file = target.split('#').next().unwrap_or_default();
            let elsewhere = file.is_empty() || file.contains("://") || file.starts_with("mailto:");
            if !elsewhere && !folder.join(file).exists() {
                found.push(format!("{}:{}: link to {file}, which does not exist", page.path, number + 1));
            }
        }
    }
    found
}

/// The targets of `[text](target)` in a line.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next()).map(|t| t.split(' ').next().unwrap_or(t))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_link_is_found() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let text = "[a](src/main.rs#L1) [b](src/gone.rs) [c](#here) [d](https://e.org/x)".to_owned();
        assert_eq!(check(root, &[Source { path: "README.md".into(), text }]).len(), 1);
    }

    #[test]
    fn targets_are_found() {
        let line = "see [a](x/y.rs), [b](https://e.org/#z) and [c](w.md#part \"title\")";
        assert_eq!(targets(line).collect::<Vec<_>>(), ["x/y.rs", "https://e.org/#z", "w.md#part"]);
    }
}
