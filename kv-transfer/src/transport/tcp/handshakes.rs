//! Which connections go on with their handshakes in a turn.
//!
//! Whoever reaches the socket can begin handshakes. Each costs this side a key exchange and a signature, or the verification of a
//! certificate, on the thread that also moves KV. So a turn takes at most [`STEPS_A_TURN_MAX`] steps, however many connections there are; the
//! others wait in order. One that is not done in time is closed, like any that does not greet.

use crate::transport::ConnId;

/// Most steps of one turn. A step processes what one read brings, once per connection.
const STEPS_A_TURN_MAX: usize = 2;

#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// The connection that made the last step.
    last: ConnId,
}

/// Connections whose handshakes go on in one turn.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Steps {
    pub(super) of: Vec<ConnId>,
    /// Others wait for the next turn.
    pub(super) others_wait: bool,
}

impl Handshakes {
    /// Chooses among the connections that have bytes to process, given in order.
    pub(super) fn next(&mut self, ready: impl Iterator<Item = ConnId>) -> Steps {
        let mut of: Vec<_> = ready.collect();
        let after_last = of.partition_point(|conn| *conn <= self.last);
        of.rotate_left(after_last);
        let others_wait = of.len() > STEPS_A_TURN_MAX;
        of.truncate(STEPS_A_TURN_MAX);
        self.last = of.last().copied().unwrap_or(self.last);
        Steps { of, others_wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_has_its_turn() {
        let mut handshakes = Handshakes::default();
        let mut next = |ready: &[u64]| {
            let Steps { of, others_wait } = handshakes.next(ready.iter().copied().map(ConnId));
            (of.into_iter().map(|conn| conn.0).collect::<Vec<_>>(), others_wait)
        };
        let all = [3, 5, 9, 12, 20];
        assert_eq!(next(&all), (vec![3, 5], true));
        assert_eq!(next(&all), (vec![9, 12], true));
        assert_eq!(next(&all), (vec![20, 3], true));
        // Some have ended, and others are new.
        assert_eq!(next(&[5, 21, 22]), (vec![5, 21], true));
        assert_eq!(next(&[22]), (vec![22], false));
        assert_eq!(next(&[]), (vec![], false));
        assert_eq!(next(&[5, 23]), (vec![23, 5], false));
    }
}
