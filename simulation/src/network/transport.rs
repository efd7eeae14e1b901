//! One worker's end of the network, as its driver sees it.

use super::{Lane, Network, Opened, Side, Wire, Write};
use crate::executor::Process;
use crate::invariant::Invariant;
use baton_kv_transfer::TransferAddress;
use baton_kv_transfer::simulation::{ConnId, CopyRun, Event, RemoteRegion, Transport, Window};
use baton_types::TicketId;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Instant;

/// One worker's transport.
pub struct SimulatedTransport {
    pub(super) network: Network,
    pub(super) process: Process,
    pub(super) address: SocketAddr,
    /// How long the region is.
    pub(super) bytes: u64,
}

impl SimulatedTransport {
    /// Which side of a connection this is.
    fn side(&self, conn: ConnId) -> Option<usize> {
        let state = self.network.state.lock();
        let connection = state.connections.get(&conn.0)?;
        connection.sides.iter().position(|side| side.process == self.process && side.address == self.address)
    }

    fn with_side<T>(&self, conn: ConnId, act: impl FnOnce(&mut Side) -> T) -> Option<T> {
        let side = self.side(conn)?;
        let mut state = self.network.state.lock();
        let side = &mut state.connections.get_mut(&conn.0)?.sides[side];
        side.is_open.then(|| act(side))
    }

    /// A peer that may still write to quarantined blocks is granted no others.
    fn check_grant(&self, conn: ConnId, ticket: TicketId) {
        let Some(side) = self.side(conn) else { return };
        let state = self.network.state.lock();
        let address = state.connections[&conn.0].sides[1 - side].address;
        let (Some(own), Some(peer)) = (state.endpoints.get(&self.address), state.endpoints.get(&address)) else {
            return;
        };
        let quarantined = own.held.quarantined_of(&peer.party);
        if quarantined > 0 {
            let what = format!("{} has {quarantined} blocks in quarantine, and is given {ticket}", peer.party);
            (self.network.breach)(Invariant::QuarantineBound, what);
        }
    }

    /// This instant, as the blocks of this worker count.
    fn mark(&self) -> Option<u64> {
        let state = self.network.state.lock();
        let endpoint = state.endpoints.get(&self.address).filter(|endpoint| endpoint.process == self.process);
        endpoint.map(|endpoint| endpoint.held.mark())
    }
}

impl Transport for SimulatedTransport {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn address(&self) -> TransferAddress {
        TransferAddress::Tcp(self.address)
    }

    fn region(&self) -> RemoteRegion {
        RemoteRegion { bytes: self.bytes, ..RemoteRegion::default() }
    }

    fn fences(&self) -> bool {
        self.network.lane.closing_fences()
    }

    fn closing_fences(&self, _conn: ConnId) -> bool {
        self.network.lane.closing_fences()
    }

    fn connect(&mut self, to: &TransferAddress) -> Result<ConnId, String> {
        let TransferAddress::Tcp(address) = to else { return Err(format!("no way to {to}")) };
        let side = |process, address, is_open| Side {
            process,
            address,
            is_open,
            last: 0,
            windows: HashMap::new(),
            writes: Vec::new(),
            flushes: Vec::new(),
        };
        let conn = {
            let mut state = self.network.state.lock();
            let conn = state.number();
            let sides = [side(self.process, self.address, true), side(Process::WORLD, *address, false)];
            state.connections.insert(conn, Wire { sides, is_cut: false });
            conn
        };
        let (network, at) = (self.network.clone(), self.network.executor.time() + self.network.delay());
        if let Some(connection) = self.network.state.lock().connections.get_mut(&conn) {
            connection.sides[1].last = at;
        }
        self.network.executor.call(at, Process::WORLD, move || network.arrives(conn));
        Ok(ConnId(conn))
    }

    fn greeted(&mut self, _conn: ConnId, _region: &RemoteRegion, _message_bytes_max: usize) -> Result<(), String> {
        Ok(())
    }

    fn send(&mut self, conn: ConnId, message: Vec<u8>) {
        let Some(side) = self.side(conn) else { return };
        let at = self.network.executor.time() + self.network.delay();
        let at = {
            let mut state = self.network.state.lock();
            let Some(connection) = state.connections.get_mut(&conn.0).filter(|c| c.sides[side].is_open) else { return };
            let other = &mut connection.sides[1 - side];
            other.last = other.last.max(at) + 1;
            other.last
        };
        let (network, conn) = (self.network.clone(), conn.0);
        self.network.executor.call(at, Process::WORLD, move || network.message(conn, 1 - side, message));
    }

