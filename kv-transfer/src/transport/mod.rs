//! The transport interface between two services: connections with messages, one-sided writes into a peer's region, and flushes.
//!
//! A transport belongs to the progress thread and blocks only in [`Transport::sleep`]. It guarantees the following; the conformance suite
//! checks it on each:
//! - messages of one connection arrive whole and in order, or the connection is closed;
//! - writes and messages are unordered; a write is visible at the peer only once a later flush completed;
//! - a write counts as visible only once it is stored in the pool's memory, wherever that is;
//! - after [`Event::WindowClosed`] nothing is stored under that ticket, and nothing is on its way;
//! - local bytes of a get are written until [`Event::Got`] or [`Event::Closed`], and not after;
//! - local bytes of a write are read until [`Event::PutDone`] or [`Event::Closed`], and not after;
//! - every connection that was announced ends in exactly one [`Event::Closed`]. If the pool's device then still reads or writes for it, one
//!   [`Event::Drained`] follows, and the guarantees above hold from then on.

mod incoming;
mod last_operations;
mod outgoing;
mod pool;
mod rotation;
pub(crate) mod tcp;
pub(crate) mod ucx;
mod windows;

use crate::message::RemoteRegion;
use crate::plan::CopyRun;
use crate::pool_turns::SharedPoolMemory;
use crate::window::Window;
use crate::{TransferAddress, TransferConfig, TransferError, TransportChoice};
use baton_memory::MemoryError;
#[cfg(doc)]
use baton_memory::PoolMemory;
use baton_types::TicketId;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Name of one connection within one transport. Never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// What a transport reports.
#[derive(Debug)]
pub enum Event {
    /// A peer connected; `proven` if it presented a worker's certificate.
    Accepted {
        conn: ConnId,
        proven: bool,
    },
    Message(ConnId, Vec<u8>),
    /// Writes of this many bytes no longer read local memory. This does not mean that they are visible at the peer.
    PutDone(ConnId, usize),
    /// This many bytes that were requested under this number are here.
    Got(u64, usize),
    /// Everything posted before this flush is visible at the peer.
    Flushed(ConnId, u64),
    /// Nothing that the peer wrote under this ticket is on its way into the pool, after [`Transport::close_window`].
    WindowClosed(ConnId, TicketId),
    /// The connection is closed, and every operation on it has ended, unless it is `draining`.
    Closed {
        conn: ConnId,
        reason: String,
        /// Nothing can be stored here through it any more.
        fenced: bool,
        /// The pool's device still reads or writes for it, and has not ended in time: [`Event::Drained`] follows. Then it is not `fenced`.
        draining: bool,
        /// It closed before both sides had proven that they are workers.
        unproven: bool,
    },
    /// Every operation on a connection that closed while it was `draining` has ended; `fenced` as there.
    Drained {
        conn: ConnId,
        fenced: bool,
    },
    /// The peer wrote outside the tickets of this connection; nothing was stored.
    PutRefused(ConnId),
}

/// Wakes the thread that runs a transport, if it sleeps.
pub type Wake = Box<dyn Fn() + Send + Sync>;

pub trait Transport {
    /// Name of the transport: `ucx` or `tcp`.
    fn name(&self) -> &'static str;
    /// The address that peers connect to.
    fn address(&self) -> TransferAddress;
    /// What peers need to write into the registered region.
    fn region(&self) -> RemoteRegion;
    /// Whether closing a connection fences every lane by which a peer could write here.
    fn fences(&self) -> bool;
    /// Whether closing a connection is expected to fence it. Only its [`Event::Closed`] reports whether it did.
    fn closing_fences(&self, conn: ConnId) -> bool;
    /// Starts to connect. A failure may come later, as [`Event::Closed`].
    fn connect(&mut self, to: &TransferAddress) -> Result<ConnId, String>;
    /// The peer has greeted: writes on this connection go to that region, and its messages may have this length from now on. A longer
    /// message closes the connection before it is buffered. So does one longer than a greeting, from a peer that connected and has not
    /// greeted. The transport bounds the number of such peers, because it knows their hosts.
    fn greeted(&mut self, conn: ConnId, region: &RemoteRegion, message_bytes_max: usize) -> Result<(), String>;
    fn send(&mut self, conn: ConnId, message: Vec<u8>);
    /// Writes a run of the local region into the peer's, under a ticket.
    fn put(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun);
    fn flush(&mut self, conn: ConnId, id: u64);
    /// Whether this side can read the peer's region one-sided. Otherwise the peer must write what a get requests.
    fn one_sided_gets(&self, conn: ConnId) -> bool {
        let _ = conn;
        false
    }
    /// Gets a run of the peer's region (`from`) into the local one (`to`); ends in [`Event::Got`] with this number, or when the connection
    /// closes. Only where [`Transport::one_sided_gets`].
    fn get(&mut self, conn: ConnId, number: u64, run: CopyRun) {
        let _ = (conn, number, run);
    }
    /// From now on the peer may write this part of the local region under this ticket. Transports that cannot check ignore it.
    fn open_window(&mut self, conn: ConnId, ticket: TicketId, window: Window);
    /// From now on nothing that comes is stored under this ticket, not even the rest of a write that has begun. What came before may still
    /// wait for room in the pool's device. Each call on an open connection ends in one [`Event::WindowClosed`], in order, or in
    /// [`Event::Closed`].
    fn close_window(&mut self, conn: ConnId, ticket: TicketId);
    /// Whether a connection still carries what it is given. It may end long before [`Event::Closed`]: while the pool's device works for it.
    fn is_open(&self, conn: ConnId) -> bool {
        let _ = conn;
        true
    }
    /// Ends a connection; [`Event::Closed`] follows.
    fn close(&mut self, conn: ConnId, reason: &str);
    /// Lanes of this connection, for logs and traces.
    fn lanes(&self, conn: ConnId) -> String;
    /// Advances everything without blocking. Returns whether anything moved.
    fn progress(&mut self, now: Instant, events: &mut Vec<Event>) -> bool;
    /// Waits for events, for the waker, or for `timeout`. Called only by [`crate::simulation::Driver::sleep`].
    fn sleep(&mut self, timeout: Duration) {
        let _ = timeout;
    }
    /// Lets the pool's device see what NICs have stored by themselves: see [`PoolMemory::show_remote_writes`]. Nothing to do where none do.
    fn show_remote_writes(&self) -> Result<(), MemoryError> {
        Ok(())
    }
    /// Closes everything and releases the region. This side does not read or write it afterwards.
    fn shutdown(&mut self, deadline: Instant, events: &mut Vec<Event>);
}

/// Starts the configured transport; called on the progress thread, which then owns it.
pub(crate) fn start(
    config: &TransferConfig,
    shared: Arc<SharedPoolMemory>,
) -> Result<(Box<dyn Transport>, Wake), TransferError> {
    match &config.transport {
        TransportChoice::Tcp { bind, port } => {
            let (transport, wake) =
                tcp::Tcp::start(tcp::Listen { bind: *bind, port: *port, has_lanes: false }, config, shared)?;
            Ok((Box::new(transport), wake))
        }
        TransportChoice::Ucx { lanes, bind, port, devices, writes } => {
            let listen = tcp::Listen { bind: *bind, port: *port, has_lanes: true };
            let start = ucx::Start { lanes, listen, devices: devices.as_deref(), writes: *writes };
            let (transport, wake) = ucx::Ucx::start(start, config, shared)?;
            Ok((Box::new(transport), wake))
        }
    }
}

#[cfg(test)]
mod tests;
