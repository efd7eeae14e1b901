//! How connections begin: a worker on each side, and lanes between the two.

use super::connection::Connection;
use super::header::{Header, Kind};
use super::{Purpose, Ucx};
use crate::transport::{ConnId, Event};
use crate::ucx::{Arrived, Endpoint};
use std::time::Instant;

impl Ucx {
    /// Connects to a peer's front worker.
    pub(super) fn open(&mut self, address: &[u8]) -> Result<ConnId, String> {
        let conn = self.new_id();
        let (worker, writing) = self.new_worker()?;
        let own = worker.address().map_err(|e| e.to_string())?;
        let greeter = Endpoint::new(&worker, address, conn.0).map_err(|e| e.to_string())?;
        let (uid, nonce) = (self.uid, conn.0);
        self.add(conn, Connection::new(worker, writing, (uid, nonce), Instant::now()));
        let token = self.begin(conn, Purpose::Greeting);
        greeter.send(token, &Header { kind: Kind::Attach, uid, nonce, sequence: 0 }.encode(), own);
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.greeter = Some(greeter);
        }
        Ok(conn)
    }

    /// What came to the front worker: peers that connect.
    pub(super) fn arrived_in_front(&mut self, message: Arrived, now: Instant, events: &mut Vec<Event>) {
        match Header::decode(&message.header) {
            Some(Header { kind: Kind::Attach, uid, nonce, .. }) if !self.names.contains(&(uid, nonce)) => {
                self.attach((uid, nonce), &message.body, now, events);
            }
            Some(_) => {}
            None => tracing::warn!("drops a UCX message of another protocol"),
        }
    }

    /// A peer connected: makes a worker for it, and an endpoint to its own.
    fn attach(&mut self, name: (u64, u64), address: &[u8], now: Instant, events: &mut Vec<Event>) {
        if self.connections.len() >= self.connections_max || address.is_empty() {
            return; // Its greeting will time out.
        }
        let conn = self.new_id();
        let made = self.new_worker().and_then(|(worker, writing)| {
            let own = worker.address().map_err(|e| e.to_string())?;
            let endpoint = Endpoint::new(&worker, address, conn.0).map_err(|e| e.to_string())?;
            Ok((worker, writing, own, endpoint))
        });
        match made {
            Ok((worker, writing, own, endpoint)) => {
                let mut connection = Connection::new(worker, writing, name, now);
                connection.endpoint = Some(endpoint);
                self.add(conn, connection);
                self.post_message(conn, Kind::Attached, own);
                self.wire(conn);
                events.push(Event::Accepted { conn, proven: false });
            }
            Err(error) => tracing::warn!(error, "cannot answer a transfer peer"),
        }
    }

    /// The peer told which worker it keeps for this connection.
    pub(super) fn attached(&mut self, conn: ConnId, address: &[u8]) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        match Endpoint::new(&connection.worker, address, conn.0) {
            Ok(endpoint) => {
                connection.endpoint = Some(endpoint);
                self.wire(conn);
            }
            Err(error) => self.force_close(conn, &format!("cannot reach the peer's worker: {error}"), Instant::now()),
        }
    }

    /// Looks for every lane to be there before anything is granted or written. A lane that is still being connected could find
    /// another worker at the address of one that was destroyed.
    fn wire(&mut self, conn: ConnId) {
        self.on_endpoint(conn, Purpose::Wiring, |endpoint, token| endpoint.flush(token));
    }

    pub(super) fn wired(&mut self, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let (waiting, greeter) = (connection.wired(), connection.greeter.is_some());
        if greeter {
            let token = self.begin(conn, Purpose::Greeting);
            self.connections[&conn].greeter.iter().for_each(|greeter| greeter.close(token));
        }
        waiting.into_iter().for_each(|body| self.post_message(conn, Kind::Data, body));
    }
}