    fn put(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun) {
        let Some(side) = self.side(conn) else { return };
        let (number, storing) = {
            let mut state = self.network.state.lock();
            let number = state.number();
            let damaged = state.damage.iter().position(|process| *process == self.process);
            let is_damaged = damaged.map(|at| state.damage.swap_remove(at)).is_some();
            let spoilt = state.spoilt.clone();
            let Some(connection) = state.connections.get_mut(&conn.0).filter(|c| c.sides[side].is_open) else { return };
            let is_damaged = is_damaged || spoilt.contains(&[self.process, connection.sides[1 - side].process]);
            connection.sides[side].writes.push(number);
            let storing = match self.network.lane {
                Lane::Window => connection.sides[1 - side].process,
                Lane::QueuePair => Process::WORLD,
                Lane::SharedMemory => self.process,
            };
            state.writes.insert(number, Write { conn: conn.0, from: side, ticket, run, bytes: None, is_damaged });
            (number, storing)
        };
        if self.network.lane == Lane::Window {
            // The socket has taken it.
            self.network.read_write(number);
            let done = Event::PutDone(conn, run.len);
            self.network.state.lock().tell(self.address, self.process, done);
        }
        let (network, at) = (self.network.clone(), self.network.arrival(self.process, run.len));
        self.network.executor.call(at, storing, move || network.write_arrives(number));
    }

    fn flush(&mut self, conn: ConnId, id: u64) {
        let Some(side) = self.side(conn) else { return };
        let is_idle = self.with_side(conn, |side| {
            if !side.writes.is_empty() {
                side.flushes.push((id, side.writes.clone()));
            }
            side.writes.is_empty()
        });
        if is_idle == Some(true) {
            self.network.flushed(conn.0, side, id);
        }
    }

    fn one_sided_gets(&self, _conn: ConnId) -> bool {
        self.network.one_sided_gets
    }

    fn get(&mut self, conn: ConnId, number: u64, run: CopyRun) {
        let Some(side) = self.side(conn) else { return };
        let Some(mark) = self.mark() else { return };
        let owner = self.network.state.lock().connections[&conn.0].sides[1 - side].process;
        let (network, at) = (self.network.clone(), self.network.arrival(owner, run.len));
        self.network.executor.call(at, self.process, move || network.got(conn.0, side, number, run, mark));
    }

    fn open_window(&mut self, conn: ConnId, ticket: TicketId, window: Window) {
        let Some(mark) = self.mark() else { return };
        self.check_grant(conn, ticket);
        self.with_side(conn, |side| side.windows.insert(ticket, Opened { window, mark, is_open: true }));
    }

    fn close_window(&mut self, conn: ConnId, ticket: TicketId) {
        let is_open = self.with_side(conn, |side| {
            side.windows.get_mut(&ticket).into_iter().for_each(|opened| opened.is_open = false)
        });
        // Writes are stored when they arrive.
        if is_open.is_some() {
            self.network.state.lock().tell(self.address, self.process, Event::WindowClosed(conn, ticket));
        }
    }

    fn close(&mut self, conn: ConnId, reason: &str) {
        let Some(side) = self.side(conn) else { return };
        // What a NIC was given may still leave.
        if self.network.lane == Lane::QueuePair {
            let unread = self.with_side(conn, |side| side.writes.clone()).unwrap_or_default();
            for write in unread {
                if self.network.executor.draw(|random| random.once_in(2)) {
                    self.network.read_write(write);
                }
            }
        }
        self.network.lost(conn.0, side, reason);
        let at = self.network.executor.time() + self.network.delay();
        self.network.loses(at, conn.0, 1 - side, "the peer closed the connection");
    }

    fn lanes(&self, _conn: ConnId) -> String {
        format!("{:?}", self.network.lane)
    }

    fn progress(&mut self, _now: Instant, events: &mut Vec<Event>) -> bool {
        let mut state = self.network.state.lock();
        let endpoint = state.endpoints.get_mut(&self.address).filter(|endpoint| endpoint.process == self.process);
        let Some(endpoint) = endpoint else { return false };
        events.extend(endpoint.events.drain(..));
        !events.is_empty()
    }

    fn shutdown(&mut self, _deadline: Instant, _events: &mut Vec<Event>) {
        let mut state = self.network.state.lock();
        state.endpoints.retain(|_, endpoint| endpoint.process != self.process);
    }
}
