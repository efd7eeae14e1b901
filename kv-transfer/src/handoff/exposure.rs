//! What a peer could leave in quarantine here, and whether more may be granted to it. Pure.
//!
//! Blocks that a peer was granted may come to be quarantined all at once, when it is lost. Where its lane has a fence they are back
//! within moments. Where it has none they stay as long as its process may live: there, what is granted counts as if it were quarantined
//! already, so that the bound holds whatever happens.

/// The blocks of one peer, over all its incarnations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exposure {
    /// Quarantined.
    pub quarantined: usize,
    /// Granted or being asked for, on lanes that nothing fences.
    pub unfenced: usize,
}

/// What becomes of a peer's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The worker is asked for room.
    Ask,
    /// Not before other handoffs of the peer are over.
    Wait,
    /// Not at all, as long as nothing of what is quarantined returns.
    Refuse,
}

impl Exposure {
    /// Whether a handoff over `wanted` blocks may begin where at most `max` may be quarantined; `fences` says whether closing its lane does.
    pub fn admits(self, wanted: usize, fences: bool, max: usize) -> Admission {
        if self.quarantined >= max || (!fences && self.quarantined + wanted > max) {
            Admission::Refuse
        } else if !fences && self.quarantined + self.unfenced + wanted > max {
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
    fn what_nothing_fences_counts_before_it_is_quarantined() {
        // quarantined, granted without a fence, wanted, and what becomes of it: on lanes with a fence, and without one
        let cases = [
            (0, 0, 8, Ask, Ask),
            (0, 0, 9, Ask, Refuse),
            (0, 5, 3, Ask, Ask),
            (0, 5, 4, Ask, Wait),
            (3, 0, 5, Ask, Ask),
            (3, 0, 6, Ask, Refuse),
            (3, 3, 3, Ask, Wait),
            (8, 0, 1, Refuse, Refuse),
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
