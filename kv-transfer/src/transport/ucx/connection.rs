//! One connection: its lanes, and the state of its shutdown.

use super::lane_events::LaneEvents;
use super::writing::Writing;
use crate::transport::ConnId;
use crate::ucx::{Endpoint, Worker};
use std::collections::BTreeMap;
use std::io::Error;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::time::Instant;

/// The worker of one side of a connection, with its endpoint to the other's.
pub(super) struct Lanes {
    /// Endpoint to the worker that the peer keeps for this connection, once the peer has sent its address.
    pub(super) endpoint: Option<Endpoint>,
    /// Holds the key of the peer's region on this endpoint. Declared after the endpoint, so that it is destroyed after it.
    pub(super) writing: Writing,
    /// Everything that the peer writes on this connection comes through this worker, and nothing else does.
    pub(super) worker: Rc<Worker>,
    /// Where the worker reports, if there may be no room for what it brings.
    pub(super) events: Option<LaneEvents>,
}

/// Most bytes of messages that wait for lanes. Until they are connected, this side sends a greeting or a refusal.
const WAITING_BYTES_MAX: usize = 1 << 20;

/// Messages that wait for the lanes to be connected.
#[derive(Default)]
pub(super) struct Waiting {
    messages: Vec<Vec<u8>>,
    bytes: usize,
}

impl Waiting {
    /// Whether there is room for the message. Beyond the bound it is dropped.
    pub(super) fn push(&mut self, message: Vec<u8>) -> bool {
        self.bytes += message.len() + size_of::<Vec<u8>>();
        let has_room = self.bytes <= WAITING_BYTES_MAX;
        if has_room {
            self.messages.push(message);
        }
        has_room
    }

    pub(super) fn into_messages(self) -> Vec<Vec<u8>> {
        self.messages
    }
}

/// The end of a connection: the operations on its lanes are being cancelled.
pub(super) struct Ending {
    pub(super) reason: String,
    /// When it ends even if operations are left.
    pub(super) force_at: Instant,
}

pub(super) struct Connection {
    /// `None` on the side that was connected to, until the peer has sent its lanes' address.
    pub(super) lanes: Option<Lanes>,
    /// Operations that have not ended.
    pub(super) outstanding: usize,
    /// Those of them that read the peer's pool: they write this side's.
    pub(super) reading: usize,
    /// Messages that wait for the lanes to be connected; `None` once they are.
    pub(super) waiting: Option<Waiting>,
    /// The lanes have failed, for this reason; until this instant the channel may still deliver the peer's reason.
    pub(super) failed: Option<(String, Instant)>,
    /// Its end, once that has begun.
    pub(super) ending: Option<Ending>,
    /// The control channel has ended.
    pub(super) channel_is_gone: bool,
    /// It ended because one side did not accept the other.
    pub(super) unproven: bool,
    /// It was reported as closed and draining, since reads of this side run on. Its worker lives until they have ended.
    pub(super) reads_on: bool,
}

impl Connection {
    pub(super) fn new(lanes: Option<Lanes>) -> Self {
        Self {
            lanes,
            outstanding: 0,
            reading: 0,
            waiting: Some(Waiting::default()),
            failed: None,
            ending: None,
            channel_is_gone: false,
            unproven: false,
            reads_on: false,
        }
    }

    /// Whether its end has not begun.
    pub(super) fn is_live(&self) -> bool {
        self.ending.is_none()
    }

    /// Why it ends.
    pub(super) fn end_reason(&self) -> String {
        self.ending.as_ref().map(|ending| ending.reason.clone()).unwrap_or_default()
    }

    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        self.lanes.as_ref()?.endpoint.as_ref()
    }

    pub(super) fn writing(&self) -> Option<&Writing> {
        Some(&self.lanes.as_ref()?.writing)
    }

    pub(super) fn writing_mut(&mut self) -> Option<&mut Writing> {
        Some(&mut self.lanes.as_mut()?.writing)
    }

    /// Whether there is room for more writes of the peer. A connection that ends stores none.
    pub(super) fn has_room(&self) -> bool {
        !self.is_live() || self.writing().is_none_or(|writing| writing.door.has_room())
    }

    /// Lets the lanes end sleeps of the transport while there is room for what they bring.
    pub(super) fn listen(&self) -> Result<(), Error> {
        let events = self.lanes.as_ref().and_then(|lanes| lanes.events.as_ref());
        events.map_or(Ok(()), |events| events.listen(self.has_room()))
    }

    /// Whether the pool's device still works for it; for a connection that ends.
    pub(super) fn is_draining(&mut self) -> bool {
        self.writing_mut().is_some_and(Writing::is_draining)
    }

    pub(super) fn worker(&self) -> Option<&Rc<Worker>> {
        Some(&self.lanes.as_ref()?.worker)
    }

    /// Only what `forget` destroys is left.
    pub(super) fn has_ended(&mut self, now: Instant) -> bool {
        let Some(Ending { force_at, .. }) = self.ending else { return false };
        self.channel_is_gone && (now >= force_at || (self.outstanding == 0 && !self.is_draining()))
    }
}

/// All connections of a transport.
#[derive(Default)]
pub(super) struct Connections(BTreeMap<ConnId, Connection>);

impl Connections {
    /// The connection, until its end begins.
    pub(super) fn live(&self, conn: ConnId) -> Option<&Connection> {
        self.0.get(&conn).filter(|connection| connection.is_live())
    }

    /// The same, to change it.
    pub(super) fn live_mut(&mut self, conn: ConnId) -> Option<&mut Connection> {
        self.0.get_mut(&conn).filter(|connection| connection.is_live())
    }

    /// How a connection writes, once it has lanes.
    pub(super) fn writing(&self, conn: ConnId) -> Option<&Writing> {
        self.0.get(&conn)?.writing()
    }

    /// The same, to change it.
    pub(super) fn writing_mut(&mut self, conn: ConnId) -> Option<&mut Writing> {
        self.0.get_mut(&conn)?.writing_mut()
    }
}

impl Deref for Connections {
    type Target = BTreeMap<ConnId, Connection>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Connections {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}
