//! Connections whose TLS handshake is not complete. Their number is small, so that unauthenticated clients cannot take
//! the places of peers. When all places are taken, the client with the most handshakes loses its oldest one.

use super::Connection;
use super::incoming::Terms;
use crate::intake::Client;
use baton_types::places::place_to_free;
use std::collections::{BTreeMap, HashMap};
use std::io;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tonic::transport::server::Connected as _;

/// Handshakes at once. One takes a few milliseconds, and keeps its place for longer than that at any rate of new
/// connections.
const HANDSHAKES_MAX: usize = 512;
/// Handshakes take at most this fraction (one in four) of the listener's connections.
const OF_CONNECTIONS: usize = 4;

/// The handshakes in progress, at most `max`.
pub(super) struct Handshakes {
    max: usize,
    tasks: JoinSet<io::Result<Connection>>,
    /// In the order of their start.
    places: BTreeMap<u64, Handshake>,
    by_task: HashMap<Id, u64>,
    begun: u64,
}

struct Handshake {
    client: Option<Client>,
    task: AbortHandle,
}

impl Handshakes {
    /// For a listener with this many connections.
    pub(super) fn new(connections_max: usize) -> Self {
        let (tasks, places, by_task) = Default::default();
        Self { max: (connections_max / OF_CONNECTIONS).clamp(1, HANDSHAKES_MAX), tasks, places, by_task, begun: 0 }
    }

    /// Starts a handshake; if no place is free, another one is aborted.
    pub(super) fn begin(&mut self, connection: Connection, terms: Terms) {
        if self.places.len() >= self.max
            && let Some((oldest, _)) =
                place_to_free(self.places.iter().map(|(number, handshake)| (*number, &handshake.client)))
        {
            self.places[&oldest].task.abort();
            self.forget(oldest);
        }
        let client = connection.connect_info().addresses.remote_addr().map(|address| Client::at(address.ip()));
        let task = self.tasks.spawn(connection.secured(terms));
        self.begun += 1;
        self.by_task.insert(task.id(), self.begun);
        self.places.insert(self.begun, Handshake { client, task });
    }

    /// The next handshake to end: an authenticated connection, or the error. `None` if none is in progress.
    pub(super) async fn next(&mut self) -> Option<Result<io::Result<Connection>, JoinError>> {
        loop {
            let ended = self.tasks.join_next_with_id().await?;
            let (task, ended) = match ended {
                Ok((task, connection)) => (task, Ok(connection)),
                Err(error) => (error.id(), Err(error)),
            };
            if let Some(number) = self.by_task.remove(&task) {
                self.places.remove(&number);
            }
            // An aborted handshake is not an error.
            if !ended.as_ref().is_err_and(JoinError::is_cancelled) {
                return Some(ended);
            }
        }
    }

    fn forget(&mut self, number: u64) {
        if let Some(place) = self.places.remove(&number) {
            self.by_task.remove(&place.task.id());
        }
    }
}
