//! The engine thread with a fake model: every token is a hash of the tokens that it reads back through its block table.

mod ahead;
mod bounds;
mod draft_model;
mod driven;
mod ends;
mod faults;
mod handoff;
mod prefix;
mod random;
mod speculation;
mod stand_in;
mod states;

use crate::{
    DraftModel, Engine, EngineConfig, EngineHandle, PrefixUse, Run, SequenceControl, SequenceEvent, SequenceRequest,
    SequenceSink,
};
use baton_kv_cache::PrefixHasher;
use baton_types::{Digest, ErrorKind, FinishReason, KvPoolMap, RequestId, SamplingParams, Share, TokenId};
use stand_in::{Hooks, Kv, StandIn, VOCAB};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Nothing here takes long; a wait this long means a deadlock.
const FOREVER: Duration = Duration::from_secs(30);
const BLOCK: usize = 16;

fn config() -> EngineConfig {
    EngineConfig {
        model_len_max: 64,
        chunk_tokens_max: 8,
        running_max: 4,
        watermark_blocks: 1,
        ..EngineConfig::default()
    }
}

fn map(blocks: u32) -> KvPoolMap {
    Kv::new(blocks).map()
}

/// An engine of `blocks` blocks and its KV memory.
fn start(blocks: u32, config: EngineConfig, hooks: Hooks) -> (EngineHandle, Kv) {
    start_with_draft(blocks, config, hooks, None)
}

/// The same, with a model that proposes tokens.
fn start_with_draft(blocks: u32, config: EngineConfig, hooks: Hooks, draft: Option<DraftModel>) -> (EngineHandle, Kv) {
    start_on(Kv::new(blocks), config, hooks, draft)
}

/// The same, on a pool.
fn start_on(kv: Kv, config: EngineConfig, hooks: Hooks, draft: Option<DraftModel>) -> (EngineHandle, Kv) {
    let model = StandIn::new(kv.clone(), hooks);
    (Engine::start_with(model, &kv.map(), config, draft).unwrap(), kv)
}

fn request(tokens: &[TokenId], max_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        id: RequestId::try_new("request").unwrap(),
        tokens: tokens.to_vec(),
        prompt_len: tokens.len(),
        sampling: SamplingParams { max_tokens, ..SamplingParams::default() },
        sample_index: 0,
        deadline: Instant::now() + 10 * FOREVER,
        priority: 0,
        share: Share::default(),
        prefix: None,
        adapter: None,
    }
}

/// The same, with the prefix cache of its tenant.
fn shared_request(tokens: &[TokenId], max_tokens: u32, tenant: &str) -> SequenceRequest {
    let hasher = PrefixHasher::new(&Digest([1; 32]), tenant.as_bytes());
    SequenceRequest { prefix: Some(PrefixUse::new(hasher, tokens)), ..request(tokens, max_tokens) }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| (seed.wrapping_mul(31) + i * i) % VOCAB as u32).collect()
}

/// A sink whose room the test counts and refills.
struct TestSink {
    events: Sender<SequenceEvent>,
    room: Arc<AtomicUsize>,
}

impl TestSink {
    fn unread() -> Box<Self> {
        Box::new(Self { events: channel().0, room: Arc::default() })
    }
}

impl SequenceSink for TestSink {
    fn has_room(&self, _: usize) -> bool {
        self.room.load(Ordering::Relaxed) > 0
    }
    fn send(&mut self, event: SequenceEvent) -> bool {
        let _ = self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1));
        self.events.send(event).is_ok()
    }
}

/// A submitted sequence.
struct Submitted {
    control: SequenceControl,
    events: Receiver<SequenceEvent>,
    room: Arc<AtomicUsize>,
}

fn submit(engine: &EngineHandle, request: SequenceRequest, run: Run) -> Submitted {
    submit_with_room(engine, request, run, usize::MAX)
}

/// The sequence pauses after `room` events.
fn submit_with_room(engine: &EngineHandle, request: SequenceRequest, run: Run, room: usize) -> Submitted {
    let ((sender, events), room) = (channel(), Arc::new(AtomicUsize::new(room)));
    let control = engine.submit(request, run, Box::new(TestSink { events: sender, room: room.clone() })).unwrap();
    Submitted { control, events, room }
}

/// How a sequence ended.
#[derive(Debug)]
enum Outcome {
    Finished(FinishReason),
    Failed(ErrorKind, String),
    Prefilled,
}

impl Submitted {
    fn next(&self) -> SequenceEvent {
        self.events.recv_timeout(FOREVER).expect("an event comes")
    }

    /// Waits for the end; returns the tokens received before, and the outcome.
    fn end(&self) -> (Vec<TokenId>, Outcome) {
        let (mut tokens, mut last_finish) = (Vec::new(), None);
        loop {
            match self.next() {
                SequenceEvent::Started { .. } => assert!(tokens.is_empty(), "started before the first token"),
                SequenceEvent::Token { token, finish, .. } => {
                    assert_eq!(last_finish, None, "no token follows the last");
                    tokens.push(token);
                    last_finish = finish;
                }
                SequenceEvent::Prompt(_) => panic!("nobody asked for it"),
                SequenceEvent::Prefilled { .. } => return (tokens, Outcome::Prefilled),
                SequenceEvent::Finished { reason } => {
                    if reason != FinishReason::Cancelled {
                        assert_eq!(last_finish, Some(reason), "the last token announces the end");
                    }
                    return (tokens, Outcome::Finished(reason));
                }
                SequenceEvent::Failed { kind, message } => return (tokens, Outcome::Failed(kind, message)),
            }
        }
    }

    fn wait_token(&self) {
        while !matches!(self.next(), SequenceEvent::Token { .. }) {}
    }
}

/// Waits until `condition` holds.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let by = Instant::now() + FOREVER;
    while !condition() {
        assert!(Instant::now() < by, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
