//! Slots: steps launched ahead, drafts, masks, and what a device refuses. Every device samples what the reference samples step by step.

mod common;

use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::{Device, DeviceError};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::sampling::{SampleError, Sampled, TokenSet};
use baton_kernels::step::{AdapterSlot, Delta, Join, LateMask, RowId, SlotOutput, SlotRows, StepInput};
use baton_types::defect::{Defect, seed};
use baton_types::{BlockId, BlockTables, FenceStatus, GroupBlocks, SamplingParams, TokenId};
use common::tiny::{LAYERS, Tiny, soon};
use common::{recorded, reference_of};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PROMPT: [TokenId; 5] = [3, 7, 1, 10, 4];

fn reference() -> Arc<dyn Device> {
    ReferenceDevice::new(Numerics::default())
}

fn lagging() -> Arc<Lagging> {
    Lagging::new(reference(), LagConfig::default())
}

fn devices() -> Vec<Arc<dyn Device>> {
    let cpu = CpuDevice::new(CpuConfig { threads: 2, ..CpuConfig::default() }).unwrap();
    let mut devices: Vec<Arc<dyn Device>> = vec![reference(), cpu, lagging()];
    devices.extend(recorded());
    devices
}

fn warm(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 1.5,
        top_p: 0.95,
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        logprobs: Some(2),
        seed,
        ..SamplingParams::default()
    }
}

/// The table of the only group.
fn tables(blocks: &[u32]) -> BlockTables {
    BlockTables::from_start(GroupBlocks(vec![blocks.iter().copied().map(BlockId).collect()]))
}

fn grow(slot: usize, keep: usize, blocks: &[u32]) -> Delta {
    let blocks = blocks.iter().copied().map(BlockId).collect();
    Delta::Blocks { slot, group: 0, first: 0, keep, blocks }
}

fn join(slot: usize, blocks: &[u32]) -> Join {
    Join {
        slot,
        tables: tables(blocks),
        tokens: PROMPT.to_vec(),
        prompt_len: PROMPT.len(),
        sampling: warm(9),
        ..Join::default()
    }
}

fn step(deltas: Vec<Delta>, slot: usize, position: usize, ids: Vec<RowId>, samples: usize) -> StepInput {
    let segments = vec![SlotRows { slot, position, rows: ids.len(), samples, masks: Vec::new() }];
    StepInput { deltas, ids, segments, ..StepInput::default() }
}

/// Joins and computes the prompt.
fn prefill(join: Join) -> StepInput {
    let (slot, ids) = (join.slot, join.tokens.iter().map(|token| RowId::Token(*token)).collect());
    step(vec![Delta::Join(Box::new(join))], slot, 0, ids, 1)
}

fn decode(slot: usize, position: usize, id: RowId) -> StepInput {
    step(Vec::new(), slot, position, vec![id], 1)
}

fn run(tiny: &mut Tiny, step: &StepInput) -> SlotOutput {
    tiny.executable.launch(step, &mut |_, _| ()).unwrap();
    finish(tiny)
}

fn finish(tiny: &mut Tiny) -> SlotOutput {
    tiny.executable.finish().unwrap().sampled.remove(0)
}

fn only(output: SlotOutput) -> Sampled {
    let [row] = <[_; 1]>::try_from(output.rows).unwrap();
    row.unwrap()
}

/// The first `n` tokens after the prompt, one step at a time, with every token known.
fn continuation(tiny: &mut Tiny, join: Join, n: usize) -> Vec<Sampled> {
    let slot = join.slot;
    let mut sampled = vec![only(run(tiny, &prefill(join)))];
    while sampled.len() < n {
        let id = RowId::Token(sampled[sampled.len() - 1].token);
        sampled.push(only(run(tiny, &decode(slot, PROMPT.len() + sampled.len() - 1, id))));
    }
    sampled
}

