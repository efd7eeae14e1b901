//! Whether a worker may write its record under its name. Pure.

use crate::membership::JoinError;
use baton_types::{InstanceRecord, Party};

/// What stands under the worker's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    /// Whose it is.
    pub(super) party: Party,
    /// Where that one listens.
    pub(super) endpoint: String,
    /// Lease that keeps it.
    pub(super) lease: i64,
    /// Revision that wrote it.
    pub(super) revision: i64,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// Write, if what stood there at this revision still does; 0 where nothing did.
    Write(i64),
    /// The record stands on this worker's lease.
    Held(i64),
    /// Wait until the name is free.
    Refused(JoinError),
}

/// `held_before`: this process had the name once. A process takes a name over only the first time: who finds another start there later
/// was replaced by it.
pub(super) fn claim(ours: &InstanceRecord, lease: i64, held_before: bool, found: Option<&Standing>) -> Claim {
    let Some(found) = found else { return Claim::Write(0) };
    let (instance, incarnation) = (ours.party.instance.clone(), ours.party.incarnation);
    let endpoint = found.endpoint.clone();
    if found.party == ours.party {
        return match (found.endpoint == ours.endpoint, found.lease == lease) {
            (true, true) => Claim::Held(found.revision),
            (true, false) => Claim::Write(found.revision),
            (false, _) => Claim::Refused(JoinError::Duplicate { instance, incarnation, endpoint }),
        };
    }
    if held_before {
        return Claim::Refused(JoinError::Replaced { instance, current: found.party.incarnation, endpoint });
    }
    Claim::Write(found.revision)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::conformance::record;

    #[test]
    fn a_name_is_taken_once_and_never_taken_back() {
        let ours = record("d-0", 2);
        let standing = |incarnation: u64, lease: i64| {
            let InstanceRecord { party, endpoint, .. } = record("d-0", incarnation);
            Standing { party, endpoint, lease, revision: 7 }
        };
        let check = |held_before: bool, found: Option<Standing>| claim(&ours, 5, held_before, found.as_ref());
        assert_eq!(check(false, None), Claim::Write(0));
        assert_eq!(check(true, None), Claim::Write(0));
        assert_eq!(check(true, Some(standing(2, 5))), Claim::Held(7));
        assert_eq!(check(true, Some(standing(2, 4))), Claim::Write(7), "left by a lease that was lost");
        assert_eq!(check(false, Some(standing(1, 4))), Claim::Write(7));
        assert!(matches!(check(true, Some(standing(3, 6))), Claim::Refused(JoinError::Replaced { .. })));
        let clone = Standing { endpoint: "127.0.0.1:9".into(), ..standing(2, 4) };
        assert!(matches!(check(false, Some(clone)), Claim::Refused(JoinError::Duplicate { .. })));
    }
}
