//! Holds requests in a phase, so that a test can act upon them there.

use baton_engine::{Phase as EnginePhase, SequenceGate};
use baton_kv_transfer::{Phase as TransferPhase, TransferHooks};
use baton_types::RequestId;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};

/// Phases of one request, as a user would name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Waiting for the engine.
    Queue,
    /// Between two chunks of its prefill.
    Prefill,
    /// Granted, before its KV is written.
    Transfer,
    /// Generating.
    Decode,
}

impl Phase {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Queue, Self::Prefill, Self::Transfer, Self::Decode];
}

/// Which requests are held where, and which were seen there.
#[derive(Debug, Default)]
pub struct Gates {
    held: Mutex<HashMap<RequestId, Phase>>,
    seen: Mutex<HashSet<(RequestId, Phase)>>,
}

impl Gates {
    /// Holds `request` when it comes to `phase`.
    pub fn hold(&self, request: RequestId, phase: Phase) {
        self.held.lock().insert(request, phase);
    }

    /// Lets everything go on.
    pub fn open(&self) {
        self.held.lock().clear();
    }

    /// Whether `request` was stopped at `phase`.
    pub fn reached(&self, request: &RequestId, phase: Phase) -> bool {
        self.seen.lock().contains(&(request.clone(), phase))
    }

    fn is_held(&self, request: &RequestId, phase: Phase) -> bool {
        let held = self.held.lock().get(request) == Some(&phase);
        if held {
            self.seen.lock().insert((request.clone(), phase));
        }
        held
    }
}

impl SequenceGate for Gates {
    fn is_open(&self, id: &RequestId, phase: EnginePhase) -> bool {
        let phase = match phase {
            EnginePhase::Queue => Phase::Queue,
            EnginePhase::Prefill => Phase::Prefill,
            EnginePhase::Decode => Phase::Decode,
        };
        !self.is_held(id, phase)
    }
}

impl TransferHooks for Gates {
    fn hold(&self, phase: TransferPhase, request_id: &RequestId) -> bool {
        phase == TransferPhase::Puts && self.is_held(request_id, Phase::Transfer)
    }
}
