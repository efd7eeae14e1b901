//! Which connections go on with their handshakes in a turn.
//!
//! Whoever reaches the socket can begin handshakes. Each costs this side a key exchange and a signature, or the verification of a
//! certificate, on the thread that also moves KV. So a turn takes [`STEPS_A_TURN`] steps, or one for each [`STEP_EACH`] since the last turn,
//! however many connections there are. It takes no further step once its steps have used up the time of so many ordinary ones: a stranger
//! chooses what its step costs. The others wait in the order in which they became ready, so that those which connect later keep nobody
//! waiting. One that is not done in time is closed, like any that does not greet.

use crate::transport::ConnId;
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Steps of a short turn. A step processes what one read brings, once per connection.
const STEPS_A_TURN: usize = 2;

/// A longer turn takes one step more for each of these times: handshakes take a fifth of the thread, or less, and go on.
const STEP_EACH: Duration = Duration::from_millis(2);

/// However long the last turn was, this one takes no more steps: those of 100 ms. Else each long turn would make the next one long.
const STEPS_A_LONG_TURN_MAX: usize = 50;

/// What an ordinary step takes at most, a fifth of [`STEP_EACH`].
const STEP_TAKES: Duration = Duration::from_micros(400);

#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// The connections that have bytes to process, the longest ready first.
    waiting: VecDeque<ConnId>,
    last_turn: Option<Instant>,
    /// Steps that this turn may still take, and the time in which it begins them.
    steps: usize,
    time: Duration,
}

impl Handshakes {
    /// Begins a turn, in which these connections have bytes to process.
    pub(super) fn begin(&mut self, now: Instant, ready: impl Iterator<Item = ConnId>) {
        let mut ready: BTreeSet<_> = ready.collect();
        self.waiting.retain(|conn| ready.remove(conn));
        self.waiting.extend(ready);
        let since = self.last_turn.replace(now).map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        let steps = since.div_duration_f64(STEP_EACH) as usize;
        self.steps = steps.clamp(STEPS_A_TURN, STEPS_A_LONG_TURN_MAX);
        self.time = STEP_TAKES * self.steps as u32;
    }

    /// The connection whose handshake goes on next in this turn, of which the steps have taken the time `spent` so far.
    pub(super) fn next(&mut self, spent: Duration) -> Option<ConnId> {
        if self.steps == 0 || spent >= self.time {
            return None;
        }
        let next = self.waiting.pop_front()?;
        self.steps -= 1;
        Some(next)
    }

    /// Whether connections wait for the next turn.
    pub(super) fn others_wait(&self) -> bool {
        !self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps of a turn that comes so long after the last one, each of which takes `each`.
    fn steps(handshakes: &mut Handshakes, ms: u64, ready: &[u64], each: Duration) -> (Vec<u64>, bool) {
        let now = handshakes.last_turn.unwrap_or_else(Instant::now) + Duration::from_millis(ms);
        handshakes.begin(now, ready.iter().copied().map(ConnId));
        let mut of = Vec::new();
        while let Some(conn) = handshakes.next(each * of.len() as u32) {
            of.push(conn.0);
        }
        (of, handshakes.others_wait())
    }

    fn next(handshakes: &mut Handshakes, ms: u64, ready: &[u64]) -> (Vec<u64>, bool) {
        steps(handshakes, ms, ready, Duration::from_micros(300))
    }

    #[test]
    fn each_connection_has_its_turn() {
        let mut handshakes = Handshakes::default();
        let mut next = |ready: &[u64]| next(&mut handshakes, 1, ready);
        let all = [3, 5, 9, 12, 20];
        assert_eq!(next(&all), (vec![3, 5], true));
        assert_eq!(next(&all), (vec![9, 12], true));
        assert_eq!(next(&all), (vec![20, 3], true));
        // Some have ended, and others are new.
        assert_eq!(next(&[5, 9, 21, 22]), (vec![5, 9], true));
        assert_eq!(next(&[22]), (vec![22], false));
        assert_eq!(next(&[]), (vec![], false));
        assert_eq!(next(&[5, 23]), (vec![5, 23], false));
    }

    #[test]
    fn those_that_keep_connecting_keep_nobody_waiting() {
        let mut handshakes = Handshakes::default();
        // Sixty are ready already; one more becomes ready, and then two new ones in each turn.
        let mut ready: Vec<u64> = (1..=61).collect();
        for turn in 0..31 {
            let (of, others_wait) = next(&mut handshakes, 1, &ready);
            assert!(others_wait && of.len() == 2);
            if of.contains(&61) {
                assert_eq!(turn, 30);
                return;
            }
            ready.retain(|conn| !of.contains(conn));
            ready.extend([1_000 + 2 * turn, 1_001 + 2 * turn]);
        }
        panic!("the first ones still wait");
    }

    #[test]
    fn a_long_turn_takes_more_steps() {
        let mut handshakes = Handshakes::default();
        let all: Vec<u64> = (1..=60).collect();
        let steps = [0, 1, 5, 20, 80, 2_000].map(|ms| next(&mut handshakes, ms, &all).0.len());
        assert_eq!(steps, [2, 2, 2, 10, 40, 50]);
    }

    #[test]
    fn costly_steps_end_a_turn_early_and_the_others_stay_first() {
        let mut handshakes = Handshakes::default();
        let all: Vec<u64> = (1..=60).collect();
        let mut costly = |ms| steps(&mut handshakes, ms, &all, Duration::from_millis(3));
        assert_eq!(costly(1), (vec![1], true), "the second would begin after 0.8 ms");
        // Ten ordinary steps would take 4 ms.
        assert_eq!(costly(20), (vec![2, 3], true));
        assert_eq!(costly(1), (vec![4], true));
        // A turn that was long with handshakes does not let all of them go on at once.
        assert_eq!(costly(2_000).0.len(), 7);
    }
}
