//! A draft model: the same tokens in fewer steps, blocks of its own that come back, and no proposals where they do not pay.

use super::driven::{STEP, World};
use super::*;
use crate::draft_model::{DraftRunner, Task};
use crate::fair::Start;
use crate::scheduler::SequenceKey;
use crate::{DraftModel, Load, SpeculationConfig, StepInput, StepTime, Turn};
use baton_types::defect::{Defect, seed};
use parking_lot::Mutex;
use stand_in::{Next, continuation, mostly_next_token, next_token};

type Steps = Arc<Mutex<Vec<StepInput>>>;

const MS: Duration = Duration::from_millis(1);

/// Draft steps take little of the time of the model's, and rows hardly any.
fn long() -> EngineConfig {
    let speculation = SpeculationConfig {
        step_time: Some(StepTime { first: 8 * MS, row: MS / 100 }),
        draft_step_time: Some(StepTime { first: MS / 2, row: MS / 100 }),
        ..SpeculationConfig::default()
    };
    EngineConfig { model_len_max: 400, chunk_tokens_max: 16, speculation, ..config() }
}

/// Keeps what is launched.
fn recorded(steps: &Steps, hooks: Hooks) -> Hooks {
    let launched = steps.clone();
    let before_step = Box::new(move |step: &StepInput| {
        launched.lock().push(step.clone());
        Ok(())
    });
    Hooks { before_step: Some(before_step), ..hooks }
}

pub(super) fn draft(blocks: u32, hooks: Hooks) -> DraftModel {
    DraftModel::with(StandIn::new(Kv::new(blocks), hooks), &map(blocks), 400)
}

/// An engine with a draft model of `blocks` blocks that says this, and the steps of both.
struct Drafted {
    world: World,
    steps: Steps,
    drafts: Steps,
}

fn drafted(config: EngineConfig, blocks: u32, next: Next, is_asynchronous: bool) -> Drafted {
    let (steps, drafts) = (Steps::default(), Steps::default());
    let draft = draft(blocks, recorded(&drafts, Hooks { next: Some(next), ..Hooks::default() }));
    let hooks = recorded(&steps, Hooks { is_asynchronous, ..Hooks::default() });
    Drafted { world: World::with_draft(60, config, hooks, Some(draft)), steps, drafts }
}

impl Drafted {
    /// Answers prompts at once, checks the tokens and that nothing is held, and returns the load.
    fn answer(&mut self, prompts: &[Vec<TokenId>], max_tokens: u32) -> Load {
        let world = &mut self.world;
        let submitted = |tokens: &Vec<TokenId>| submit(&world.engine, world.request(tokens, max_tokens), Run::Full);
        let sequences: Vec<_> = prompts.iter().map(submitted).collect();
        world.run();
        for (sequence, tokens) in sequences.iter().zip(prompts) {
            assert_eq!(sequence.end().0, continuation(tokens, max_tokens as usize));
        }
        assert_eq!(world.engine.pool().counts().referenced, 0);
        let load = world.engine.load();
        assert_eq!(load.draft_blocks, 0);
        load
    }
}

fn other_token(past: &[TokenId]) -> TokenId {
    (next_token(past) + 1) % VOCAB as TokenId
}

#[test]
fn proposals_save_steps_and_change_no_token() {
    for is_asynchronous in [false, true] {
        let mut all = drafted(long(), 24, next_token, is_asynchronous);
        let load = all.answer(&[prompt(1, 20)], 200);
        assert_eq!(load.draft_accepted_tokens, load.draft_proposed_tokens, "it is the model itself");
        assert!(load.draft_accepted_tokens > 150, "{load:?}");
        assert!(all.steps.lock().len() < 60);

        let mut mostly = drafted(long(), 24, mostly_next_token, is_asynchronous);
        let load = mostly.answer(&[prompt(1, 20)], 200);
        let (proposed, accepted) = (load.draft_proposed_tokens, load.draft_accepted_tokens);
        assert!(accepted > 100 && accepted < proposed, "{accepted} of {proposed}");
        assert_eq!((load.generated_tokens, load.decode_rows), (200, 199), "rejected rows count for nothing");
        let decodes = mostly.steps.lock().len() as u64 - 2;
        assert_eq!(decodes + load.accepted_tokens, 199, "each other token has a step of its own");
    }
}

