//! Many sequences in pools far too small for them: whatever is batched, chunked, preempted, cancelled or handed over, every token equals
//! that of the sequence run alone. At the end no blocks are held.

use super::*;
use crate::{DraftModel, Load, PrefillObserver};
use baton_kv_cache::Lease;
use baton_types::{BlockTables, Fence};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use stand_in::{continuation, mostly_next_token, repeating_token, repetition};
use std::sync::Mutex;

/// Keeps the outgoing blocks until the job's reader runs.
#[derive(Clone, Default)]
struct Unwatched(Arc<Mutex<Option<Lease>>>);

impl PrefillObserver for Unwatched {
    fn started(&mut self, _blocks: &BlockTables, _now: Instant) {}
    fn layer_launched(&mut self, _layer: u32, _tokens_end: usize, _fence: &Fence) {}
    fn prefilled(&mut self, lease: Lease) {
        *self.0.lock().unwrap() = Some(lease);
    }
}

struct Job {
    tokens: Vec<TokenId>,
    max_tokens: u32,
    sequence: Submitted,
    cancelled: bool,
    blocks: Unwatched,
}

fn check(job: &Job, kv: &Kv, after: Tokens, what: &str) -> Option<Lease> {
    let (output, outcome) = job.sequence.end();
    assert_eq!(output, after(&job.tokens, output.len()), "{what}: wrong tokens");
    match outcome {
        Outcome::Prefilled => {
            let lease = job.blocks.0.lock().unwrap().take();
            let tables = lease.as_ref().expect("blocks came out").tables();
            if let Some(states) = tables.0.get(1) {
                assert_eq!((states.blocks.len(), kv.state(states.blocks[0])), (1, job.tokens.clone()), "{what}");
            }
            lease
        }
        Outcome::Finished(FinishReason::Length) => {
            assert_eq!(output.len(), job.max_tokens as usize, "{what}");
            None
        }
        Outcome::Finished(FinishReason::Cancelled) if job.cancelled => None,
        other => panic!("{what}: {other:?}"),
    }
}

/// The tokens after others.
type Tokens = fn(&[TokenId], usize) -> Vec<TokenId>;

/// What is proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proposed {
    /// Little: nothing repeats itself.
    Little,
    /// What the model repeats.
    Repetitions,
    /// What a draft model says, which is mostly right.
    Drafts,
}

