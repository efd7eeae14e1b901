//! Which connection to close when peers do not read what is queued for them. Pure.

use crate::transport::ConnId;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Memory of what is queued for one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    pub(super) conn: ConnId,
    pub(super) host: IpAddr,
    pub(super) bytes: usize,
}

/// The connection to close while all queues together take more than `max` bytes: of the host for which the most is queued, the one with the
/// most. So a host that leaves a little unread on many connections does not close those of others, for which much is queued for a moment.
pub(super) fn to_close(queued: impl Iterator<Item = Queued> + Clone, max: usize) -> Option<ConnId> {
    // Mostly they are far below it.
    if queued.clone().map(|queued| queued.bytes).sum::<usize>() <= max {
        return None;
    }
    let mut by_host: BTreeMap<IpAddr, (usize, (usize, ConnId))> = BTreeMap::new();
    for Queued { conn, host, bytes } in queued {
        let (all, largest) = by_host.entry(host).or_default();
        *all += bytes;
        *largest = (*largest).max((bytes, conn));
    }
    by_host.into_values().max().map(|(_, (_, conn))| conn)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_that_leaves_the_most_unread_loses_its_largest_queue() {
        let close = |queued: &[(u8, usize)], max| {
            let queued = queued.iter().enumerate().map(|(conn, &(host, bytes))| Queued {
                conn: ConnId(conn as u64),
                host: [10, 0, 0, host].into(),
                bytes,
            });
            to_close(queued, max)
        };
        assert_eq!(close(&[], 0), None);
        assert_eq!(close(&[(1, 60), (2, 40)], 100), None);
        assert_eq!(close(&[(1, 60), (2, 41)], 100), Some(ConnId(0)));
        // Small queues of one host, and a larger one of another.
        assert_eq!(close(&[(1, 20), (1, 21), (2, 50), (1, 20)], 100), Some(ConnId(1)));
    }
}