#[test]
fn steps_ahead_sample_what_steps_in_turn_sample() {
    const N: usize = 20;
    for device in devices() {
        let mut calm = Tiny::new(&*reference_of(&*device), true);
        let want = continuation(&mut calm, join(0, &[5, 2]), N);
        assert!(want.iter().any(|sampled| sampled.token != want[0].token), "the draws differ");
        let mut tiny = Tiny::new(&*device, true);
        tiny.executable.launch(&prefill(join(2, &[5])), &mut |_, _| ()).unwrap();
        let mut got = Vec::new();
        for position in PROMPT.len()..PROMPT.len() + N - 1 {
            let mut ahead = decode(2, position, RowId::LastSampled);
            if position == 16 {
                ahead.deltas.push(grow(2, 1, &[2]));
            }
            tiny.executable.launch(&ahead, &mut |_, _| ()).unwrap();
            got.push(only(finish(&mut tiny)));
        }
        got.push(only(finish(&mut tiny)));
        assert_eq!(got, want, "{}", device.info().name);
        assert!(tiny.kv(5, 16) == calm.kv(5, 16) && tiny.kv(2, 8) == calm.kv(2, 8), "{}", device.info().name);
    }
}

#[test]
fn drafts_are_accepted_as_far_as_they_were_sampled() {
    for device in devices() {
        let want = continuation(&mut Tiny::new(&*reference_of(&*device), true), join(0, &[5]), 8);
        let token = |at: usize| RowId::Token(want[at].token);
        for right in 0..4 {
            let mut tiny = Tiny::new(&*device, true);
            run(&mut tiny, &prefill(join(0, &[5])));
            // The last token, then three drafts, of which the first `right` are what will be sampled.
            let mut ids: Vec<RowId> = (0..4).map(token).collect();
            if let Some(wrong) = ids.get_mut(right + 1) {
                *wrong = RowId::Token((want[right + 1].token + 1) % 11);
            }
            let drafted = step(Vec::new(), 0, PROMPT.len(), ids, 4);
            tiny.executable.launch(&drafted, &mut |_, _| ()).unwrap();
            let early = tiny.executable.launch(&decode(0, 7, RowId::LastSampled), &mut |_, _| ());
            let early = early.unwrap_err().to_string();
            assert!(early.contains("its length is not known"), "{early}");
            let SlotOutput { rows, accepted, .. } = finish(&mut tiny);
            let got: Vec<Sampled> = rows.into_iter().map(Result::unwrap).collect();
            assert_eq!((got.as_slice(), accepted), (&want[1..right + 2], right), "{}", device.info().name);
            // The next step stores the KV of rejected drafts again.
            let next = decode(0, PROMPT.len() + accepted + 1, RowId::LastSampled);
            assert_eq!(only(run(&mut tiny, &next)), want[right + 2], "{}", device.info().name);
        }
    }
}

#[test]
fn each_row_that_samples_has_a_mask_of_its_own() {
    for device in devices() {
        let mut tiny = Tiny::new(&*device, true);
        let first = only(run(&mut tiny, &prefill(join(0, &[5]))));
        let ids = [first.token, 6, 2].map(RowId::Token).to_vec();
        let mut drafted = step(Vec::new(), 0, PROMPT.len(), ids, 3);
        let masks = [6, 2, 9].map(|token| (LateMask::due(Instant::now() + Duration::from_secs(60)), token));
        masks.iter().for_each(|(mask, token)| mask.fill(Arc::new(TokenSet::from_iter([*token]))));
        drafted.segments[0].masks = masks.map(|(mask, _)| mask).to_vec();
        let SlotOutput { rows, accepted, .. } = run(&mut tiny, &drafted);
        let tokens: Vec<TokenId> = rows.into_iter().map(|row| row.unwrap().token).collect();
        assert_eq!((tokens.as_slice(), accepted), (&[6, 2, 9][..], 2), "{}", device.info().name);
    }
}

