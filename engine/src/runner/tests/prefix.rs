//! Prefixes in common: what is cached is not computed, what is being computed is waited for, and tenants have nothing in common.

use super::*;
use crate::{Phase, Reuse};
use stand_in::continuation;

/// Runs a sequence to its end; its answer, and what it reused.
fn run(engine: &EngineHandle, request: SequenceRequest) -> (Vec<TokenId>, Reuse) {
    let (sequence, mut output, mut reuse) = (submit(engine, request, Run::Full), vec![], None);
    loop {
        match sequence.next() {
            SequenceEvent::Started { .. } => {}
            SequenceEvent::Token { token, reuse: of_first, .. } => {
                assert_eq!(of_first.is_some(), output.is_empty(), "said with the first token");
                reuse = reuse.or(of_first);
                output.push(token);
            }
            SequenceEvent::Finished { .. } => return (output, reuse.expect("a first token")),
            other => panic!("{other:?}"),
        }
    }
}

fn reuse(cached_tokens: usize, written_tokens: usize) -> Reuse {
    Reuse { cached_tokens, written_tokens }
}

#[test]
fn what_is_cached_is_not_computed_and_the_last_token_always_is() {
    let (engine, _) = start(8, config(), Hooks::default());
    let tokens = prompt(1, 32);
    for (expected, rows) in [(reuse(0, 32), 32), (reuse(16, 16), 48), (reuse(16, 16), 64)] {
        let (output, found) = run(&engine, shared_request(&tokens, 3, "a"));
        assert_eq!((output, found), (continuation(&tokens, 3), expected));
        assert_eq!(engine.load().prefill_rows, rows);
    }
    assert_eq!(engine.load().cached_tokens, 32);
    // Another tenant, and a request that shares nothing.
    assert_eq!(run(&engine, shared_request(&tokens, 3, "b")).1, reuse(0, 32));
    assert_eq!(run(&engine, request(&tokens, 3)).1, reuse(0, 0));
}

#[test]
fn the_next_turn_finds_the_answer_too() {
    let (engine, _) = start(8, config(), Hooks::default());
    let mut tokens = prompt(1, 20);
    let (answer, _) = run(&engine, shared_request(&tokens, 14, "a"));
    tokens.extend(answer);
    tokens.extend(prompt(9, 6));
    // 33 of the 34 tokens have KV; the last one was never computed.
    assert_eq!(run(&engine, shared_request(&tokens, 3, "a")), (continuation(&tokens, 3), reuse(32, 0)));
}

#[test]
fn a_new_prefix_of_many_is_computed_once() {
    let (engine, _) = start(40, EngineConfig { running_max: 8, ..config() }, Hooks::default());
    let of = |i: u32| [prompt(1, 32), prompt(50 + i, 8)].concat();
    // All come before the first step.
    engine.set_gate(Some(Arc::new(|_: &RequestId, _: Phase| false)));
    let sequences: Vec<_> = (0..8).map(|i| submit(&engine, shared_request(&of(i), 4, "a"), Run::Full)).collect();
    engine.set_gate(None);
    for (i, sequence) in sequences.iter().enumerate() {
        assert_eq!(sequence.end().0, continuation(&of(i as u32), 4));
    }
    assert_eq!((engine.load().prefill_rows, engine.load().cached_tokens), (32 + 8 * 8, 7 * 32));
}

#[test]
fn one_that_is_held_is_not_waited_for() {
    let (engine, _) = start(40, config(), Hooks::default());
    let held = RequestId::try_new("held").unwrap();
    let gate = held.clone();
    engine.set_gate(Some(Arc::new(move |id: &RequestId, phase: Phase| *id != gate || phase == Phase::Queue)));
    let tokens = prompt(1, 40);
    let slow = SequenceRequest { id: held, ..shared_request(&tokens, 4, "a") };
    let slow = submit(&engine, slow, Run::Full);
    assert!(matches!(slow.next(), SequenceEvent::Started { .. }));
    assert_eq!(run(&engine, shared_request(&tokens, 4, "a")), (continuation(&tokens, 4), reuse(0, 32)));
    engine.set_gate(None);
    assert_eq!(slow.end().0, continuation(&tokens, 4));
}

#[test]
fn what_nobody_uses_makes_room_before_anyone_is_preempted() {
    let (engine, _) = start(6, config(), Hooks::default());
    (0..5).for_each(|i| assert_eq!(run(&engine, shared_request(&prompt(i, 40), 8, "a")).1.cached_tokens, 0));
    assert_eq!((engine.load().preemptions, engine.pool().counts().referenced), (0, 0));
    assert!(engine.pool().cache_counts().evicted > 0);
}

#[test]
fn a_cache_that_is_off_keeps_nothing() {
    let (engine, _) = start(8, EngineConfig { prefix_cache: None, ..config() }, Hooks::default());
    let tokens = prompt(1, 32);
    for _ in 0..2 {
        assert_eq!(run(&engine, shared_request(&tokens, 3, "a")), (continuation(&tokens, 3), reuse(0, 0)));
    }
    assert_eq!(engine.pool().counts().free, 8);
}
