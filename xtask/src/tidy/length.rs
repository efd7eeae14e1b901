//! Past 500 lines a file usually holds two ideas.

use super::Source;

const LINES_MAX: usize = 500;

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let long = |s: &&Source| s.path.ends_with(".rs") && !s.is_generated() && s.text.lines().count() > LINES_MAX;
    let found = sources.iter().filter(long);
    found
        .map(|s| format!("{}: {} lines, the most is {LINES_MAX}: split it by idea", s.path, s.text.lines().count()))
        .collect()
}
