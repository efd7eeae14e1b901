//! Proposals: the same tokens in fewer steps, and nothing of a rejected one remains. Steps take the same time whatever their rows, so that
//! every likely proposal gets a row.

use super::driven::{STEP, World};
use super::*;
use crate::{SpeculationConfig, SpeculationMethod, StepInput, Turn};
use baton_kernels::step::RowId;
use baton_types::defect::{Defect, seed};
use parking_lot::Mutex;
use stand_in::{repeating_token, repetition};

type Steps = Arc<Mutex<Vec<StepInput>>>;

fn long() -> EngineConfig {
    EngineConfig { model_len_max: 400, chunk_tokens_max: 16, ..config() }
}

/// An engine of a model that repeats itself, and the steps that it launches.
fn world(blocks: u32, config: EngineConfig, is_asynchronous: bool) -> (World, Steps) {
    let steps = Steps::default();
    let launched = steps.clone();
    let before_step = Box::new(move |step: &StepInput| {
        launched.lock().push(step.clone());
        Ok(())
    });
    let hooks =
        Hooks { before_step: Some(before_step), is_asynchronous, next: Some(repeating_token), ..Hooks::default() };
    (World::with(blocks, config, hooks), steps)
}

/// One prompt, and how many tokens to answer.
fn answer(world: &mut World, tokens: &[TokenId], max_tokens: u32) -> (Vec<TokenId>, Outcome) {
    let sequence = submit(&world.engine, world.request(tokens, max_tokens), Run::Full);
    world.run();
    sequence.end()
}

/// Proposals of a step.
fn drafts(step: &StepInput) -> usize {
    step.segments.iter().map(|rows| rows.samples.saturating_sub(1)).sum()
}

#[test]
fn proposals_save_steps_and_change_no_token() {
    for is_asynchronous in [false, true] {
        let tokens = prompt(1, 20);
        let off = SpeculationConfig { method: SpeculationMethod::Off, ..SpeculationConfig::default() };
        for speculation in [off, SpeculationConfig::default()] {
            let (mut world, steps) = world(24, EngineConfig { speculation, ..long() }, is_asynchronous);
            let (output, _) = answer(&mut world, &tokens, 200);
            assert_eq!(output, repetition(&tokens, 200), "{speculation:?}, asynchronous {is_asynchronous}");
            let (load, steps) = (world.engine.load(), steps.lock());
            let proposed: usize = steps.iter().map(drafts).sum();
            assert_eq!(load.proposed_tokens, proposed as u64);
            assert_eq!((load.generated_tokens, load.decode_rows), (200, 199), "rejected rows count for nothing");
            assert_eq!(world.engine.pool().counts().referenced, 0);
            let decodes = steps.len() as u64 - 2;
            if speculation == off {
                assert_eq!((decodes, proposed), (199, 0));
                continue;
            }
            assert_eq!(decodes + load.accepted_tokens, 199, "each other token has a step of its own");
            assert!(decodes < 120, "{decodes} steps");
            assert!(load.accepted_tokens < load.proposed_tokens, "some were wrong, or this test shows little");
            assert!(steps.iter().all(|step| drafts(step) <= speculation.tokens_max));
            let rate = world.engine.load().decode_steps_per_s * STEP.as_secs_f32();
            assert!(rate > 1.2, "a sequence gets {rate} tokens by step");
        }
    }
}

#[test]
fn an_answer_ends_where_it_would_end_alone() {
    let tokens = prompt(1, 20);
    let whole = repetition(&tokens, 150);
    for at in 60..90 {
        let (mut by_length, _) = world(24, long(), false);
        let (output, outcome) = answer(&mut by_length, &tokens, at as u32);
        assert_eq!(output, whole[..at]);
        assert!(matches!(outcome, Outcome::Finished(FinishReason::Length)));

        let (mut by_context, steps) = world(24, EngineConfig { model_len_max: 20 + at, ..long() }, false);
        assert_eq!(answer(&mut by_context, &tokens, 300).0, whole[..at]);
        let end = |step: &StepInput| step.segments.iter().map(|rows| rows.position + rows.rows).max();
        assert!(steps.lock().iter().all(|step| end(step) < Some(20 + at)), "no row behind the last that may sample");

        // An end token amid accepted proposals.
        let end = whole[at];
        let first = whole.iter().position(|token| *token == end).unwrap();
        let (mut by_token, _) = world(24, EngineConfig { end_tokens: vec![end], ..long() }, false);
        let (output, outcome) = answer(&mut by_token, &tokens, 300);
        assert_eq!(output, whole[..=first]);
        assert!(matches!(outcome, Outcome::Finished(FinishReason::Stop)));
        let load = by_token.engine.load();
        assert_eq!((load.generated_tokens, load.decode_rows), (first as u64 + 1, first as u64));
        assert_eq!(by_token.engine.pool().counts().referenced, 0);
    }
}

