//! Limits the length of files: past 500 lines a file usually holds two ideas.

use super::Source;

const LINES_MAX: usize = 500;

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let long = |s: &&Source| s.path.ends_with(".rs") && !s.is_generated() && s.text.lines().count() > LINES_MAX;
    let found = sources.iter().filter(long);
    found
        .map(|s| format!("{}: {} lines, the most is {LINES_MAX}: split it by idea", s.path, s.text.lines().count()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_is_found() {
        let found = |path: &str, lines: usize| check(&[Source { path: path.into(), text: "\n".repeat(lines) }]).len();
        assert_eq!(
            [found("a/src/b.rs", 500), found("a/src/b.rs", 501), found("proto/src/generated/a.rs", 501)],
            [0, 1, 0]
        );
    }
}
