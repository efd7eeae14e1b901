//! The order in which connections are served. Connections fill the pool's device together, and what becomes free goes to the first that asks.

use super::ConnId;
use std::collections::BTreeMap;

/// Begins with another connection each time, so that none waits for room until others need none.
#[derive(Debug, Default)]
pub(super) struct Rotation {
    /// The connection to begin with, or the next one that there is.
    first: ConnId,
}

impl Rotation {
    /// All connections, in the order of this turn.
    pub(super) fn next<T>(&mut self, connections: &BTreeMap<ConnId, T>) -> Vec<ConnId> {
        let all = connections.range(self.first..).chain(connections.range(..self.first));
        let order: Vec<_> = all.map(|(conn, _)| *conn).collect();
        self.first = order.get(1).copied().unwrap_or_default();
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_is_the_first_in_its_turn() {
        let connections: BTreeMap<_, _> = [3, 5, 9].map(|conn| (ConnId(conn), ())).into();
        let mut rotation = Rotation::default();
        let mut next = || rotation.next(&connections).into_iter().map(|conn| conn.0).collect::<Vec<_>>();
        assert_eq!([next(), next(), next(), next()], [[3, 5, 9], [5, 9, 3], [9, 3, 5], [3, 5, 9]]);
        let mut rotation = Rotation { first: ConnId(7) };
        assert_eq!(rotation.next(&connections)[0], ConnId(9), "one that it does not know any more");
        assert!(rotation.next(&BTreeMap::<_, ()>::new()).is_empty());
    }
}
