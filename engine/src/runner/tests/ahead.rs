//! A device that computes while the next step is launched: what a step ahead uses, and what becomes of it if its sequence ends.

use super::*;
use crate::{Driven, SequencePhase, StepInput, Turn};
use baton_kernels::step::{Delta, RowId};
use baton_kv_cache::SharedPool;
use baton_types::SystemClock;
use baton_types::defect::{Defect, seed};
use parking_lot::Mutex;
use stand_in::continuation;
use std::sync::OnceLock;

type Steps = Arc<Mutex<Vec<StepInput>>>;

/// An engine over an asynchronous device, and the steps that it launches.
fn world(blocks: u32, config: EngineConfig) -> (EngineHandle, Driven<StandIn>, Steps) {
    let (kv, steps) = (Kv::new(blocks), Steps::default());
    let launched = steps.clone();
    let before_step = Box::new(move |step: &StepInput| {
        launched.lock().push(step.clone());
        Ok(())
    });
    let hooks = Hooks { before_step: Some(before_step), is_asynchronous: true, ..Hooks::default() };
    let model = StandIn::new(kv, hooks);
    let (engine, driven) = Engine::driven(model, &map(blocks), config, Arc::new(SystemClock)).unwrap();
    (engine, driven, steps)
}

fn run(driven: &mut Driven<StandIn>) {
    while driven.turn() == Turn::Launched {}
}

#[test]
fn the_next_step_is_launched_before_its_tokens_are_known() {
    let (engine, mut driven, steps) = world(12, config());
    let tokens = prompt(1, 13);
    let sequence = submit(&engine, request(&tokens, 8), Run::Full);
    assert_eq!(driven.turn(), Turn::Launched);
    assert_eq!(steps.lock().len(), 2, "both chunks of the prompt");
    run(&mut driven);
    assert_eq!(sequence.end().0, continuation(&tokens, 8));
    let steps = steps.lock();
    // Two chunks, and seven tokens behind the first: no row is computed in vain.
    assert_eq!(steps.len(), 9);
    assert!(steps[2..].iter().all(|step| step.ids == [RowId::LastSampled]));
    let deltas: Vec<_> = steps.iter().map(|step| step.deltas.as_slice()).collect();
    assert!(matches!(deltas[0], [Delta::Join(join)] if join.tokens == tokens), "{deltas:?}");
    let grown = deltas[1..].iter().filter(|deltas| !deltas.is_empty());
    assert!(grown.clone().all(|deltas| matches!(deltas, [Delta::Blocks { keep: 1, .. }])), "{deltas:?}");
    assert_eq!(grown.count(), 1, "one more block");
    assert_eq!(engine.pool().counts().referenced, 0);
}

#[test]
fn blocks_of_an_ended_sequence_stay_until_its_last_row_is_computed() {
    let tokens = prompt(1, 5);
    let answer = continuation(&tokens, 3);
    assert!(!answer[..2].contains(&answer[2]));
    let (engine, mut driven, _) = world(12, EngineConfig { end_tokens: vec![answer[2]], ..config() });
    let sequence = submit(&engine, request(&tokens, 9), Run::Full);
    while sequence.events.try_iter().all(|event| !matches!(event, SequenceEvent::Finished { .. })) {
        assert_eq!(driven.turn(), Turn::Launched);
    }
    assert!(engine.pool().counts().referenced > 0, "a step that was launched ahead still writes there");
    run(&mut driven);
    assert_eq!(engine.pool().counts().referenced, 0);
    assert_eq!(engine.load().generated_tokens, 3, "what the step ahead sampled counts for nothing");
}

/// Blocks that are taken when each of two steps finishes: the one in which a sequence ends, and the one that was launched ahead for it.
fn taken_as_steps_finish() -> Vec<usize> {
    let (pool, seen) = (Arc::<OnceLock<SharedPool>>::default(), Arc::<Mutex<Vec<usize>>>::default());
    let (engine_pool, during) = (pool.clone(), seen.clone());
    let before_finish = Box::new(move || {
        during.lock().extend(engine_pool.get().map(|pool| pool.counts().referenced));
    });
    let hooks = Hooks { before_finish: Some(before_finish), is_asynchronous: true, ..Hooks::default() };
    let model = StandIn::new(Kv::new(12), hooks);
    let (engine, mut driven) = Engine::driven(model, &map(12), config(), Arc::new(SystemClock)).unwrap();
    pool.set(engine.pool()).unwrap();
    let sequence = submit(&engine, request(&prompt(1, 5), 9), Run::Full);
    assert_eq!(driven.turn(), Turn::Launched);
    sequence.control.cancel();
    assert_eq!(driven.turn(), Turn::Launched);
    assert!(matches!(sequence.end().1, Outcome::Finished(FinishReason::Cancelled)));
    assert!(matches!(driven.turn(), Turn::Idle { .. }));
    assert_eq!(engine.pool().counts().referenced, 0);
    std::mem::take(&mut *seen.lock())
}

#[test]
fn blocks_of_an_ended_sequence_are_free_after_the_step_and_not_before() {
    assert_eq!(taken_as_steps_finish(), [1, 1]);
    seed(Some(Defect::EarlyReuse));
    let early = taken_as_steps_finish();
    seed(None);
    assert_eq!(early, [1, 0], "the step ahead would store to a block of whoever has it by then");
}

/// Holds three events until the test takes them.
#[derive(Clone, Default)]
struct Bounded(Arc<Mutex<Vec<SequenceEvent>>>);