/// A mask is of one step: later ones of its slot, and of those that come after it, sample without.
#[test]
fn a_mask_says_nothing_of_later_steps() {
    for device in devices() {
        let want = continuation(&mut Tiny::new(&*reference_of(&*device), true), join(0, &[5]), 8);
        assert!(want.iter().any(|sampled| sampled.token != want[0].token), "the draws differ");
        let mut tiny = Tiny::new(&*device, true);
        let mask = LateMask::due(Instant::now() + Duration::from_secs(60));
        mask.fill(Arc::new(TokenSet::from_iter([want[0].token])));
        let mut masked = prefill(join(0, &[5]));
        masked.segments[0].masks = vec![mask];
        let mut got = vec![only(run(&mut tiny, &masked))];
        while got.len() < want.len() {
            let id = RowId::Token(got[got.len() - 1].token);
            got.push(only(run(&mut tiny, &decode(0, PROMPT.len() + got.len() - 1, id))));
        }
        assert_eq!(got, want, "{}", device.info().name);
    }
}

/// Another sequence takes the slot while the step with the drafts runs.
#[test]
fn drafts_of_one_that_left_say_nothing_of_the_next_in_its_slot() {
    for device in devices() {
        let want = continuation(&mut Tiny::new(&*reference_of(&*device), true), join(0, &[5]), 2);
        let mut tiny = Tiny::new(&*device, true);
        run(&mut tiny, &prefill(join(0, &[5])));
        let ids = [want[0].token, 1, 2].map(RowId::Token).to_vec();
        let drafted = step(Vec::new(), 0, PROMPT.len(), ids, 3);
        let mut next = prefill(join(0, &[6]));
        next.deltas.insert(0, Delta::Leave { slot: 0 });
        for step in [&drafted, &next] {
            tiny.executable.launch(step, &mut |_, _| ()).unwrap();
        }
        finish(&mut tiny);
        let first = only(finish(&mut tiny));
        let second = only(run(&mut tiny, &decode(0, PROMPT.len(), RowId::LastSampled)));
        assert_eq!([first, second].as_slice(), want, "{}", device.info().name);
    }
}

#[test]
fn sampling_alone_waits_for_a_mask() {
    let lagging = lagging();
    let mut tiny = Tiny::new(&*lagging, true);
    let mask = LateMask::due(Instant::now() + Duration::from_secs(60));
    let mut masked = prefill(join(0, &[5]));
    masked.segments[0].masks = vec![mask.clone()];
    masked.observed = 0..LAYERS;
    let mut fences = Vec::new();
    tiny.executable.launch(&masked, &mut |_, fence| fences.push(fence.clone())).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while fences.iter().any(|fence| fence.poll() != FenceStatus::Done) {
        assert!(Instant::now() < until, "the forward pass waits for the mask");
        std::thread::yield_now();
    }
    mask.fill(Arc::new(TokenSet::from_iter([6])));
    assert_eq!(only(finish(&mut tiny)).token, 6);

    for device in devices() {
        let mut tiny = Tiny::new(&*device, true);
        let mut masked = prefill(join(0, &[5]));
        masked.segments[0].masks = vec![LateMask::due(Instant::now() + Duration::from_millis(5))];
        assert_eq!(run(&mut tiny, &masked).rows, [Err(SampleError::MaskLate)]);
    }
}

#[test]
fn behind_a_row_that_failed_none_of_its_sequence_is_sampled() {
    for device in devices() {
        let want = continuation(&mut Tiny::new(&*reference_of(&*device), true), join(0, &[5]), 2);
        let mut tiny = Tiny::new(&*device, true);
        let first = only(run(&mut tiny, &prefill(join(0, &[5]))));
        let mut late = decode(0, PROMPT.len(), RowId::LastSampled);
        late.segments[0].masks = vec![LateMask::due(Instant::now())];
        let ahead = decode(0, PROMPT.len() + 1, RowId::LastSampled);
        [&late, &ahead].into_iter().for_each(|step| tiny.executable.launch(step, &mut |_, _| ()).unwrap());
        for _ in 0..2 {
            assert_eq!(finish(&mut tiny).rows, [Err(SampleError::MaskLate)], "{}", device.info().name);
        }
        let mut again = Join { tokens: [&PROMPT[..], &[first.token]].concat(), ..join(0, &[5]) };
        again.prompt_len = PROMPT.len();
        let mut again = prefill(again);
        again.deltas.insert(0, Delta::Leave { slot: 0 });
        assert_eq!(only(run(&mut tiny, &again)), want[1], "{}", device.info().name);
    }
}