#[test]
fn one_that_is_wrong_or_slow_ends_by_itself() {
    let answer = |next, first| {
        let mut config = long();
        config.speculation.draft_step_time = Some(StepTime { first, row: MS / 100 });
        drafted(config, 24, next, false).answer(&[prompt(1, 20)], 300)
    };
    let wrong = answer(other_token, 2 * MS);
    assert!((1..25).contains(&wrong.draft_proposed_tokens) && wrong.draft_accepted_tokens == 0, "{wrong:?}");
    let slow = answer(next_token, 8 * MS);
    assert!((1..25).contains(&slow.draft_proposed_tokens), "it is tried and measured: {slow:?}");
}

/// Five proposals behind `tokens`, of which it takes in those that it does not know; returns how many that were.
fn propose(runner: &mut DraftRunner, tokens: &[TokenId]) -> (usize, Vec<TokenId>) {
    let key = SequenceKey::new(0, Start::default(), 0);
    let rows = runner.behind(key, tokens);
    assert!(runner.has_room(key, tokens.len() + 4) && runner.hold(key, tokens, rows, 5));
    let task = Task { key, tokens, rows, drafts: 5, bias: &[], allowed: None };
    (rows, runner.round(&[task], &mut |_, run| run()).unwrap().remove(0))
}

/// Its KV must be that of the tokens, or all that it says is wrong from then on.
#[test]
fn what_was_not_sampled_is_taken_back() {
    let goes_on_right = || {
        let mut runner = draft(24, Hooks::default()).start(VOCAB, 64).unwrap();
        let mut tokens = prompt(1, 20);
        let (rows, proposals) = propose(&mut runner, &tokens);
        assert_eq!((rows, &proposals), (20, &continuation(&tokens, 5)));
        // Two are sampled, then others.
        tokens.extend(&proposals[..2]);
        tokens.extend(prompt(2, 10));
        let (rows, proposals) = propose(&mut runner, &tokens);
        rows == 10 && proposals == continuation(&tokens, 5)
    };
    assert!(goes_on_right());
    seed(Some(Defect::RejectedDraftKept));
    let goes_on_right = goes_on_right();
    seed(None);
    assert!(!goes_on_right);
}

#[test]
fn a_model_of_other_tokens_is_refused() {
    let error = draft(24, Hooks::default()).start(VOCAB + 1, 64).err().unwrap().to_string();
    assert!(error.contains("997") && error.contains("998"), "{error}");
}

#[test]
fn a_long_prompt_is_taken_in_by_chunks_between_steps() {
    let mut drafted = drafted(long(), 24, next_token, false);
    let load = drafted.answer(&[prompt(1, 150)], 100);
    assert!(load.draft_accepted_tokens > 60, "{load:?}");
    let (steps, drafts) = (drafted.steps.lock(), drafted.drafts.lock());
    let rows: Vec<_> = drafts.iter().map(|step| step.ids.len()).collect();
    assert_eq!(rows[..9], [16; 9], "nine chunks of 150 tokens");
    assert!(rows.iter().all(|rows| *rows <= 16));
    // One step of the model for each of them: nobody waits for more than a chunk.
    let alone = steps.iter().skip(10).take_while(|step| step.ids.len() == 1).count();
    assert!((9..12).contains(&alone), "{alone} steps without proposals");
}

#[test]
fn sequences_without_room_have_no_proposals_of_it() {
    // One sequence of 220 tokens needs 14 blocks.
    let prompts: Vec<_> = (1..3).map(|seed| prompt(seed, 20)).collect();
    for blocks in [1, 14, 20] {
        let mut drafted = drafted(long(), blocks, next_token, false);
        let load = drafted.answer(&prompts, 200);
        assert_eq!(load.draft_accepted_tokens > 0, blocks > 1, "{load:?}");
    }
    let roomy = drafted(long(), 60, next_token, false).answer(&prompts, 200);
    assert!(roomy.draft_accepted_tokens > 250, "{roomy:?}");
    // Its context is shorter than the model's.
    let short = DraftModel::with(StandIn::new(Kv::new(24), Hooks::default()), &map(24), 100);
    let mut world = World::with_draft(60, long(), Hooks::default(), Some(short));
    let sequence = submit(&world.engine, world.request(&prompts[0], 200), Run::Full);
    world.run();
    assert_eq!(sequence.end().0, continuation(&prompts[0], 200));
    let accepted = world.engine.load().draft_accepted_tokens;
    assert!((50..80).contains(&accepted), "{accepted}");
}

