//! Stops requests in a phase, so that a test can act on them there.

use baton_engine::{SequenceGate, SequencePhase};
use baton_kv_transfer::{HoldPoint, TransferHooks};
use baton_types::RequestId;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};

/// Hex digits that a router appends to a request's id, after a dot, to distinguish its attempts on the workers.
const ATTEMPT_HEX: usize = 16;

/// Phases of one request, as a user would name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Waiting for the engine.
    Queue,
    /// Between two chunks of its prefill, or before the first one.
    Prefill,
    /// Granted, before the sink adopts its KV.
    Transfer,
    /// Generating.
    Decode,
}

impl Phase {
    pub const ALL: [Self; 4] = [Self::Queue, Self::Prefill, Self::Transfer, Self::Decode];
}

/// Where within its phase a request is stopped.
#[derive(Clone, Copy, Debug)]
struct Hold {
    phase: Phase,
    /// Checks of the engine that pass first.
    looks: u32,
    /// Point of the transfer.
    at: HoldPoint,
}

/// Which requests are stopped where, and which have reached that point. Requests are named as their clients name them.
#[derive(Debug, Default)]
pub struct Gates {
    held: Mutex<HashMap<RequestId, Hold>>,
    seen: Mutex<HashSet<(RequestId, Phase)>>,
}

impl Gates {
    /// Stops `request` when it reaches `phase`; in [`Phase::Transfer`] that is before its first write.
    pub fn hold(&self, request: RequestId, phase: Phase) {
        self.hold_at(request, Hold { phase, looks: 0, at: HoldPoint::Puts });
    }

    /// Stops `request` later in an engine's `phase`: the engine checks once or twice a step, and the first `looks` checks pass.
    pub fn hold_later(&self, request: RequestId, phase: Phase, looks: u32) {
        self.hold_at(request, Hold { phase, looks, at: HoldPoint::Puts });
    }

    /// Stops `request` at a point of its transfer.
    pub fn hold_transfer(&self, request: RequestId, at: HoldPoint) {
        self.hold_at(request, Hold { phase: Phase::Transfer, looks: 0, at });
    }

    fn hold_at(&self, request: RequestId, hold: Hold) {
        self.held.lock().insert(request, hold);
    }

    /// Releases all requests.
    pub fn open(&self) {
        self.held.lock().clear();
    }

    /// Whether `request` was stopped at `phase`.
    pub fn reached(&self, request: &RequestId, phase: Phase) -> bool {
        self.seen.lock().contains(&(request.clone(), phase))
    }

    fn is_held(&self, attempt: &RequestId, phase: Phase, at: Option<HoldPoint>) -> bool {
        let request = client_id(attempt);
        let mut held = self.held.lock();
        let Some(hold) = held.get_mut(&request).filter(|h| h.phase == phase && at.is_none_or(|at| at == h.at)) else {
            return false;
        };
        if hold.looks > 0 {
            hold.looks -= 1;
            return false;
        }
        self.seen.lock().insert((request, phase));
        true
    }
}

/// The client's id, from the one that workers know.
fn client_id(attempt: &RequestId) -> RequestId {
    let is_attempt = |hex: &str| hex.len() == ATTEMPT_HEX && hex.bytes().all(|b| b.is_ascii_hexdigit());
    match attempt.as_str().rsplit_once('.') {
        Some((id, hex)) if is_attempt(hex) => RequestId::try_new(id).unwrap_or_else(|_| attempt.clone()),
        _ => attempt.clone(),
    }
}

impl SequenceGate for Gates {
    fn is_open(&self, id: &RequestId, phase: SequencePhase) -> bool {
        let phase = match phase {
            SequencePhase::Queue => Phase::Queue,
            SequencePhase::Prefill => Phase::Prefill,
            SequencePhase::Decode => Phase::Decode,
        };
        !self.is_held(id, phase, None)
    }
}

impl TransferHooks for Gates {
    fn hold(&self, phase: HoldPoint, request_id: &RequestId) -> bool {
        self.is_held(request_id, Phase::Transfer, Some(phase))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> RequestId {
        RequestId::try_new(text).unwrap()
    }

    #[test]
    fn attempts_are_held_under_their_clients_name() {
        let gates = Gates::default();
        gates.hold_later(id("a.b"), Phase::Decode, 2);
        gates.hold_transfer(id("c"), HoldPoint::Verify);
        let attempt = id("a.b.0123456789abcdef");
        let open: Vec<bool> = (0..4).map(|_| gates.is_open(&attempt, SequencePhase::Decode)).collect();
        assert_eq!(open, [true, true, false, false]);
        assert!(gates.is_open(&attempt, SequencePhase::Queue) && gates.is_open(&id("a"), SequencePhase::Decode));
        assert!(gates.reached(&id("a.b"), Phase::Decode) && !gates.reached(&id("a.b"), Phase::Queue));
        let transfer = |phase| TransferHooks::hold(&gates, phase, &id("c.0123456789abcdef"));
        assert!(!transfer(HoldPoint::Puts) && transfer(HoldPoint::Verify));
        gates.open();
        assert!(gates.is_open(&attempt, SequencePhase::Decode));
    }
}
