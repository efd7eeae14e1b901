//! Which connections to accept and keep. Peers that have not identified themselves have few places and little time, so that strangers
//! cannot displace peers. When all places are taken, the host that holds most of them loses its oldest connection.

use crate::transport::ConnId;
use baton_types::places::{host_of, place_to_free};
use std::io::ErrorKind;
use std::net::IpAddr;

/// The connection to close to make room for one more; `None` while there are fewer than `max`. Connections are given in order of arrival.
pub(super) fn to_close(unsettled: impl Iterator<Item = (ConnId, IpAddr)>, max: usize) -> Option<ConnId> {
    let unsettled: Vec<_> = unsettled.map(|(conn, from)| (conn, host_of(from))).collect();
    if unsettled.len() < max { None } else { place_to_free(unsettled) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AcceptFailure {
    /// No connection is pending.
    NoneWaiting,
    /// The connection was reset, or a signal interrupted the call. The next call may succeed.
    Retry,
    /// Descriptors or memory are exhausted. Another call at once does not help.
    OutOfResources,
}

impl From<ErrorKind> for AcceptFailure {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::WouldBlock => Self::NoneWaiting,
            ErrorKind::Interrupted | ErrorKind::ConnectionAborted => Self::Retry,
            _ => Self::OutOfResources,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    fn at(host: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, host).into()
    }

    #[test]
    fn an_accept_that_failed_is_retried_unless_resources_are_used_up() {
        let too_many_open_files = std::io::Error::from_raw_os_error(libc::EMFILE).kind();
        for (kind, failure) in [
            (ErrorKind::WouldBlock, AcceptFailure::NoneWaiting),
            (ErrorKind::Interrupted, AcceptFailure::Retry),
            (ErrorKind::ConnectionAborted, AcceptFailure::Retry),
            (too_many_open_files, AcceptFailure::OutOfResources),
            (ErrorKind::OutOfMemory, AcceptFailure::OutOfResources),
        ] {
            assert_eq!(AcceptFailure::from(kind), failure, "{kind}");
        }
    }

    #[test]
    fn the_oldest_of_who_holds_most_gives_way() {
        let of = |places: &[(u64, u8)]| to_close(places.iter().map(|&(conn, host)| (ConnId(conn), at(host))), 64);
        let full = 64;
        assert_eq!(of(&[]), None);
        let almost: Vec<_> = (1..full).map(|conn| (conn, 1)).collect();
        assert_eq!(of(&almost), None, "there is room");
        // A peer that came first keeps its place against a stranger that holds all the others.
        let stranger: Vec<_> = (0..full).map(|conn| (conn, if conn == 0 { 2 } else { 1 })).collect();
        assert_eq!(of(&stranger), Some(ConnId(1)));
        let alike: Vec<_> = (0..full).map(|conn| (conn, (conn % 4) as u8)).collect();
        assert_eq!(of(&alike), Some(ConnId(0)), "of those that hold as many, the oldest");
        // A host that uses another address for each connection.
        let v6 = |network: u16, host: u16| Ipv6Addr::new(0x2001, 0xdb8, 0, network, 0, 0, 0, host).into();
        let many = (0..full).map(|conn| (ConnId(conn), if conn == 0 { v6(1, 1) } else { v6(2, conn as u16) }));
        assert_eq!(to_close(many, 64), Some(ConnId(1)));
    }
}