#[test]
fn a_cancelled_sequence_leaves_none_of_its_blocks() {
    let Drafted { mut world, .. } = drafted(long(), 24, next_token, false);
    let sequence = submit(&world.engine, world.request(&prompt(1, 20), 300), Run::Full);
    while world.engine.load().draft_accepted_tokens < 30 {
        assert_eq!(world.driven.turn(), Turn::Launched);
        world.clock.pass(STEP);
    }
    assert!(world.engine.load().draft_blocks >= 3);
    sequence.control.cancel();
    world.run();
    assert!(matches!(sequence.end().1, Outcome::Finished(FinishReason::Cancelled)));
    assert_eq!((world.engine.pool().counts().referenced, world.engine.load().draft_blocks), (0, 0));
}

#[test]
fn a_preempted_sequence_gives_its_blocks_back() {
    let draft = draft(40, Hooks::default());
    let config = EngineConfig { watermark_blocks: 0, ..long() };
    let mut world = World::with_draft(16, config, Hooks::default(), Some(draft));
    let prompts = [prompt(1, 20), prompt(2, 30)];
    let sequences = prompts.each_ref().map(|tokens| submit(&world.engine, world.request(tokens, 150), Run::Full));
    let mut waited = 0;
    loop {
        let turn = world.driven.turn();
        let load = world.engine.load();
        if load.preemptions > 0 && load.waiting == 1 {
            waited += 1;
            // What the other one has: its tokens, and proposals.
            assert!(load.draft_blocks <= (load.running_tokens + 8).div_ceil(BLOCK) + 1, "{load:?}");
        }
        if turn != Turn::Launched {
            break;
        }
        world.clock.pass(STEP);
    }
    for (sequence, tokens) in sequences.iter().zip(&prompts) {
        assert_eq!(sequence.end().0, continuation(tokens, 150));
    }
    assert!(waited > 0 && world.engine.load().draft_accepted_tokens > 100);
    assert_eq!(world.engine.load().draft_blocks, 0);
}

#[test]
fn one_that_fails_ends_no_sequence() {
    // It fails amid its work, or has no token for a row.
    let mut steps = 0;
    let fails = move |_: &StepInput| {
        steps += 1;
        let failed = || baton_kernels::device::DeviceError::Failed("out of order".into()).into();
        if steps == 20 { Err(failed()) } else { Ok(()) }
    };
    let prompt = prompt(1, 20);
    let poison = continuation(&prompt, 60)[59];
    let broken = [
        Hooks { before_step: Some(Box::new(fails)), ..Hooks::default() },
        Hooks { poison: Some(poison), ..Hooks::default() },
    ];
    for hooks in broken {
        let mut world = World::with_draft(60, long(), Hooks::default(), Some(draft(24, hooks)));
        let sequence = submit(&world.engine, world.request(&prompt, 200), Run::Full);
        world.run();
        assert_eq!(sequence.end().0, continuation(&prompt, 200));
        let load = world.engine.load();
        assert!((10..100).contains(&load.draft_accepted_tokens), "{load:?}");
        assert_eq!((world.engine.pool().counts().referenced, load.draft_blocks), (0, 0));
    }
}

#[test]
fn both_kinds_are_in_one_batch() {
    // The model repeats itself after one prompt, and is known to its draft model after the other.
    fn model(past: &[TokenId]) -> TokenId {
        if past[0] == 1 { past[past.len() - 6] } else { next_token(past) }
    }
    fn draft_model(past: &[TokenId]) -> TokenId {
        if past[0] == 1 { other_token(past) } else { next_token(past) }
    }
    let steps = Steps::default();
    let hooks = recorded(&steps, Hooks { next: Some(model), ..Hooks::default() });
    let draft = draft(40, Hooks { next: Some(draft_model), ..Hooks::default() });
    let mut world = World::with_draft(60, long(), hooks, Some(draft));
    let prompts = [1, 2].map(|first| {
        let mut tokens = prompt(first, 20);
        tokens[0] = first;
        tokens
    });
    let sequences = prompts.each_ref().map(|tokens| submit(&world.engine, world.request(tokens, 200), Run::Full));
    world.run();
    assert_eq!(sequences[1].end().0, continuation(&prompts[1], 200));
    assert_eq!(sequences[0].end().0.len(), 200);
    let load = world.engine.load();
    assert!(load.draft_accepted_tokens > 80, "{load:?}");
    assert!(load.accepted_tokens - load.draft_accepted_tokens > 80, "{load:?}");
    let both =
        steps.lock().iter().filter(|step| step.segments.iter().filter(|rows| rows.samples > 1).count() == 2).count();
    assert!(both > 10, "{both} steps with proposals for both");
}
