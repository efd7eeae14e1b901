//! Limits the blocks that a peer could leave in quarantine here, and decides whether it may be granted more. Pure.
//!
//! While a peer has blocks in quarantine, it is granted no others. On a lane that can be fenced, quarantine is short: the connection is
//! closed, and then the blocks are released. On a lane without a fence, the blocks stay quarantined as long as the peer's process may live,
//! and all its granted blocks may become quarantined at once. There, granted blocks count as quarantined already, so that the bound always
//! holds.

use baton_types::seeded;

/// The blocks of one peer, over all its incarnations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QuarantineLoad {
    pub quarantined: usize,
    /// Blocks granted or requested, on lanes without a fence.
    pub unfenced: usize,
}

/// Decision on a peer's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Ask the worker to reserve blocks.
    Ask,
    /// Wait until other handoffs of the peer have ended.
    Wait,
    /// Refuse: the peer has quarantined blocks, or it asks for more than the bound ever allows.
    Refuse,
}

impl QuarantineLoad {
    /// Whether a handoff over `wanted` blocks may begin when at most `max` may be quarantined. `fences`: closing the lane fences it.
    pub(crate) fn admits(self, wanted: usize, fences: bool, max: usize) -> Admission {
        let fences = fences || seeded!(LateQuarantineBound);
        if self.quarantined > 0 || (!fences && wanted > max) {
            Admission::Refuse
        } else if !fences && self.unfenced + wanted > max {
            Admission::Wait
        } else {
            Admission::Ask
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Admission::{Ask, Refuse, Wait};

    #[test]
    fn what_is_quarantined_bars_its_writer_and_what_nothing_fences_counts_before_it_is() {
        // quarantined, granted without a fence, wanted, and the decision on lanes with a fence and without one
        let cases = [
            (0, 0, 8, Ask, Ask),
            (0, 0, 9, Ask, Refuse),
            (0, 5, 3, Ask, Ask),
            (0, 5, 4, Ask, Wait),
            (0, 8, 1, Ask, Wait),
            (1, 0, 1, Refuse, Refuse),
            (3, 3, 1, Refuse, Refuse),
            (9, 4, 1, Refuse, Refuse),
        ];
        for (quarantined, unfenced, wanted, fenced, free) in cases {
            let quarantine_load = QuarantineLoad { quarantined, unfenced };
            let got = [true, false].map(|fences| quarantine_load.admits(wanted, fences, 8));
            assert_eq!(got, [fenced, free], "{quarantine_load:?} and {wanted} more");
        }
    }

    #[test]
    fn whatever_is_granted_without_a_fence_stays_within_the_bound() {
        let (mut quarantine_load, max) = (QuarantineLoad::default(), 10);
        for wanted in [3, 4, 5, 2, 9, 1, 1, 1] {
            if quarantine_load.admits(wanted, false, max) == Ask {
                quarantine_load.unfenced += wanted;
            }
            assert!(quarantine_load.unfenced <= max, "{quarantine_load:?}");
        }
        assert_eq!(quarantine_load.unfenced, max);
    }
}
