//! Who may connect. Peers that have not said yet who they are have few places and little time, so that strangers cannot take those of
//! peers: where they are all taken, the host that holds most of them loses its oldest.

use crate::transport::ConnId;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr};

/// Whom to close to make room for one more: `None` while there are fewer than `max`. Connections are given in the order in which they came.
pub(super) fn gives_way(unsettled: impl Iterator<Item = (ConnId, IpAddr)>, max: usize) -> Option<ConnId> {
    let mut by_host: BTreeMap<IpAddr, (usize, ConnId)> = BTreeMap::new();
    let mut all = 0;
    for (conn, from) in unsettled {
        all += 1;
        by_host.entry(host(from)).or_insert((0, conn)).0 += 1;
    }
    let most = by_host.into_values().max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest)));
    most.filter(|_| all >= max).map(|(_, oldest)| oldest)
}

/// What a call of `accept` that failed is short of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// Nobody waits.
    Anybody,
    /// Whoever waited is gone, or a signal came first: the next call may do.
    One,
    /// Descriptors or memory: asking again at once does not help.
    Means,
}

/// What it says when `accept` fails in this way.
pub(super) const fn missing(kind: ErrorKind) -> Missing {
    match kind {
        ErrorKind::WouldBlock => Missing::Anybody,
        ErrorKind::Interrupted | ErrorKind::ConnectionAborted => Missing::One,
        _ => Missing::Means,
    }
}

/// The address of a host: of IPv6 its network, in which it may have any other.
fn host(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn at(host: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, host).into()
    }

    #[test]
    fn only_want_of_means_ends_a_turn_of_accepting() {
        assert_eq!(missing(ErrorKind::WouldBlock), Missing::Anybody);
        assert_eq!(missing(ErrorKind::Interrupted), Missing::One);
        assert_eq!(missing(ErrorKind::ConnectionAborted), Missing::One);
        let too_many_open_files = std::io::Error::from_raw_os_error(libc::EMFILE).kind();
        assert_eq!([missing(too_many_open_files), missing(ErrorKind::OutOfMemory)], [Missing::Means; 2]);
    }

    #[test]
    fn the_oldest_of_who_holds_most_gives_way() {
        let of = |places: &[(u64, u8)]| gives_way(places.iter().map(|&(conn, host)| (ConnId(conn), at(host))), 64);
        let full = 64;
        assert_eq!(of(&[]), None);
        let almost: Vec<_> = (1..full).map(|conn| (conn, 1)).collect();
        assert_eq!(of(&almost), None, "there is room");
        // A peer that came first keeps its place against a stranger with all the others.
        let stranger: Vec<_> = (0..full).map(|conn| (conn, if conn == 0 { 2 } else { 1 })).collect();
        assert_eq!(of(&stranger), Some(ConnId(1)));
        let alike: Vec<_> = (0..full).map(|conn| (conn, (conn % 4) as u8)).collect();
        assert_eq!(of(&alike), Some(ConnId(0)), "of those that hold as many, the oldest");
        // One host with an address for each connection.
        let v6 = |network: u16, host: u16| Ipv6Addr::new(0x2001, 0xdb8, 0, network, 0, 0, 0, host).into();
        let many = (0..full).map(|conn| (ConnId(conn), if conn == 0 { v6(1, 1) } else { v6(2, conn as u16) }));
        assert_eq!(gives_way(many, 64), Some(ConnId(1)));
    }
}
