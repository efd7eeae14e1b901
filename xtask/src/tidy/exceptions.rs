//! Files that break a rule still. A list that only shrinks: who mends one takes it out.

use std::collections::HashSet;

pub(super) struct Exceptions<'a> {
    listed: &'a [&'a str],
    needed: HashSet<&'a str>,
    /// What a listed file does: "is …", "names …".
    breach: &'a str,
}

impl<'a> Exceptions<'a> {
    pub(super) fn new(listed: &'a [&'a str], breach: &'a str) -> Self {
        Self { listed, needed: HashSet::new(), breach }
    }

    /// Whether `path`, which breaks the rule, is listed.
    pub(super) fn cover(&mut self, path: &str) -> bool {
        let listed = self.listed.iter().find(|listed| **listed == path);
        self.needed.extend(listed);
        listed.is_some()
    }

    /// Findings for those that break nothing.
    pub(super) fn unneeded(&self) -> impl Iterator<Item = String> {
        let idle = self.listed.iter().filter(|listed| !self.needed.contains(**listed));
        idle.map(|path| format!("{path} no longer {}: take it out of the exceptions", self.breach))
    }
}