#[test]
fn blocks_for_proposals_are_free_ones_and_come_back() {
    let tokens = prompt(1, 20);
    // Blocks of the whole sequence, and what is kept free.
    for (blocks, watermark_blocks) in [(14, 0), (24, 1)] {
        let (mut world, _) = world(blocks, EngineConfig { watermark_blocks, ..long() }, false);
        let sequence = submit(&world.engine, world.request(&tokens, 200), Run::Full);
        let (mut len, mut ahead) = (20, 0);
        loop {
            let turn = world.driven.turn();
            world.clock.pass(STEP);
            len += sequence.events.try_iter().filter(|event| matches!(event, SequenceEvent::Token { .. })).count();
            let held = world.engine.pool().counts().referenced;
            ahead += usize::from(held > len.div_ceil(BLOCK));
            assert!(held <= (len + 8).div_ceil(BLOCK), "{held} blocks of {len} tokens");
            if turn != Turn::Launched {
                break;
            }
        }
        assert_eq!(len, 220);
        assert!(ahead > 0 && ahead < 30, "{ahead} steps had a block for proposals alone");
        assert_eq!(world.engine.load().preemptions, 0);
    }
}

/// With a proposal's block as one that others wait for, this pool would preempt more often.
#[test]
fn nobody_is_preempted_for_proposals() {
    let preemptions = [SpeculationMethod::Off, SpeculationMethod::Ngram].map(|method| {
        let speculation = SpeculationConfig { method, ..SpeculationConfig::default() };
        let (mut world, _) = world(16, EngineConfig { watermark_blocks: 0, speculation, ..long() }, false);
        let prompts = [prompt(1, 20), prompt(2, 30)];
        let sequences = prompts.each_ref().map(|tokens| submit(&world.engine, world.request(tokens, 120), Run::Full));
        world.run();
        for (sequence, tokens) in sequences.iter().zip(&prompts) {
            assert_eq!(sequence.end().0, repetition(tokens, 120));
        }
        assert_eq!(world.engine.load().proposed_tokens > 0, method == SpeculationMethod::Ngram);
        world.engine.load().preemptions
    });
    assert!(preemptions[1] <= preemptions[0], "{preemptions:?}");
}

#[test]
fn a_proposal_that_was_not_sampled_is_not_in_the_answer() {
    let tokens = prompt(1, 20);
    let output = || answer(&mut world(24, long(), false).0, &tokens, 200).0;
    assert_eq!(output(), repetition(&tokens, 200));
    seed(Some(Defect::RejectedTaken));
    let wrong = output();
    seed(None);
    assert_ne!(wrong, repetition(&tokens, 200));
}

/// Whether a sequence gets the right tokens whose prompt begins with what another one had that was cancelled in the step after so many
/// turns: it computes nothing after the end of that step.
fn continues_from_the_cache(seed: u32, turns: usize) -> bool {
    let (mut world, _) = world(40, long(), false);
    let mut tokens = prompt(seed, 20);
    let request = |world: &World, tokens: &[TokenId], n| SequenceRequest {
        deadline: world.engine.now() + FOREVER,
        ..shared_request(tokens, n, "a")
    };
    let first = submit(&world.engine, request(&world, &tokens, 300), Run::Full);
    for _ in 0..turns {
        assert_eq!(world.driven.turn(), Turn::Launched);
        world.clock.pass(STEP);
    }
    first.control.cancel();
    world.run();
    tokens.extend(first.end().0);
    // The block of the last token is not looked up.
    let more = repetition(&tokens, 2);
    tokens.extend(more);
    let second = submit(&world.engine, request(&world, &tokens, 30), Run::Full);
    world.run();
    second.end().0 == repetition(&tokens, 30)
}

