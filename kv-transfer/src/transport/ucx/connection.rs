//! One connection: its worker and endpoint, the order of its messages, and signs of life.

use super::writing::Writing;
use crate::ucx::{Endpoint, Worker};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Most messages that may wait for an earlier one.
const EARLY_MAX: usize = 4096;

pub(super) struct Connection {
    /// Initiator and its number.
    pub(super) name: (u64, u64),
    /// To the peer's front worker, for the attach that opens the connection; with whoever connects.
    pub(super) greeter: Option<Endpoint>,
    /// To the worker that the peer keeps for this connection, once it said which.
    pub(super) endpoint: Option<Endpoint>,
    /// Holds the key of the peer's region on this endpoint. Declared, and so destroyed, behind it.
    pub(super) writing: Writing,
    /// Everything that the peer sends and writes on this connection comes through here, and nothing else.
    pub(super) worker: Rc<Worker>,
    /// Operations that are not over.
    pub(super) outstanding: usize,
    /// Why it is being closed.
    pub(super) closing: Option<String>,
    /// When the last messages have had their time.
    pub(super) force_at: Option<Instant>,
    /// The endpoint's closing has begun.
    pub(super) forced: bool,
    /// Messages that wait for the endpoint to be wired up; `None` once it is.
    waiting: Option<Vec<Vec<u8>>>,
    next_sequence: u64,
    next_expected: u64,
    early: BTreeMap<u64, Vec<u8>>,
    heard_at: Instant,
    pinged_at: Instant,
}

impl Connection {
    pub(super) fn new(worker: Rc<Worker>, writing: Writing, name: (u64, u64), now: Instant) -> Self {
        Self {
            name,
            greeter: None,
            endpoint: None,
            writing,
            worker,
            outstanding: 0,
            closing: None,
            force_at: None,
            forced: false,
            waiting: Some(Vec::new()),
            next_sequence: 0,
            next_expected: 0,
            early: BTreeMap::new(),
            heard_at: now,
            pinged_at: now,
        }
    }

    /// Keeps a message for later if there is no way to the peer yet, or gives it back to be sent.
    pub(super) fn hold_until_wired(&mut self, message: Vec<u8>) -> Option<Vec<u8>> {
        match &mut self.waiting {
            Some(waiting) => {
                waiting.push(message);
                None
            }
            None => Some(message),
        }
    }

    /// Every lane to the peer is there: what waited.
    pub(super) fn wired(&mut self) -> Vec<Vec<u8>> {
        self.waiting.take().unwrap_or_default()
    }

    pub(super) fn next_sequence(&mut self) -> u64 {
        self.next_sequence += 1;
        self.next_sequence - 1
    }

    /// Takes a message that arrived and returns those whose turn it is.
    pub(super) fn in_order(&mut self, sequence: u64, body: Vec<u8>) -> Result<Vec<Vec<u8>>, &'static str> {
        if sequence < self.next_expected || self.early.insert(sequence, body).is_some() {
            return Err("a message came twice");
        }
        let mut turn = Vec::new();
        while let Some(body) = self.early.remove(&self.next_expected) {
            self.next_expected += 1;
            turn.push(body);
        }
        if self.early.len() > EARLY_MAX { Err("a message is missing") } else { Ok(turn) }
    }

    pub(super) fn heard(&mut self, now: Instant) {
        self.heard_at = now;
    }

    pub(super) fn is_silent(&self, now: Instant, silent_max: Duration) -> bool {
        now.saturating_duration_since(self.heard_at) > silent_max
    }

    /// Whether a sign of life is due; it counts as given.
    pub(super) fn wants_ping(&mut self, now: Instant, every: Duration) -> bool {
        let due = self.closing.is_none() && now.saturating_duration_since(self.pinged_at) > every;
        if due {
            self.pinged_at = now;
        }
        due
    }
}
