//! Models with states: what the prefix cache finds, and which tokens speculation gives.

use super::prefix::{reuse, run};
use super::*;
use stand_in::{continuation, repeating_token, repetition};

/// An engine with room for everything, which computes prompts of these tests in few parts.
fn engine(hooks: Hooks) -> EngineHandle {
    let config = EngineConfig { chunk_tokens_max: 64, model_len_max: 128, ..config() };
    start_on(Kv::with_states(40, 16), config, hooks, None).0
}

/// Both kinds of devices: those that compute a step at once, and those that have one ahead.
fn engines() -> [EngineHandle; 2] {
    [false, true].map(|is_asynchronous| engine(Hooks { is_asynchronous, ..Hooks::default() }))
}

#[test]
fn the_same_prompt_goes_on_behind_its_last_whole_block() {
    for engine in engines() {
        let tokens = prompt(1, 60);
        for (expected, rows) in [(reuse(0, 48), 60), (reuse(48, 0), 72), (reuse(48, 0), 84)] {
            let (output, found) = run(&engine, shared_request(&tokens, 3, "a"));
            assert_eq!((output, found), (continuation(&tokens, 3), expected));
            assert_eq!(engine.load().prefill_rows, rows);
        }
        assert_eq!(run(&engine, shared_request(&tokens, 3, "b")).1, reuse(0, 48), "another tenant");
    }
}

#[test]
fn the_next_turn_goes_on_behind_the_answer() {
    for engine in engines() {
        let mut tokens = prompt(1, 20);
        tokens.extend(run(&engine, shared_request(&tokens, 40, "a")).0);
        tokens.extend(prompt(9, 6));
        // 59 of the 60 tokens have KV, 48 are whole blocks.
        assert_eq!(run(&engine, shared_request(&tokens, 3, "a")), (continuation(&tokens, 3), reuse(48, 16)));
    }
}

#[test]
fn the_second_prompt_that_begins_alike_leaves_a_state_for_the_third() {
    for engine in engines() {
        let tokens = |end: u32| [prompt(1, 40), prompt(end, 20)].concat();
        let found = |end: u32| {
            let (output, found) = run(&engine, shared_request(&tokens(end), 3, "a"));
            assert_eq!(output, continuation(&tokens(end), 3));
            found.cached_tokens
        };
        assert_eq!([2, 3, 4, 5].map(found), [0, 0, 32, 32]);
    }
}

#[test]
fn sequences_of_one_prompt_compute_it_once() {
    for engine in engines() {
        let tokens = prompt(1, 60);
        let all: Vec<_> = (0..3).map(|_| submit(&engine, shared_request(&tokens, 9, "a"), Run::Full)).collect();
        for sequence in all {
            assert_eq!(sequence.end().0, continuation(&tokens, 9));
        }
        // What is behind the last whole block is computed by each.
        assert_eq!(engine.load().prefill_rows, 60 + 12 + 12);
    }
}

#[test]
fn states_of_an_answer_make_room_before_those_of_prompts() {
    for is_asynchronous in [false, true] {
        let config = EngineConfig { chunk_tokens_max: 64, model_len_max: 400, ..config() };
        let engine = start_on(Kv::with_states(40, 6), config, Hooks { is_asynchronous, ..Hooks::default() }, None).0;
        let (tokens, others) = (prompt(1, 60), prompt(5, 20));
        assert_eq!(run(&engine, shared_request(&tokens, 3, "a")).1, reuse(0, 48));
        assert_eq!(run(&engine, shared_request(&others, 220, "a")).0, continuation(&others, 220));
        assert_eq!(run(&engine, shared_request(&tokens, 3, "a")).1.cached_tokens, 48);
    }
}

#[test]
fn answers_without_the_cache_hold_two_states_and_store_none() {
    for engine in engines() {
        let tokens = prompt(1, 60);
        assert_eq!(run(&engine, request(&tokens, 50)).0, continuation(&tokens, 50));
        assert_eq!(engine.pool().counts_of(1).cached, 0);
    }
}

#[test]
fn rejected_proposals_leave_no_trace_in_a_state() {
    for is_asynchronous in [false, true] {
        // Of a step that takes long, rows are a small part.
        let lasts = Some(Box::new(|| std::thread::sleep(Duration::from_micros(200))) as _);
        let next = Some(repeating_token as _);
        let engine = engine(Hooks { is_asynchronous, before_finish: lasts, next, ..Hooks::default() });
        let mut prompts = 0;
        for seed in 0..4 {
            let tokens = repetition(&prompt(seed, 6), 30);
            let output = submit(&engine, shared_request(&tokens, 90, "a"), Run::Full).end().0;
            assert_eq!(output, repetition(&tokens, 90));
            // The states that it cached are those of its tokens.
            let all = [&tokens[..], &output[..60], &[7]].concat();
            assert_eq!(run(&engine, shared_request(&all, 3, "a")).0, repetition(&all, 3));
            prompts += tokens.len() + all.len();
        }
        let load = engine.load();
        assert!(load.accepted_tokens > 0 && load.accepted_tokens < load.proposed_tokens, "{load:?}");
        assert!(load.cached_tokens > 0, "{load:?}");
        assert_eq!(load.prefill_rows + load.cached_tokens, prompts as u64, "what is computed again is no prefill");
    }
}
