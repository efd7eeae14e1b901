//! Registered workers, in a worker's own view.

use baton_types::{Incarnation, InstanceId, Party};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The registered incarnations of workers, from one or several sources: every router where this worker registers, or
/// etcd. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Members(Arc<RwLock<Vec<Roll>>>);

/// The last state of one source.
type Roll = BTreeMap<InstanceId, Incarnation>;

impl Members {
    /// A fixed set, for a worker without sources.
    pub fn of(parties: impl IntoIterator<Item = Party>) -> Self {
        let members = Self::default();
        members.replace(0, parties);
        members
    }

    /// Whether this incarnation is registered, according to any source.
    pub fn contains(&self, party: &Party) -> bool {
        self.0.read().iter().any(|roll| roll.get(&party.instance) == Some(&party.incarnation))
    }

    /// All members that `source` lists.
    #[doc(hidden)] // For simulations.
    pub fn replace(&self, source: usize, parties: impl IntoIterator<Item = Party>) {
        self.change(source, Change { anew: true, joined: parties.into_iter().collect(), left: vec![] }, usize::MAX);
    }

    /// Applies a change from `source`; returns whether there was room for all of it.
    pub(super) fn change(&self, source: usize, change: Change, members_max: usize) -> bool {
        let mut rolls = self.0.write();
        if rolls.len() <= source {
            rolls.resize_with(source + 1, Roll::new);
        }
        let known = &mut rolls[source];
        known.retain(|instance, _| !change.anew && !change.left.iter().any(|name| name == instance.as_str()));
        for Party { instance, incarnation } in change.joined {
            if known.len() >= members_max && !known.contains_key(&instance) {
                return false;
            }
            known.insert(instance, incarnation);
        }
        true
    }
}

/// A change from one source.
#[derive(Clone, Debug, Default)]
pub(super) struct Change {
    /// The earlier state of the source is void.
    pub(super) anew: bool,
    /// Each replaces an earlier start.
    pub(super) joined: Vec<Party>,
    /// Instances that are no longer registered.
    pub(super) left: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::super::conformance::record;
    use super::*;

    #[test]
    fn a_start_stands_as_long_as_one_source_says_so() {
        let (old, new) = (record("p-0", 1).party, record("p-0", 2).party);
        let members = Members::of([old.clone()]);
        let says = |source, joined: &[&Party], left: &[&str]| {
            let joined = joined.iter().map(|party| (*party).clone()).collect();
            members.change(source, Change { anew: false, joined, left: left.iter().map(|l| (*l).into()).collect() }, 2)
        };
        assert!(members.contains(&old) && !members.contains(&new));
        assert!(says(1, &[&new], &[]));
        assert!(members.contains(&old) && members.contains(&new), "the sources differ");
        assert!(says(0, &[&new], &[]));
        assert!(!members.contains(&old), "replaced");
        assert!(says(0, &[], &["p-0"]));
        assert!(members.contains(&new), "the other source knows it");
        members.replace(1, []);
        assert!(!members.contains(&new));

        let other = |index| record(&format!("d-{index}"), index).party;
        assert!(!says(0, &[&other(0), &other(1), &other(2)], &[]), "no source fills the memory");
        assert!(members.contains(&other(1)) && !members.contains(&other(2)));
        assert!(says(0, &[&other(2)], &["d-0"]), "there is room again");
        assert!(says(0, &[&Party { incarnation: Incarnation(9), ..other(2) }], &[]), "no new name");
    }
}
