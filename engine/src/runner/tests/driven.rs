//! The engine without its thread: the test calls the turns and sets the time.

use super::*;
use crate::{DraftModel, Driven, SequencePhase, StepGaps, Turn};
use baton_types::{Clock, TenantLabel};
use parking_lot::Mutex;
use stand_in::continuation;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// A clock that the test advances.
#[derive(Debug)]
pub(super) struct FakeClock(Mutex<Instant>);

impl FakeClock {
    pub(super) fn pass(&self, time: Duration) {
        *self.0.lock() += time;
    }
}

impl Clock for FakeClock {
    fn now(&self) -> Instant {
        *self.0.lock()
    }
}

pub(super) const STEP: Duration = Duration::from_millis(10);

pub(super) struct World {
    pub(super) engine: EngineHandle,
    pub(super) driven: Driven<StandIn>,
    pub(super) kv: Kv,
    pub(super) clock: Arc<FakeClock>,
}

impl World {
    fn new(blocks: u32, config: EngineConfig) -> Self {
        Self::with(blocks, config, Hooks::default())
    }

    pub(super) fn with(blocks: u32, config: EngineConfig, hooks: Hooks) -> Self {
        Self::with_draft(blocks, config, hooks, None)
    }

    pub(super) fn with_draft(blocks: u32, config: EngineConfig, hooks: Hooks, draft: Option<DraftModel>) -> Self {
        let (kv, clock) = (Kv::new(blocks), Arc::new(FakeClock(Mutex::new(Instant::now()))));
        let model = StandIn::new(kv.clone(), hooks);
        let (engine, driven) = Engine::driven_with_draft(model, &map(blocks), config, draft, clock.clone()).unwrap();
        Self { engine, driven, kv, clock }
    }

    pub(super) fn request(&self, tokens: &[TokenId], max_tokens: u32) -> SequenceRequest {
        SequenceRequest { deadline: self.engine.now() + FOREVER, ..request(tokens, max_tokens) }
    }

