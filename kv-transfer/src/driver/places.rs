//! Places of peers at this side: connections, open puts and gets, and calls that wait for the worker. They are bounded in total, and each
//! peer may have only a share, so that one that is broken or hostile leaves places to the others.
//!
//! | Places | In total | For one peer |
//! |---|---|---|
//! | connections that peers opened | `accepted_max` | an eighth |
//! | puts, and gets | `accepted_handoffs_max` each | half |
//! | calls that wait when an offer comes | twice `accepted_handoffs_max` | half |
//!
//! A share is never less than [`SHARE_MIN`] places. A peer is an instance, over all its incarnations and shards, by the name in its greeting.
//! Certificates name a role and no instance ([security](../../../docs/security.md)): whoever has a worker's key may greet by several names.

use crate::RefuseReason;
use baton_types::InstanceId;

/// Least share of one peer.
const SHARE_MIN: usize = 16;

/// Connections that leave no place for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{open} are open, of {open_max}; {ended} have ended and wait for the pool's device, of {all_max} in all")]
pub(super) struct Full {
    pub(super) open: usize,
    pub(super) open_max: usize,
    pub(super) ended: usize,
    pub(super) all_max: usize,
}

/// Why there is no place for a peer's connection or offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoPlace {
    #[error("no place for another connection: {0}")]
    Connections(Full),
    #[error("no place for another connection of this peer: {0}")]
    ItsConnections(Full),
    #[error("{0} puts of peers are open")]
    Puts(usize),
    #[error("{0} puts of this peer are open")]
    ItsPuts(usize),
    #[error("{0} gets of peers are open")]
    Gets(usize),
    #[error("{0} gets of this peer are open")]
    ItsGets(usize),
    #[error("{0} calls wait for the worker")]
    Calls(usize),
    #[error("{0} calls of this peer's handoffs wait for the worker")]
    ItsCalls(usize),
}

impl NoPlace {
    /// The reason that the peer is told.
    pub(super) const REASON: RefuseReason = RefuseReason::Busy;
}

/// Used places of one kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    pub(super) in_all: usize,
    pub(super) by_peer: usize,
}

impl Used {
    /// Places that these peers use, and those of `peer` among them.
    pub(super) fn of<'a>(peers: impl Iterator<Item = &'a InstanceId>, peer: &InstanceId) -> Self {
        peers.fold(Self { in_all: 0, by_peer: 0 }, |used, user| Self {
            in_all: used.in_all + 1,
            by_peer: used.by_peer + usize::from(user == peer),
        })
    }

    /// Fails if all of `max` places are used, or those that one peer may have.
    pub(super) fn check(
        self,
        max: usize,
        all_used: fn(usize) -> NoPlace,
        its_used: fn(usize) -> NoPlace,
    ) -> Result<(), NoPlace> {
        match self {
            Self { in_all, .. } if in_all >= max => Err(all_used(in_all)),
            Self { by_peer, .. } if by_peer >= handoffs_of_one(max) => Err(its_used(by_peer)),
            _ => Ok(()),
        }
    }
}

/// Of `max` places of handoffs, those that one peer may have.
const fn handoffs_of_one(max: usize) -> usize {
    share(max, 2)
}

/// Of `max` connections, those that one peer may have.
pub(super) const fn connections_of_one(max: usize) -> usize {
    share(max, 8)
}

const fn share(max: usize, parts: usize) -> usize {
    let part = max / parts;
    if part > SHARE_MIN { part } else { SHARE_MIN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_leaves_places_to_the_others() {
        let check = |in_all, by_peer| Used { in_all, by_peer }.check(1024, NoPlace::Puts, NoPlace::ItsPuts);
        assert_eq!([check(511, 511), check(1023, 0)], [Ok(()); 2]);
        assert_eq!(check(512, 512), Err(NoPlace::ItsPuts(512)));
        assert_eq!(check(1024, 0), Err(NoPlace::Puts(1024)));
        assert_eq!([8, 100, 512].map(connections_of_one), [16, 16, 64]);
    }
}