#[test]
fn a_join_says_what_may_be_sampled() {
    for (device, slot) in devices().into_iter().flat_map(|device| [0, 2].map(|slot| (device.clone(), slot))) {
        let token = |change: &dyn Fn(&mut Join)| {
            let mut join = join(slot, &[5]);
            change(&mut join);
            only(run(&mut Tiny::new(&*device, true), &prefill(join)))
        };
        let free = token(&|_| ());
        let other = (free.token + 1) % 11;
        assert_eq!(token(&|join| join.allowed = Some(Arc::new([other].into_iter().collect()))).token, other);
        assert_eq!(token(&|join| join.bias = vec![(other, 1e6)]).token, other);
        let biased = token(&|join| join.bias = vec![(free.token, 1e6)]);
        assert_eq!(biased, free, "log-probabilities are the model's");
    }
}

#[test]
fn a_row_without_numbers_fails_alone() {
    for device in devices() {
        let mut tiny = Tiny::new(&*device, true);
        run(&mut tiny, &prefill(join(0, &[5])));
        let good = run(&mut tiny, &prefill(join(1, &[6])));
        let place = tiny.map.token_range(0, 0, BlockId(5), 1, 2..3);
        tiny.pool.write_by(soon(), place.start, &vec![0xff; place.len()]).unwrap();
        let mut both = decode(0, PROMPT.len(), RowId::LastSampled);
        both.ids.push(RowId::LastSampled);
        both.segments.push(SlotRows { slot: 1, ..both.segments[0].clone() });
        tiny.executable.launch(&both, &mut |_, _| ()).unwrap();
        let [broken, other] = <[_; 2]>::try_from(tiny.executable.finish().unwrap().sampled).unwrap();
        assert!(matches!(broken.rows[..], [Err(SampleError::NotFinite { .. })]), "{broken:?}");
        assert!(only(good).token < 11 && other.rows[0].is_ok());
    }
}

#[test]
fn only_observed_layers_get_fences() {
    for device in devices() {
        let mut tiny = Tiny::new(&*device, true);
        for (observed, want) in [(0..0, vec![]), (1..2, vec![1]), (0..2, vec![0, 1])] {
            let mut layers = Vec::new();
            let mut step = prefill(join(0, &[5]));
            step.observed = observed;
            if !want.is_empty() {
                step.deltas.insert(0, Delta::Leave { slot: 0 });
            }
            tiny.executable.launch(&step, &mut |layer, _| layers.push(layer)).unwrap();
            finish(&mut tiny);
            assert_eq!(layers, want, "{}", device.info().name);
        }
    }
}

