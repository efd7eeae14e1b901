//! Whether a worker may write its record under its instance name. Pure.

use crate::membership::JoinError;
use baton_types::{InstanceId, InstanceRecord, Party};

/// The current content of the worker's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    /// The process that wrote it, or why it cannot be read.
    pub(super) holder: Result<Holder, String>,
    /// The key's lease; 0 without one.
    pub(super) lease: i64,
    /// The revision that wrote it.
    pub(super) revision: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) party: Party,
    pub(super) endpoint: String,
}

/// Why the name cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// Another process holds it.
    #[error(transparent)]
    Taken(#[from] JoinError),
    /// It is on another process's lease, and its record cannot be read.
    #[error(
        "instance {instance} is registered on another lease, with a record that cannot be read ({problem}), by a start that replaced \
         this one; two running processes need two instance ids"
    )]
    Unreadable {
        instance: InstanceId,
        /// What is wrong with the record.
        problem: String,
    },
}

/// What the worker does with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// Write the record if the key still has this revision; 0: if the key does not exist.
    Write(i64),
    /// The record is already on this worker's lease.
    Held(i64),
    /// Wait until the name is free.
    Refused(Refusal),
}

/// `held_before`: this process has held the name before. A process may take a name over from another incarnation once
/// only. If it later finds another incarnation there, it was replaced.
pub(super) fn claim(ours: &InstanceRecord, lease: i64, held_before: bool, found: Option<&Standing>) -> Claim {
    let Some(found) = found else { return Claim::Write(0) };
    let (instance, incarnation) = (ours.party.instance.clone(), ours.party.incarnation);
    let holder = match &found.holder {
        Ok(holder) => holder,
        // Every incarnation puts its record on its own lease, so a record without a lease has no owner.
        Err(problem) if held_before && ![0, lease].contains(&found.lease) => {
            return Claim::Refused(Refusal::Unreadable { instance, problem: problem.clone() });
        }
        Err(_) => return Claim::Write(found.revision),
    };
    let endpoint = holder.endpoint.clone();
    if holder.party == ours.party {
        return match (holder.endpoint == ours.endpoint, found.lease == lease) {
            (true, true) => Claim::Held(found.revision),
            (true, false) => Claim::Write(found.revision),
            (false, _) => Claim::Refused(JoinError::Duplicate { instance, incarnation, endpoint }.into()),
        };
    }
    if held_before {
        return Claim::Refused(JoinError::Replaced { instance, current: holder.party.incarnation, endpoint }.into());
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
            Standing { holder: Ok(Holder { party, endpoint }), lease, revision: 7 }
        };
        let check = |held_before: bool, found: Option<Standing>| claim(&ours, 5, held_before, found.as_ref());
        assert_eq!(check(false, None), Claim::Write(0));
        assert_eq!(check(true, None), Claim::Write(0));
        assert_eq!(check(true, Some(standing(2, 5))), Claim::Held(7));
        assert_eq!(check(true, Some(standing(2, 4))), Claim::Write(7), "left by a lease that was lost");
        assert_eq!(check(false, Some(standing(1, 4))), Claim::Write(7));
        assert!(matches!(
            check(true, Some(standing(3, 6))),
            Claim::Refused(Refusal::Taken(JoinError::Replaced { .. }))
        ));
        let elsewhere = Holder { party: ours.party.clone(), endpoint: "127.0.0.1:9".into() };
        let clone = Standing { holder: Ok(elsewhere), ..standing(2, 4) };
        assert!(matches!(check(false, Some(clone)), Claim::Refused(Refusal::Taken(JoinError::Duplicate { .. }))));
    }

    #[test]
    fn a_record_that_cannot_be_read_is_anothers_only_on_its_lease() {
        let ours = record("d-0", 2);
        let check = |held_before: bool, lease: i64| {
            let found = Standing { holder: Err("garbage".into()), lease, revision: 7 };
            claim(&ours, 5, held_before, Some(&found))
        };
        for (held_before, lease) in [(false, 0), (false, 5), (false, 6), (true, 0), (true, 5)] {
            assert_eq!(check(held_before, lease), Claim::Write(7), "{held_before} {lease}");
        }
        assert!(matches!(check(true, 6), Claim::Refused(Refusal::Unreadable { .. })));
    }
}
