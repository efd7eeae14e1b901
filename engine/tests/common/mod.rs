//! What tests of whole engines have in common.
#![allow(dead_code, unreachable_pub)] // Each test binary uses its part.

use baton_engine::{PrefillObserver, SequenceEvent, SequenceSink};
use baton_kv_cache::Lease;
use baton_types::{BlockTables, Fence};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Sends all events to a test.
pub struct Sink(pub Sender<SequenceEvent>);

impl SequenceSink for Sink {
    fn has_room(&self, _: usize) -> bool {
        true
    }
    fn send(&mut self, event: SequenceEvent) -> bool {
        self.0.send(event).is_ok()
    }
}

/// Keeps the blocks of a prefill for whoever reads its events.
#[derive(Clone, Default)]
pub struct Kept(pub Arc<Mutex<Option<Lease>>>);

impl PrefillObserver for Kept {
    fn started(&mut self, _blocks: &BlockTables, _now: Instant) {}
    fn layer_launched(&mut self, _layer: u32, _tokens_end: usize, _fence: &Fence) {}
    fn prefilled(&mut self, lease: Lease) {
        *self.0.lock().unwrap() = Some(lease);
    }
}
