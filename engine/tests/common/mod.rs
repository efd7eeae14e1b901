//! What tests of whole engines have in common.
#![allow(dead_code, unreachable_pub)] // Each test binary uses its part.

use baton_engine::{PrefillObserver, PrefixUse, SequenceEvent, SequenceRequest, SequenceSink};
use baton_kv_cache::{Lease, PrefixHasher};
use baton_types::{BlockTables, Digest, Fence, RequestId, SamplingParams, Share, TokenId, TokenLogprobs};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest wait for anything that must come.
pub const FOREVER: Duration = Duration::from_secs(120);

/// A token, and the bits of its log-probability and of those of the most likely ones.
pub type Bits = (TokenId, u32, Vec<(TokenId, u32)>);

pub fn bits(token: TokenId, logprobs: &TokenLogprobs) -> Bits {
    (token, logprobs.chosen.to_bits(), logprobs.top.iter().map(|(token, p)| (*token, p.to_bits())).collect())
}

/// A request that shares no prefix.
pub fn request(id: impl Into<String>, tokens: Vec<TokenId>, sampling: SamplingParams) -> SequenceRequest {
    SequenceRequest {
        id: RequestId::try_new(id).unwrap(),
        prompt_len: tokens.len(),
        tokens,
        sampling,
        sample_index: 0,
        deadline: Instant::now() + FOREVER,
        priority: 0,
        share: Share::default(),
        prefix: None,
        adapter: None,
    }
}

/// The same, with blocks that others of these find and use.
pub fn cached(request: SequenceRequest) -> SequenceRequest {
    let prefix = PrefixUse::new(PrefixHasher::new(&Digest([1; 32]), b""), &request.tokens);
    SequenceRequest { prefix: Some(prefix), ..request }
}

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