#[test]
fn the_kv_of_a_proposal_that_was_not_sampled_is_not_in_the_cache() {
    let all_right = || {
        let mut cases = (1..17).flat_map(|seed| (20..50).map(move |turns| (seed, turns)));
        cases.all(|(seed, turns)| continues_from_the_cache(seed, turns))
    };
    assert!(all_right());
    seed(Some(Defect::RejectedKvCached));
    let all_right = all_right();
    seed(None);
    assert!(!all_right, "no block with it was read");
}

#[test]
fn a_step_with_prefill_has_no_proposals() {
    let (mut world, steps) = world(40, long(), false);
    let prompts = [prompt(1, 20), prompt(2, 90)];
    let first = submit(&world.engine, world.request(&prompts[0], 200), Run::Full);
    (0..60).for_each(|_| {
        assert_eq!(world.driven.turn(), Turn::Launched);
        world.clock.pass(STEP);
    });
    let second = submit(&world.engine, world.request(&prompts[1], 100), Run::Full);
    world.run();
    assert_eq!(first.end().0, repetition(&prompts[0], 200));
    assert_eq!(second.end().0, repetition(&prompts[1], 100));
    let steps = steps.lock();
    assert!(steps.iter().any(|step| drafts(step) > 0 && step.segments.len() == 2), "both had proposals in one step");
    let prefills = |step: &StepInput| step.segments.iter().any(|rows| rows.rows > rows.samples.max(1));
    assert!(steps.iter().filter(|step| prefills(step)).count() > 5);
    assert!(steps.iter().all(|step| !prefills(step) || drafts(step) == 0));
}

/// Takes as many events as there is room for, and holds them until the test reads.
#[derive(Clone, Default)]
struct Narrow(Arc<Mutex<Vec<SequenceEvent>>>);

impl SequenceSink for Narrow {
    fn has_room(&self, events: usize) -> bool {
        self.0.lock().len() + events <= 5
    }
    fn send(&mut self, event: SequenceEvent) -> bool {
        let mut held = self.0.lock();
        held.push(event);
        assert!(held.len() <= 5, "more events than there was room for: {held:?}");
        true
    }
}

#[test]
fn proposals_fit_into_the_sink() {
    for is_asynchronous in [false, true] {
        let (mut world, steps) = world(24, long(), is_asynchronous);
        let (tokens, sink) = (prompt(1, 20), Narrow::default());
        let request = world.request(&tokens, 150);
        let _control = world.engine.submit(request, Run::Full, Box::new(sink.clone())).unwrap();
        let mut output = Vec::new();
        while output.len() < 150 {
            world.run();
            output.extend(std::mem::take(&mut *sink.0.lock()).into_iter().filter_map(|event| match event {
                SequenceEvent::Token { token, .. } => Some(token),
                _ => None,
            }));
            world.engine.wake();
        }
        assert_eq!(output, repetition(&tokens, 150));
        let most = steps.lock().iter().map(drafts).max();
        assert!(most > Some(0) && most <= Some(3), "{most:?}");
    }
}

#[test]
fn a_device_that_runs_ahead_waits_where_proposals_are_likely() {
    let (mut world, steps) = world(24, long(), true);
    let tokens = prompt(1, 20);
    assert_eq!(answer(&mut world, &tokens, 200).0, repetition(&tokens, 200));
    let steps = steps.lock();
    assert!(steps.iter().any(|step| step.ids == [RowId::LastSampled]), "ahead where nothing repeats");
    assert!(steps.iter().any(|step| drafts(step) > 0), "and not where it does");
    assert!(world.engine.load().accepted_tokens > 40);
}

#[test]
fn a_cancelled_sequence_leaves_no_blocks() {
    let (mut world, steps) = world(24, long(), false);
    let sequence = submit(&world.engine, world.request(&prompt(1, 20), 300), Run::Full);
    while steps.lock().last().is_none_or(|step| drafts(step) == 0) {
        assert_eq!(world.driven.turn(), Turn::Launched);
        world.clock.pass(STEP);
    }
    sequence.control.cancel();
    world.run();
    assert!(matches!(sequence.end().1, Outcome::Finished(FinishReason::Cancelled)));
    assert_eq!(world.engine.pool().counts().referenced, 0);
}
