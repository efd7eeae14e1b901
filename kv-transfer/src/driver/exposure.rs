//! What a peer could leave in quarantine here, and whether more may be granted to it. Pure.
//!
//! While any block is quarantined for a peer, it is granted no other. Where its lane has a fence that is over within moments: the connection
//! is closed with the quarantine, and the blocks are back once it is. Where it has none they stay as long as its process may live, and what
//! it was granted may come to be quarantined all at once: there, what is granted counts as if it were quarantined already, so that the bound
//! holds whatever happens.

use baton_types::seeded;

/// The blocks of one peer, over all its incarnations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Exposure {
    pub quarantined: usize,
    /// Granted or being asked for, on lanes that nothing fences.
    pub unfenced: usize,
}

/// What becomes of a peer's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// The worker is asked for room.
    Ask,
    /// Not before other handoffs of the peer are over.
    Wait,
    /// Not at all: its blocks are quarantined, or it asks for more than may ever be.
    Refuse,
}

impl Exposure {
    /// Whether a handoff over `wanted` blocks may begin where at most `max` may be quarantined; `fences` says whether closing its lane does.
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
        // quarantined, granted without a fence, wanted, and what becomes of it: on lanes with a fence, and without one
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
            let exposure = Exposure { quarantined, unfenced };
            let got = [true, false].map(|fences| exposure.admits(wanted, fences, 8));
            assert_eq!(got, [fenced, free], "{exposure:?} and {wanted} more");
        }
    }

    #[test]
    fn whatever_is_granted_without_a_fence_stays_within_the_bound() {
        let (mut exposure, max) = (Exposure::default(), 10);
        for wanted in [3, 4, 5, 2, 9, 1, 1, 1] {
            if exposure.admits(wanted, false, max) == Ask {
                exposure.unfenced += wanted;
            }
            assert!(exposure.unfenced <= max, "{exposure:?}");
        }
        assert_eq!(exposure.unfenced, max);
    }
}
