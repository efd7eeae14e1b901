//! Range checks at load, so that an impossible limit never reaches a running process.

use std::fmt::Display;
use std::ops::RangeInclusive;

/// A section that checks the ranges of its values.
pub trait Check {
    /// Reports every value out of range to `at`.
    fn check(&self, at: &mut Checker);
}

/// Collects problems under the paths of their keys.
#[derive(Debug, Default)]
pub struct Checker {
    path: Vec<&'static str>,
    problems: Vec<(String, String)>,
}

impl Checker {
    /// Checks the sub-section `name`.
    pub fn section(&mut self, name: &'static str, section: &dyn Check) -> &mut Self {
        self.path.push(name);
        section.check(self);
        self.path.pop();
        self
    }

    /// The value of key `name` must lie in `range`.
    pub fn range<T: PartialOrd + Display>(
        &mut self,
        name: &'static str,
        value: T,
        range: RangeInclusive<T>,
    ) -> &mut Self {
        if !range.contains(&value) {
            self.problem(name, format!("must be {} to {}, got {value}", range.start(), range.end()));
        }
        self
    }

    /// The value of key `name` must fulfil `ok`, else it must be `expected`.
    pub fn require(&mut self, name: &'static str, ok: bool, expected: &str) -> &mut Self {
        if !ok {
            self.problem(name, format!("must be {expected}"));
        }
        self
    }

    /// Reports a problem with key `name`.
    pub fn problem(&mut self, name: &'static str, problem: impl Into<String>) {
        let key = self.path.iter().copied().chain([name]).collect::<Vec<_>>().join(".");
        self.problems.push((key, problem.into()));
    }

    /// Pairs of key and problem.
    pub fn into_problems(self) -> Vec<(String, String)> {
        self.problems
    }
}