#[test]
fn what_does_not_fit_the_slots_is_refused_and_changes_nothing() {
    for device in devices() {
        let mut tiny = Tiny::new(&*device, true);
        let first = only(run(&mut tiny, &prefill(join(0, &[5]))));
        let good = decode(0, PROMPT.len(), RowId::Token(first.token));
        let mut check = |expected: &str, change: &dyn Fn(&mut StepInput)| {
            let mut step = good.clone();
            change(&mut step);
            let refused = tiny.executable.launch(&step, &mut |_, _| panic!("refused steps launch nothing"));
            let refused = refused.expect_err(expected).to_string();
            assert!(refused.contains(expected), "{refused}");
        };
        let joins = |change: fn(&mut Join)| {
            move |step: &mut StepInput| {
                let mut join = join(1, &[6]);
                change(&mut join);
                // A change before the one that is refused.
                step.deltas = vec![Delta::Leave { slot: 0 }, Delta::Join(Box::new(join))];
            }
        };
        check("AdapterSlot(0) is not loaded", &joins(|join| join.adapter = Some(AdapterSlot(0))));
        check("slot 3 of 3", &joins(|join| join.slot = 3));
        check("block 8 of a pool of 8", &joins(|join| join.tables = tables(&[8])));
        check("2 tables for 1 groups", &joins(|join| join.tables.0.push(join.tables.0[0].clone())));
        check("token 11 of a vocabulary of 11", &joins(|join| join.tokens[2] = 11));
        check("6 of them prompt", &joins(|join| join.prompt_len = 6));
        check("an empty set of allowed tokens", &joins(|join| join.allowed = Some(Arc::default())));
        check("is allowed", &joins(|join| join.allowed = Some(Arc::new([4, 11].into_iter().collect()))));
        check("a bias of NaN for token 1", &joins(|join| join.bias = vec![(1, f32::NAN)]));
        check("slot 0 is free", &joins(|_| ()));
        check("slot 0 is taken", &|step| step.deltas = vec![Delta::Join(Box::new(join(0, &[6])))]);
        check("slot 1 is free", &|step| step.deltas = vec![Delta::Leave { slot: 1 }]);
        check("blocks 0..2 kept of 0..1", &|step| step.deltas = vec![grow(0, 2, &[])]);
        check("0 blocks for 6 positions", &|step| step.deltas = vec![grow(0, 0, &[])]);
        let left = Delta::Blocks { slot: 0, group: 0, first: 1, keep: 1, blocks: vec![BlockId(3)] };
        check("blocks from 1 on, position 5 attends to 0", &|step| step.deltas = vec![left.clone()]);
        check("blocks 0..1 kept of 1..2", &|step| step.deltas = vec![left.clone(), grow(0, 1, &[])]);
        check("group 1 of 1", &|step| {
            step.deltas = vec![Delta::Blocks { slot: 0, group: 1, first: 0, keep: 0, blocks: Vec::new() }];
        });
        check("two segments of slot 0", &|step| {
            step.ids.push(RowId::Token(1));
            step.segments.push(step.segments[0].clone());
        });
        check("2 of 1 rows sample", &|step| step.segments[0].samples = 2);
        check("samples after 5 tokens and has 6", &|step| step.segments[0].position = 4);
        check("not at the token that it sampled last", &|step| {
            (step.segments[0].position, step.segments[0].samples) = (4, 0);
            step.ids[0] = RowId::LastSampled;
        });
        check("0..3 of 2 are observed", &|step| step.observed = 0..3);
        check("2 masks for 1 rows", &|step| {
            step.segments[0].masks = vec![LateMask::due(Instant::now()), LateMask::due(Instant::now())];
        });
        let mut fresh = Tiny::new(&*device, true);
        let want = continuation(&mut fresh, join(0, &[5]), 2);
        assert_eq!(only(run(&mut tiny, &good)), want[1], "{}", device.info().name);
    }
}

/// A device that computes with the block tables of the step before is found: a sequence that takes over a slot reads another's KV.
#[test]
fn a_stale_table_is_found() {
    let want = continuation(&mut Tiny::new(&*reference(), true), join(0, &[5]), 6);
    for defect in [None, Some(Defect::StaleTable)] {
        let mut tiny = Tiny::new(&*lagging(), true);
        seed(defect);
        let first = Join { tokens: vec![9, 9, 2, 8, 6], ..join(0, &[3]) };
        run(&mut tiny, &prefill(first));
        let mut second = prefill(join(0, &[5]));
        second.deltas.insert(0, Delta::Leave { slot: 0 });
        tiny.executable.launch(&second, &mut |_, _| ()).unwrap();
        let mut got = vec![finish(&mut tiny).rows.remove(0)];
        for position in PROMPT.len()..PROMPT.len() + want.len() - 1 {
            got.push(run(&mut tiny, &decode(0, position, RowId::LastSampled)).rows.remove(0));
        }
        seed(None);
        let is_right = got.iter().zip(&want).all(|(got, want)| got.as_ref() == Ok(want));
        assert_eq!(is_right, defect.is_none(), "{defect:?}: {got:?}");
    }
}

#[test]
fn a_finish_without_a_step_is_an_error() {
    let mut tiny = Tiny::new(&*reference(), true);
    assert!(matches!(tiny.executable.finish(), Err(DeviceError::Step(_))));
}
