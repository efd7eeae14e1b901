//! Which connections to accept and keep. Peers that have not identified themselves have few places and little time, so that strangers
//! cannot displace peers. When all places are taken, the host that holds most of them loses its oldest connection.
//!
//! Many peers may connect at once, as after a restart of a cluster. They must not close one another's connections before any handshake
//! ends. So a connection on which something has come keeps its place for [`KEPT_MIN`], and others stay in the listener's backlog. A host
//! that holds more than an eighth of the places keeps nobody waiting, nor do connections on which nothing comes.

use crate::transport::ConnId;
use baton_types::places::{host_of, place_to_free};
use mio::net::TcpListener;
use socket2::{Domain, Socket, Type};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// How long a connection keeps its place once something has come. In this time, 64 connections take three steps each, even on a thread that
/// is busy ([`super::handshakes`]).
const KEPT_MIN: Duration = Duration::from_millis(500);

/// Most connections that wait to be accepted, if the system allows as many. Beyond it, it ignores those that connect, and they try again
/// after a second.
const BACKLOG_MAX: i32 = 1024;

/// Listens on an address.
pub(super) fn listen(at: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking(), None)?;
    socket.set_reuse_address(true)?; // A port with old connections of a process that ended.
    socket.bind(&at.into())?;
    socket.listen(BACKLOG_MAX)?;
    Ok(TcpListener::from_std(socket.into()))
}

/// A connection whose peer has not identified itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unsettled {
    pub(super) conn: ConnId,
    pub(super) from: IpAddr,
    pub(super) accepted_at: Instant,
    /// Something has come.
    pub(super) has_begun: bool,
}

/// What one more connection takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    Free,
    /// The place of this connection, which is to be closed.
    Of(ConnId),
    /// There is none yet.
    Later,
}

/// Finds a place among `max` for one more connection. The others are given in order of arrival.
pub(super) fn room(unsettled: &[Unsettled], max: usize, now: Instant) -> Room {
    if unsettled.len() < max {
        return Room::Free;
    }
    let hosts = unsettled.iter().enumerate().map(|(at, c)| (at, host_of(c.from)));
    let Some((oldest, holds)) = place_to_free(hosts).map(|(at, holds)| (unsettled[at], holds)) else {
        return Room::Free;
    };
    let is_new = now.saturating_duration_since(oldest.accepted_at) < KEPT_MIN;
    if oldest.has_begun && is_new && holds <= (max / 8).max(1) { Room::Later } else { Room::Of(oldest.conn) }
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

    fn unsettled(of: impl IntoIterator<Item = IpAddr>, accepted_at: Instant, has_begun: bool) -> Vec<Unsettled> {
        (0..).zip(of).map(|(conn, from)| Unsettled { conn: ConnId(conn), from, accepted_at, has_begun }).collect()
    }

    #[test]
    fn the_oldest_of_who_holds_most_gives_way() {
        let now = Instant::now();
        let room = |of: &mut dyn Iterator<Item = IpAddr>| room(&unsettled(of, now, false), 64, now);
        assert_eq!(room(&mut std::iter::empty()), Room::Free);
        assert_eq!(room(&mut (0..63).map(|_| at(1))), Room::Free);
        // A peer that came first keeps its place against a stranger that holds all the others.
        assert_eq!(room(&mut (0..64).map(|conn| at(if conn == 0 { 2 } else { 1 }))), Room::Of(ConnId(1)));
        assert_eq!(room(&mut (0..64).map(|conn| at(conn % 4))), Room::Of(ConnId(0)), "of hosts that hold as many");
        // A host that uses another address for each connection.
        let v6 = |network: u16, host: u16| Ipv6Addr::new(0x2001, 0xdb8, 0, network, 0, 0, 0, host).into();
        assert_eq!(room(&mut (0..64).map(|conn| if conn == 0 { v6(1, 1) } else { v6(2, conn) })), Room::Of(ConnId(1)));
    }

    #[test]
    fn many_hosts_that_connect_at_once_keep_their_places_for_a_while() {
        let start = Instant::now();
        let of = |hosts: u8, has_begun| unsettled((0..64).map(|conn| at(conn % hosts)), start, has_begun);
        let room = |hosts, has_begun, after| room(&of(hosts, has_begun), 64, start + after);
        let (soon, first) = (KEPT_MIN - Duration::from_millis(1), Room::Of(ConnId(0)));
        assert_eq!([64, 8].map(|hosts| room(hosts, true, soon)), [Room::Later; 2]);
        assert_eq!(room(64, true, KEPT_MIN), first, "not longer");
        assert_eq!(room(64, false, soon), first, "nothing has come");
        assert_eq!([7, 1].map(|hosts| room(hosts, true, soon)), [first; 2], "hosts that hold many");
    }
}