fn run_seed(seed: u64, is_asynchronous: bool, proposed: Proposed, has_states: bool) -> Load {
    let repeats = proposed == Proposed::Repetitions;
    let after: Tokens = if repeats { repetition } else { continuation };
    let mut rng = StdRng::seed_from_u64(seed);
    let config = EngineConfig {
        chunk_tokens_max: rng.random_range(1..20),
        mixed_chunk_tokens_max: rng.random_range(1..20),
        running_max: rng.random_range(1..8),
        watermark_blocks: rng.random_range(0..3),
        ..config()
    };
    let blocks = rng.random_range(4..9);
    let draft_blocks = rng.random_range(1..20);
    let states = if has_states { rng.random_range(2..9) } else { 0 };
    let what = format!(
        "seed {seed}, asynchronous {is_asynchronous}, {proposed:?}: {config:?}, {blocks} and {draft_blocks} blocks, {states} states"
    );
    // Of a step that takes long, rows are a small part.
    let lasts = move || {
        if proposed != Proposed::Little {
            std::thread::sleep(Duration::from_micros(100))
        }
    };
    let next = repeats.then_some(repeating_token as _);
    let hooks = Hooks { is_asynchronous, next, before_finish: Some(Box::new(lasts)), ..Hooks::default() };
    let draft = (proposed == Proposed::Drafts).then(|| {
        let hooks = Hooks { next: Some(mostly_next_token), ..Hooks::default() };
        DraftModel::with(StandIn::new(Kv::new(draft_blocks), hooks), &map(draft_blocks), 64)
    });
    let (engine, kv) = start_on(Kv::with_states(blocks, states), config.clone(), hooks, draft);
    let mut jobs: Vec<Job> = Vec::new();
    for _ in 0..40 {
        // Few different beginnings, so that many sequences share one, and some prompts that repeat the previous one.
        let stem = rng.random_range(0..36);
        let mut tokens = prompt(rng.random_range(0..3), stem);
        tokens.extend(prompt(rng.random(), rng.random_range(1..40 - stem)));
        if let Some(before) = jobs.last().filter(|_| rng.random_range(0..3) == 0) {
            tokens = before.tokens.clone();
        }
        let max_tokens = rng.random_range(1..=(64 - tokens.len() as u32).min(24));
        let shares = rng.random_range(0..4) > 0;
        let mut request = if shares { shared_request(&tokens, max_tokens, "a") } else { request(&tokens, max_tokens) };
        request.priority = rng.random_range(-1..2);
        let blocks = Unwatched::default();
        let run = match rng.random_range(0..4) {
            0 => Run::PrefillOnly { observer: Box::new(blocks.clone()) },
            1 => match engine.reserve(tokens.len(), &request.block_hashes()) {
                // As a transfer would: KV that is not cached comes from outside, together with the first token.
                Some(lease) if max_tokens > 1 => {
                    let (blocks, cached) = (&lease.tables().0[0].blocks, lease.cached_blocks() * BLOCK);
                    assert_eq!(kv.load(blocks, cached), tokens[..cached], "{what}: not its KV");
                    kv.receive_all(lease.tables(), &tokens, cached);
                    request.tokens.extend(after(&tokens, 1));
                    Run::Adopted { lease, turn: None }
                }
                _ => Run::Full,
            },
            _ => Run::Full,
        };
        let adopted = matches!(run, Run::Adopted { .. });
        let sequence = submit(&engine, request.clone(), run);
        let (tokens, max_tokens) = if adopted { (request.tokens, max_tokens - 1) } else { (tokens, max_tokens) };
        let cancelled = rng.random_range(0..6) == 0;
        if cancelled {
            sequence.control.cancel();
        }
        jobs.push(Job { tokens, max_tokens, sequence, cancelled, blocks });
        if rng.random_range(0..3) == 0 {
            std::thread::yield_now();
        }
    }
    // Each job has its own reader: an outgoing lease is held until its reader runs, in a pool that other jobs wait for, but never until
    // another job ends.
    std::thread::scope(|readers| {
        for job in jobs {
            let (what, kv) = (&what, &kv);
            readers.spawn(move || drop(check(&job, kv, after, what)));
        }
    });
    // A step that was launched ahead of an end may still use blocks.
    eventually(&format!("all blocks are free, {what}"), || engine.pool().counts().referenced == 0);
    assert!(engine.stop());
    let load = engine.load();
    assert_eq!((load.waiting, load.running, load.draft_blocks), (0, 0, 0), "{what}");
    load
}

/// Both kinds of devices, with states and without.
fn runs_of(seeds: u64, proposed: Proposed, check: impl Fn(&[Load])) {
    for (is_asynchronous, has_states) in [(false, false), (true, false), (false, true), (true, true)] {
        let runs: Vec<Load> = (0..seeds).map(|seed| run_seed(seed, is_asynchronous, proposed, has_states)).collect();
        assert!(
            runs.iter().any(|load| load.preemptions > 0),
            "pools this small must preempt, or this test shows nothing"
        );
        assert!(runs.iter().any(|load| load.cached_tokens > 0), "nothing was found cached, or this test shows nothing");
        check(&runs);
    }
}

#[test]
fn tokens_are_those_of_the_sequence_alone_and_nothing_leaks() {
    runs_of(60, Proposed::Little, |_| ());
}

#[test]
fn tokens_are_those_of_the_sequence_alone_with_proposals() {
    runs_of(30, Proposed::Repetitions, |runs| {
        let accepted: u64 = runs.iter().map(|load| load.accepted_tokens).sum();
        let proposed: u64 = runs.iter().map(|load| load.proposed_tokens).sum();
        assert!(accepted > 0 && accepted < proposed, "{accepted} of {proposed} proposals show little");
    });
}

#[test]
fn tokens_are_those_of_the_sequence_alone_with_a_draft_model() {
    runs_of(30, Proposed::Drafts, |runs| {
        let accepted: u64 = runs.iter().map(|load| load.draft_accepted_tokens).sum();
        let proposed: u64 = runs.iter().map(|load| load.draft_proposed_tokens).sum();
        assert!(accepted > 100 && accepted < proposed, "{accepted} of {proposed} proposals show little");
    });
}