    /// Whether there is input that an idle engine would have to process.
    fn has_work(&self) -> bool {
        pin!(self.driven.work()).poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    /// Runs turns until nothing can run; each step takes [`STEP`].
    pub(super) fn run(&mut self) -> Option<Instant> {
        loop {
            match self.driven.turn() {
                Turn::Launched => self.clock.pass(STEP),
                Turn::Idle { until } => return until,
                Turn::Ended => panic!("nobody stopped it"),
            }
        }
    }
}

#[test]
fn a_step_ahead_takes_the_time_from_the_end_of_the_one_before() {
    for is_asynchronous in [false, true] {
        let mut world = World::with(12, config(), Hooks { is_asynchronous, ..Hooks::default() });
        let sequence = submit(&world.engine, world.request(&prompt(1, 5), 30), Run::Full);
        world.run();
        assert_eq!(sequence.end().0.len(), 30);
        let (measured, right) = (world.engine.load().decode_steps_per_s, 1.0 / STEP.as_secs_f32());
        assert!((measured - right).abs() < 0.01 * right, "ahead {is_asynchronous}: {measured}");
    }
}

/// Two sequences, one after the other, of an engine that takes time to plan: gaps, steps, and the time that plans of decode rows took.
fn gaps_of(is_asynchronous: bool) -> (StepGaps, u64, Duration) {
    const PLAN: Duration = Duration::from_micros(200);
    let mut world = World::with(12, config(), Hooks { is_asynchronous, ..Hooks::default() });
    let planned = Arc::new(Mutex::new(Duration::ZERO));
    let (clock, spent) = (world.clock.clone(), planned.clone());
    world.engine.set_gate(Some(Arc::new(move |_: &RequestId, phase: SequencePhase| {
        if phase == SequencePhase::Decode {
            clock.pass(PLAN);
            *spent.lock() += PLAN;
        }
        true
    })));
    for _ in 0..2 {
        let sequence = submit(&world.engine, world.request(&prompt(1, 5), 9), Run::Full);
        world.run();
        assert_eq!(sequence.end().0.len(), 9);
        // Time without work.
        world.clock.pass(Duration::from_secs(5));
    }
    let load = world.engine.load();
    let planned = *planned.lock();
    (load.gaps, load.steps, planned)
}

#[test]
fn a_gap_is_the_time_without_a_step_while_there_is_work() {
    let (gaps, steps, planned) = gaps_of(false);
    // One before each step but the first of a sequence.
    assert_eq!((gaps.count(), steps), (16, 18));
    assert_eq!(gaps.total, planned);
    assert!(planned >= 16 * Duration::from_micros(200));
    let (gaps, steps, _) = gaps_of(true);
    assert_eq!((gaps.count(), steps), (0, 18), "a device that always has a step ahead waits for nobody: {gaps:?}");
}

#[test]
fn turns_run_sequences_to_their_end_whatever_happens_while_a_step_runs() {
    let mut world = World::new(12, EngineConfig { chunk_tokens_max: 64, ..config() });
    let begin = world.engine.now();
    assert_eq!(world.run(), None);
    assert!(!world.has_work());
    let prompts = [prompt(1, 20), prompt(2, 9), prompt(3, 5)];
    let sequences = prompts.each_ref().map(|tokens| submit(&world.engine, world.request(tokens, 12), Run::Full));
    assert!(world.has_work());

    // While the first step runs, a peer reserves blocks and fills them, and a sequence is cancelled.
    assert_eq!(world.driven.turn(), Turn::Launched);
    let running: Vec<_> = world.driven.leases().map(|lease| lease.blocks().0[0].clone()).collect();
    let adopted = prompt(4, 18);
    let lease = world.engine.reserve(adopted.len(), &[]).expect("there is room beside what runs");
    assert!(!running.concat().iter().any(|block| lease.blocks().0[0].contains(block)), "those are in a step");
    world.kv.receive(&lease.blocks().0[0], &adopted);
    sequences[1].control.cancel();
    assert!(sequences.iter().all(|s| s.events.try_iter().all(|e| matches!(e, SequenceEvent::Started { .. }))));
    world.clock.pass(STEP);

    // The cancelled one keeps its blocks to the end of the step, and no longer.
    let free = world.engine.pool().counts().free;
    assert_eq!(world.driven.turn(), Turn::Launched);
    assert!(world.engine.pool().counts().free > free);
    assert!(matches!(sequences[1].end().1, Outcome::Finished(FinishReason::Cancelled)));

    // The adopted sequence joins during another step.
    let mut request = world.request(&[&adopted[..], &continuation(&adopted, 1)].concat(), 6);
    request.prompt_len = adopted.len();
    let joined = submit(&world.engine, request, Run::Adopted { lease, turn: None });
    world.clock.pass(STEP);
    assert_eq!(world.run(), None);
    assert_eq!(joined.end().0, continuation(&adopted, 6)[1..]);
    for index in [0, 2] {
        assert_eq!(sequences[index].end().0, continuation(&prompts[index], 12));
    }
    assert_eq!(world.engine.pool().counts().referenced, 0);
    let steps = world.engine.load().steps as u32;
    assert_eq!(world.engine.now() - begin, steps * STEP, "time passes in steps alone");
}

/// The tenant with this number.
fn tenant(number: u64) -> Share {
    Share { tenant: TenantLabel(number), ..Share::default() }
}

#[test]
fn an_adopted_sequence_takes_no_second_turn() {
    for keeps_turn in [true, false] {
        let mut world = World::new(12, config());
        let (floods, other) = (tenant(1), tenant(2));
        let offers: Vec<_> = (0..4).map(|_| world.engine.take_turn(0, floods, 18)).collect();
        let tokens = prompt(4, 18);
        let lease = world.engine.reserve(tokens.len(), &[]).expect("the pool is empty");
        world.engine.turn_came(offers[0]);
        world.kv.receive(&lease.blocks().0[0], &tokens);
        let mut request = world.request(&[&tokens[..], &continuation(&tokens, 1)].concat(), 6);
        (request.prompt_len, request.share) = (tokens.len(), floods);
        let turn = keeps_turn.then_some(offers[0]);
        let adopted = submit(&world.engine, request, Run::Adopted { lease, turn });
        world.run();
        assert_eq!(adopted.end().0, continuation(&tokens, 6)[1..]);
        let new = world.engine.take_turn(0, other, 18);
        assert!(new < offers[1], "with its turn {keeps_turn}: a newcomer is behind nothing that still waits");
    }
}

#[test]
fn the_charge_of_a_cancelled_sequence_goes_to_its_sibling() {
    let mut world = World::new(12, config());
    world.engine.set_gate(Some(Arc::new(|_: &RequestId, _: SequencePhase| false)));
    let (a, b) = (tenant(1), tenant(2));
    let request = SequenceRequest { share: a, ..shared_request(&prompt(1, 20), 4, "a") };
    let siblings = [(); 2].map(|()| submit(&world.engine, request.clone(), Run::Full));
    world.run();
    siblings[0].control.cancel();
    world.run();
    world.engine.take_turn(0, b, 20);
    let (of_a, of_b) = (world.engine.take_turn(0, a, 1), world.engine.take_turn(0, b, 1));
    assert!(of_a.start() > of_b.start(), "20 tokens and one of its sibling are charged");
    siblings[1].control.cancel();
    world.run();
    let next = world.engine.take_turn(0, a, 1).start();
    assert_eq!(next, of_a.start(), "nobody computes the prompt: it is given back");
}

#[test]
fn time_is_the_clocks() {
    let mut world = World::new(8, EngineConfig { step_max: Duration::from_secs(10), ..config() });
    world.engine.set_gate(Some(Arc::new(|_: &RequestId, stage: SequencePhase| stage != SequencePhase::Decode)));
    let held = submit(&world.engine, world.request(&prompt(1, 5), 4), Run::Full);
    assert_eq!(world.driven.turn(), Turn::Launched);
    world.clock.pass(Duration::from_secs(9));
    assert!(world.engine.healthy());
    assert_eq!(world.engine.still(), Duration::from_secs(9));
    world.clock.pass(Duration::from_secs(1));
    assert!(!world.engine.healthy());
    assert!(world.run().is_some_and(|until| until > world.engine.now()), "it looks again at what a gate holds");
    assert!(world.engine.healthy());
    world.clock.pass(FOREVER);
    world.run();
    assert!(matches!(held.end().1, Outcome::Failed(ErrorKind::DeadlineExceeded, _)));
}

#[test]
fn who_waits_for_work_hears_of_it_and_of_the_end() {
    let mut world = World::new(8, config());
    let sequence = submit(&world.engine, world.request(&prompt(1, 5), 4), Run::Full);
    assert_eq!(world.driven.turn(), Turn::Launched);
    assert!(!world.has_work(), "the turn took it");
    sequence.control.cancel();
    assert!(world.has_work());
    let World { engine, mut driven, .. } = world;
    drop(engine);
    assert_eq!(driven.turn(), Turn::Ended, "a control holds no engine");
    assert!(matches!(sequence.end().1, Outcome::Failed(ErrorKind::Unavailable, _)));
    assert_eq!(driven.turn(), Turn::Ended);
}