impl SequenceSink for Bounded {
    fn has_room(&self, events: usize) -> bool {
        self.0.lock().len() + events <= 3
    }
    fn send(&mut self, event: SequenceEvent) -> bool {
        let mut held = self.0.lock();
        held.push(event);
        assert!(held.len() <= 3, "more events than there was room for: {held:?}");
        true
    }
}

#[test]
fn a_step_ahead_is_launched_where_there_is_room_for_its_token_too() {
    let (engine, mut driven, _) = world(12, config());
    let (tokens, sink) = (prompt(1, 5), Bounded::default());
    let _control = engine.submit(request(&tokens, 2), Run::Full, Box::new(sink.clone())).unwrap();
    let mut output = Vec::new();
    for _ in 0..4 {
        run(&mut driven);
        let events = std::mem::take(&mut *sink.0.lock());
        output.extend(events.into_iter().filter_map(|event| match event {
            SequenceEvent::Token { token, .. } => Some(token),
            _ => None,
        }));
    }
    assert_eq!(output, continuation(&tokens, 2));
}

#[test]
fn a_cancelled_sequence_ends_at_once_and_its_blocks_after_the_steps() {
    let (engine, mut driven, steps) = world(12, config());
    let sequence = submit(&engine, request(&prompt(1, 5), 9), Run::Full);
    assert_eq!(driven.turn(), Turn::Launched);
    assert_eq!(steps.lock().len(), 2);
    sequence.control.cancel();
    assert_eq!(driven.turn(), Turn::Launched);
    assert!(matches!(sequence.end().1, Outcome::Finished(FinishReason::Cancelled)));
    assert!(engine.pool().counts().referenced > 0);
    assert!(matches!(driven.turn(), Turn::Idle { .. }));
    assert_eq!((engine.pool().counts().referenced, steps.lock().len()), (0, 2));
}

#[test]
fn an_earlier_sequence_gets_the_blocks_of_one_that_is_always_ahead() {
    // Three blocks each, of five: the earlier one takes its third from the later one, whose rows are always in a step.
    let (engine, mut driven, _) = world(5, EngineConfig { watermark_blocks: 0, ..config() });
    let prompts = [prompt(1, 14), prompt(2, 24)];
    let sequences = prompts.each_ref().map(|tokens| submit(&engine, request(tokens, 24), Run::Full));
    run(&mut driven);
    for (sequence, tokens) in sequences.iter().zip(&prompts) {
        assert_eq!(sequence.end().0, continuation(tokens, 24));
    }
    assert!(engine.load().preemptions > 0);
    assert_eq!(engine.pool().counts().referenced, 0);
}

/// The first sequence needs its second block in the turn in which the third ends; the second, which is held, has one too.
#[test]
fn no_sequence_is_preempted_for_blocks_that_come_back_with_a_step() {
    let (engine, mut driven, steps) = world(3, EngineConfig { watermark_blocks: 0, ..config() });
    let named = |name: &str, tokens: &[TokenId]| SequenceRequest {
        id: RequestId::try_new(name).unwrap(),
        ..request(tokens, 24)
    };
    let holds = |id: &RequestId, phase| id.as_str() != "held" || phase != SequencePhase::Decode;
    engine.set_gate(Some(Arc::new(holds)));
    let tokens = [prompt(1, 5), prompt(2, 5), prompt(3, 5)];
    let [first, held, last] =
        [("first", 0), ("held", 1), ("last", 2)].map(|(name, i)| submit(&engine, named(name, &tokens[i]), Run::Full));
    let is_at = |step: &StepInput, position| step.segments.iter().any(|rows| rows.position == position);
    while !is_at(steps.lock().last().unwrap_or(&StepInput::default()), BLOCK - 1) {
        assert_eq!(driven.turn(), Turn::Launched);
    }
    last.control.cancel();
    assert_eq!(driven.turn(), Turn::Launched);
    assert!(!is_at(steps.lock().last().unwrap(), BLOCK), "its block is in a step");
    run(&mut driven);
    assert_eq!((first.end().0, engine.load().preemptions), (continuation(&tokens[0], 24), 0));
    engine.set_gate(None);
    run(&mut driven);
    assert_eq!(held.end().0, continuation(&tokens[1], 24));
    assert!(matches!(last.end().1, Outcome::Finished(FinishReason::Cancelled)));
}

#[test]
fn more_sequences_than_slots_take_turns() {
    let (engine, mut driven, steps) = world(12, EngineConfig { running_max: 2, ..config() });
    let prompts = [prompt(1, 9), prompt(2, 9), prompt(3, 9)];
    // The last one comes first, and takes a place when it is there.
    let sequences: Vec<_> = (0..3)
        .map(|index| {
            let request = SequenceRequest { priority: index as i32, ..request(&prompts[index], 12) };
            let sequence = submit(&engine, request, Run::Full);
            (0..2).for_each(|_| assert_eq!(driven.turn(), Turn::Launched));
            sequence
        })
        .collect();
    run(&mut driven);
    for (sequence, tokens) in sequences.iter().zip(&prompts) {
        assert_eq!(sequence.end().0, continuation(tokens, 12));
    }
    let joins = steps.lock().iter().flat_map(|step| &step.deltas).filter(|d| matches!(d, Delta::Join(_))).count();
    assert_eq!(joins, 4, "the first one lost its slot, and came back");
}
