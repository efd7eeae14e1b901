//! Shared prefixes: cached tokens are not computed, a prefix that is being computed is waited for, and tenants share nothing.

use super::*;
use crate::{PinFor, Reuse, SequencePhase};
use stand_in::continuation;

/// Runs a sequence to its end; returns its output and what it reused.
pub(super) fn run(engine: &EngineHandle, request: SequenceRequest) -> (Vec<TokenId>, Reuse) {
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

pub(super) fn reuse(cached_tokens: usize, written_tokens: usize) -> Reuse {
    Reuse { cached_tokens, written_tokens }
}

#[test]
fn what_is_cached_is_not_computed_and_the_last_token_always_is() {
    let (engine, _) = start(8, config(), Hooks::default());
    let tokens = prompt(1, 32);
    for (expected, rows) in [(reuse(0, 32), 32), (reuse(16, 0), 48), (reuse(16, 0), 64)] {
        let (output, found) = run(&engine, shared_request(&tokens, 3, "a"));
        assert_eq!((output, found), (continuation(&tokens, 3), expected));
        assert_eq!(engine.load().prefill_rows, rows);
    }
    assert_eq!(engine.load().cached_tokens, 32);
    // Another tenant, and a request that does not use the prefix cache.
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
fn a_sequence_that_is_continued_tells_of_all_that_it_came_with() {
    let (engine, _) = start(8, config(), Hooks::default());
    let mut tokens = prompt(1, 20);
    tokens.extend(run(&engine, shared_request(&tokens, 14, "a")).0);
    let continued = SequenceRequest { prompt_len: 20, ..shared_request(&tokens, 17, "a") };
    assert_eq!(run(&engine, continued), (continuation(&tokens, 3), reuse(32, 0)));
}

#[test]
fn a_new_prefix_of_many_is_computed_once() {
    let (engine, _) = start(40, EngineConfig { running_max: 8, ..config() }, Hooks::default());
    let of = |i: u32| [prompt(1, 32), prompt(50 + i, 8)].concat();
    // All come before the first step.
    engine.set_gate(Some(Arc::new(|_: &RequestId, _: SequencePhase| false)));
    let sequences: Vec<_> = (0..8).map(|i| submit(&engine, shared_request(&of(i), 4, "a"), Run::Full)).collect();
    engine.set_gate(None);
    for (i, sequence) in sequences.iter().enumerate() {
        assert_eq!(sequence.end().0, continuation(&of(i as u32), 4));
    }
    assert_eq!((engine.load().prefill_rows, engine.load().cached_tokens), (32 + 8 * 8, 7 * 32));
}

/// `n` samples of a prompt.
fn samples(engine: &EngineHandle, tokens: &[TokenId], n: u32, run: impl Fn() -> Run) -> Vec<Submitted> {
    // All come before the first step.
    engine.set_gate(Some(Arc::new(|_: &RequestId, _: SequencePhase| false)));
    let sample = |sample_index| SequenceRequest { sample_index, ..shared_request(tokens, 16, "a") };
    let samples = (0..n).map(|i| submit(engine, sample(i), run())).collect();
    engine.set_gate(None);
    samples
}

#[test]
fn samples_go_on_with_copies_of_the_block_in_which_they_part() {
    // Tokens after the last whole block: none, one, some, all but one; and a prompt that is shorter than a block.
    for len in [33, 34, 40, 48, 16] {
        let (engine, _) = start(40, EngineConfig { chunk_tokens_max: 64, ..config() }, Hooks::default());
        let tokens = prompt(1, len);
        for sample in samples(&engine, &tokens, 4, || Run::Full) {
            assert_eq!(sample.end().0, continuation(&tokens, 16));
        }
        let (load, len) = (engine.load(), len as u64);
        // With too few tokens to wait for, each sequence computes its own.
        let (rows, cached) = if len > 16 { (len + 3, 3 * (len - 1)) } else { (4 * len, 0) };
        assert_eq!((load.prefill_rows, load.cached_tokens), (rows, cached), "{len} tokens");
        assert_eq!(engine.pool().counts().referenced, 0);
    }
}

#[test]
fn a_sample_that_comes_late_takes_a_copy_of_what_another_is_writing_into() {
    let tokens = prompt(1, 40);
    let (engine, kv) = start(20, config(), Hooks::default());
    // Room for the start event and one token: then it waits for its receiver.
    let first = submit_with_room(&engine, shared_request(&tokens, 16, "a"), Run::Full, 2);
    first.wait_token();
    assert_eq!(run(&engine, shared_request(&tokens, 16, "a")), (continuation(&tokens, 16), reuse(39, 0)));
    assert_eq!(engine.load().prefill_rows, 40 + 1);
    first.room.store(usize::MAX, Ordering::Relaxed);
    assert_eq!(first.end().0, continuation(&tokens, 16)[1..]);

    // The first one's KV came from a peer.
    let tokens = prompt(2, 40);
    let lease = engine.reserve(40, &[]).unwrap();
    kv.receive(&lease.blocks().0[0], &tokens);
    let mut adopted = shared_request(&[&tokens[..], &continuation(&tokens, 1)].concat(), 16, "a");
    adopted.prompt_len = 40;
    let adopted = submit_with_room(&engine, adopted, Run::Adopted { lease, turn: None }, 2);
    adopted.wait_token();
    assert_eq!(run(&engine, shared_request(&tokens, 16, "a")), (continuation(&tokens, 16), reuse(39, 0)));
    assert_eq!(engine.load().prefill_rows, 40 + 1 + 1);
    // Another tenant's KV is not reused.
    assert_eq!(run(&engine, shared_request(&tokens, 16, "b")).1.cached_tokens, 0);
    adopted.room.store(usize::MAX, Ordering::Relaxed);
    assert_eq!(adopted.end().0, continuation(&tokens, 16)[2..]);
    assert_eq!(engine.pool().counts().referenced, 0);
}

#[test]
fn samples_that_find_no_room_for_a_block_of_their_own_wait_for_it() {
    // Two sequences fit, and one block is the watermark.
    let (engine, _) = start(6, config(), Hooks::default());
    let tokens = prompt(1, 40);
    for sample in samples(&engine, &tokens, 6, || Run::Full) {
        assert_eq!(sample.end().0, continuation(&tokens, 16));
    }
    assert_eq!(engine.pool().counts().referenced, 0);
}

#[test]
fn one_that_is_held_is_not_waited_for() {
    let (engine, _) = start(40, config(), Hooks::default());
    let held = RequestId::try_new("held").unwrap();
    let gate = held.clone();
    engine.set_gate(Some(Arc::new(move |id: &RequestId, phase: SequencePhase| {
        *id != gate || phase == SequencePhase::Queue
    })));
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
fn what_is_said_to_be_cold_goes_first() {
    let (engine, _) = start(6, config(), Hooks::default());
    let (cold, warm) = (prompt(1, 33), prompt(2, 33));
    run(&engine, shared_request(&warm, 2, "a"));
    let mut request = shared_request(&cold, 2, "a");
    request.prefix.as_mut().unwrap().cold = true;
    run(&engine, request);
    run(&engine, shared_request(&prompt(3, 40), 4, "a"));
    let hashes = |tokens: &[TokenId]| shared_request(tokens, 1, "a").block_hashes();
    let cached = [&cold, &warm].map(|tokens| engine.pool().cached_tokens(&hashes(tokens)));
    assert_eq!(cached, [16, 32], "two are free, and the cold one gave the third");
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

/// As if a request had pinned it.
fn pinned_request(tokens: &[TokenId], time: Duration) -> SequenceRequest {
    let mut request = shared_request(tokens, 2, "a");
    request.prefix.as_mut().unwrap().pin = Some(PinFor { owner: 1, time });
    request
}

#[test]
fn a_prompt_that_is_cached_already_is_pinned_all_the_same() {
    let (engine, _) = start(40, config(), Hooks::default());
    let tokens = prompt(1, 40);
    run(&engine, shared_request(&tokens, 2, "a"));
    assert_eq!(engine.pool().cache_counts().pinned, 0);
    assert_eq!(run(&engine, pinned_request(&tokens, Duration::from_secs(9))).1, reuse(32, 0));
    assert_eq!(engine.pool().cache_counts().pinned, 2);
}

#[test]
fn pins_give_way_to_what_could_not_go_on_otherwise() {
    let (engine, _) = start(24, EngineConfig { model_len_max: 400, ..config() }, Hooks::default());
    run(&engine, pinned_request(&prompt(1, 40), Duration::from_secs(600)));
    assert_eq!(engine.pool().cache_counts().pinned, 2);
    // The prompt fits beside the pinned blocks, but its output does not.
    let tokens = prompt(2, 16 * 21);
    assert_eq!(run(&engine, shared_request(&tokens, 40, "a")).0, continuation(&tokens, 40));
    assert_eq!(engine.pool().cache_counts().pinned, 0);
    run(&engine, pinned_request(&prompt(1, 40), Duration::from_secs(600)));
    // No room for its prompt.
    let tokens = prompt(3, 16 * 23);
    assert_eq!(run(&engine, shared_request(&tokens, 2, "a")).0, continuation(&tokens, 2));
    run(&engine, pinned_request(&prompt(1, 40), Duration::from_secs(600)));
    assert!(engine.reserve(16 * 24, &[]).is_some(), "nor for a reservation");
}
