//! How connections begin: a control channel, a worker on each side, and lanes between the two.

use super::connection::{Connection, Lanes};
use super::lane_events::LaneEvents;
use super::writing::{NONCE_BYTES, Nonce, WriteWindows, Writing};
use super::{Purpose, Ucx};
use crate::transport::{ConnId, Event};
use crate::ucx::{Endpoint, Worker};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::rc::Rc;

impl Ucx {
    /// Connects to a peer's control channel.
    pub(super) fn open(&mut self, to: SocketAddr) -> Result<ConnId, String> {
        let (lanes, attach) = self.new_lanes()?;
        let conn = self.channel.dial(to)?;
        self.channel.attach(conn, attach);
        self.connections.insert(conn, Connection::new(Some(lanes)));
        Ok(conn)
    }

    /// Creates a worker for one connection. Also returns what the peer needs: a nonce, without which nothing is stored here, and the
    /// worker's address.
    fn new_lanes(&self) -> Result<(Lanes, Vec<u8>), String> {
        let nonce: Nonce = rand::random();
        let door = WriteWindows::new(self.pool.clone(), nonce);
        let events = match self.pool.host() {
            Some(_) => None,
            None => Some(LaneEvents::new(&self.events).map_err(|e| format!("no events for a connection: {e}"))?),
        };
        let reports_to: Rc<dyn AsRawFd> = match &events {
            Some(events) => events.own(),
            None => self.events.clone(),
        };
        let worker = Worker::new(&self.context, reports_to, Some(door.clone()));
        let worker = worker.map_err(|e| format!("no worker for a connection: {e}"))?;
        let address = worker.address().map_err(|e| e.to_string())?;
        let attach = [&nonce[..], &address].concat();
        Ok((Lanes { endpoint: None, writing: Writing::new(door), worker, events }, attach))
    }

    /// The peer sent the address of the worker that it keeps for this connection, or what it says of its lanes after that.
    pub(super) fn attached(&mut self, conn: ConnId, body: &[u8], events: &mut Vec<Event>) -> Result<(), String> {
        if self.connections.get(&conn).is_some_and(|c| c.endpoint().is_some()) {
            return self.lane_message(conn, body, events);
        }
        let (nonce, address) = body.split_first_chunk::<NONCE_BYTES>().ok_or("a worker without an address")?;
        let Some(connection) = self.connections.live(conn) else { return Ok(()) };
        if connection.lanes.is_none() {
            let (lanes, attach) = self.new_lanes()?;
            self.channel.attach(conn, attach);
            if let Some(connection) = self.connections.get_mut(&conn) {
                connection.lanes = Some(lanes);
            }
            return self.reach(conn, nonce, address);
        }
        self.reach(conn, nonce, address)
    }

    fn reach(&mut self, conn: ConnId, nonce: &Nonce, address: &[u8]) -> Result<(), String> {
        let Some(lanes) = self.connections.get_mut(&conn).and_then(|c| c.lanes.as_mut()) else { return Ok(()) };
        let endpoint = Endpoint::new(&lanes.worker, address, conn.0);
        lanes.endpoint = Some(endpoint.map_err(|e| format!("cannot reach the peer's worker: {e}"))?);
        lanes.writing.name(*nonce);
        // Waits for every lane to be connected before anything is granted or written. A lane that is still connecting could reach another
        // worker at the address of a destroyed one.
        self.on_endpoint(conn, Purpose::Wiring, |endpoint, token| endpoint.flush(token));
        Ok(())
    }
}
