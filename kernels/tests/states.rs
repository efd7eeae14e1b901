//! Programs with recurrent layers, and gates of attention's output: states in pools and block tables, cuts of sequences, late devices, and what is
//! refused.

mod common;

use baton_kernels::cpu::{CpuConfig, CpuDevice, TensorCoreDevice};
use baton_kernels::device::{Device, DeviceError, Role};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::program::{GatedDelta, Op, Program, TAPS_MAX};
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::step::{Delta, Join, RowId, SlotRows, StepInput};
use baton_types::{
    BlockId, BlockTable, BlockTables, Dtype, Fence, FenceStatus, GroupKind, KvGroup, KvLayout, KvPlane, KvPoolMap,
};
use common::recurrent::{BLOCKS, HIDDEN, Model, VOCAB, program};
use common::tiny::{BLOCK, bounds, load};
use common::{Random, recorded};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId).collect()
}

/// Rows of a slot, with their logits. The table of states becomes this one.
fn step(slot: usize, positions: Range<usize>, states: &[u32]) -> StepInput {
    let first = positions.start.saturating_sub(1) / BLOCK;
    let deltas = match positions.start {
        0 => {
            let of_slot = [0, 1, 2].map(|block| (block + 3 * slot) as u32);
            let tables =
                BlockTables(vec![BlockTable::from_start(ids(&of_slot)), BlockTable { first, blocks: ids(states) }]);
            vec![Delta::Join(Box::new(Join { slot, tables, ..Join::default() }))]
        }
        _ => vec![Delta::Blocks { slot, group: 1, first, keep: first, blocks: ids(states) }],
    };
    let (position, rows) = (positions.start, positions.len());
    StepInput {
        deltas,
        ids: positions.map(|position| RowId::Token((position * 7 % VOCAB) as u32)).collect(),
        segments: vec![SlotRows { slot, position, rows, ..SlotRows::default() }],
        logit_rows: (0..rows).collect(),
        observed: 0..3,
    }
}

fn reference() -> Arc<dyn Device> {
    ReferenceDevice::new(Numerics::default())
}

fn devices() -> Vec<Arc<dyn Device>> {
    let config = |numerics| CpuConfig { threads: 2, numerics, ..CpuConfig::default() };
    let cores = Numerics::TensorCore { cores: TensorCore::Tc16F25, half: Half::Bf16 };
    let cpu = |numerics| CpuDevice::new(config(numerics)).unwrap();
    let late = Lagging::new(cpu(Numerics::default()), LagConfig::default());
    let cores = TensorCoreDevice::new(config(cores)).unwrap();
    vec![reference(), cpu(Numerics::default()), cpu(Numerics::Bf16x32), cpu(Numerics::I8x32), late, cores]
}

/// Logits of all rows, and the state behind them, of a sequence that is cut like this. States stay in place where they can, or always move.
fn cut(device: &dyn Device, attends: u32, cuts: &[usize], in_place: bool) -> (Vec<u32>, Vec<u8>) {
    let mut model = Model::new(device, attends);
    let (mut logits, mut at, mut block) = (Vec::new(), 0, 0);
    for (index, rows) in cuts.iter().enumerate() {
        let next = (block + 1) % BLOCKS[1];
        let live = GroupKind::State.live(at..at + rows, BLOCK);
        let states = match (at, in_place && live.len() == 1) {
            (0, _) => vec![next],
            (_, true) => vec![block],
            (_, false) => vec![block, next],
        };
        model.launch(&step(0, at..at + rows, &states)).unwrap();
        // One step ahead.
        if index > 0 {
            logits.extend(model.finish());
        }
        (at, block) = (at + rows, states[states.len() - 1]);
    }
    logits.extend(model.finish());
    let state = model.state(block);
    (logits, state)
}

#[test]
fn no_cut_of_a_sequence_changes_a_bit() {
    for (device, attends) in devices().iter().flat_map(|device| [1, 2].map(|attends| (device, attends))) {
        let (name, numerics) = (device.info().name, device.info().numerics);
        let want = cut(&*ReferenceDevice::new(numerics), attends, &[20, 20], true);
        assert!(want.0.iter().all(|x| f32::from_bits(*x).is_finite()), "{name}");
        for (cuts, in_place) in [
            (vec![20, 20], false),
            (vec![16, 16, 8], true),
            (vec![1; 40], true),
            (vec![1; 40], false),
            (vec![3, 1, 20, 9, 7], true),
        ] {
            assert!(cut(&**device, attends, &cuts, in_place) == want, "{name}, layer {attends}: {cuts:?}, {in_place}");
        }
    }
}

/// Only rows whose logits are needed go through what follows the last state, and they have the bits that they have among all.
#[test]
fn selected_rows_are_those_of_all() {
    for (device, attends) in devices().iter().flat_map(|device| [1, 2].map(|attends| (device, attends))) {
        let all = cut(&**device, attends, &[20], true).0;
        let mut model = Model::new(&**device, attends);
        model.launch(&StepInput { logit_rows: vec![17, 4], ..step(0, 0..20, &[1]) }).unwrap();
        let row = |row: usize| &all[row * VOCAB..(row + 1) * VOCAB];
        assert_eq!(model.finish(), [row(17), row(4)].concat(), "{}, {attends}", device.info().name);
        // A step without such rows changes the state all the same.
        let before = model.state(1);
        model.launch(&StepInput { logit_rows: Vec::new(), ..step(0, 20..24, &[1, 2]) }).unwrap();
        assert!(model.finish().is_empty() && model.state(1) == before && model.state(2) != before);
    }
}

#[test]
fn tables_that_do_not_have_the_states_of_a_step_are_refused() {
    for device in devices() {
        let mut model = Model::new(&*device, 1);
        let refused = |model: &mut Model, step: &StepInput, part: &str| {
            let Err(DeviceError::Step(message)) = model.launch(step) else { panic!("{part}") };
            assert!(message.contains(part), "{message}");
        };
        for states in [&[][..], &[1, 2]] {
            refused(&mut model, &step(0, 0..20, states), "a step from position 0 needs 1 to 1 from 0 on");
        }
        model.launch(&step(0, 0..16, &[1])).unwrap();
        model.finish();
        for (states, part) in [
            (&[1, 2, 3][..], "3 states from index 0 on, a step from position 16 needs 1 to 2 from 0 on"),
            (&[], "0 states"),
            (&[1, 1], "the state in block 1 is to be kept and changed"),
            (&[1, 7], "block 7 of a pool of 7"),
        ] {
            refused(&mut model, &step(0, 16..20, states), part);
        }
        let mut later = step(0, 16..20, &[1, 2]);
        later.deltas = vec![Delta::Blocks { slot: 0, group: 1, first: 1, keep: 1, blocks: ids(&[1, 2]) }];
        refused(&mut model, &later, "2 states from index 1 on");
        model.launch(&step(0, 16..20, &[1, 2])).unwrap();
        model.finish();
        // The table is as it was launched until a step says that it has settled.
        let unsettled = StepInput { deltas: Vec::new(), ..step(0, 20..21, &[2]) };
        refused(&mut model, &unsettled, "2 states from index 0 on, a step from position 20 needs 1 to 2 from 1 on");
        model.launch(&step(0, 20..21, &[2])).unwrap();
        model.finish();

        // A second sequence may read the state that the first one keeps, and neither may touch what the other one writes.
        let both = |first: &[u32], second: Range<usize>, states: &[u32]| {
            let (mut one, other) = (step(0, 21..22, first), step(1, second, states));
            one.deltas.extend(other.deltas);
            one.ids.extend(other.ids);
            one.segments.extend(other.segments);
            StepInput { logit_rows: vec![0], ..one }
        };
        for (first, second) in [(&[2][..], 2), (&[2, 3], 3), (&[2, 3], 2)] {
            refused(&mut model, &both(first, 0..3, &[second]), "stores to block");
        }
        model.launch(&both(&[2, 3], 0..3, &[4])).unwrap();
        model.finish();
    }
}

#[test]
fn states_are_not_copied() {
    for device in devices() {
        let mut model = Model::new(&*device, 1);
        let refused = model.executable.copy_kv(1, BlockId(0), BlockId(1), 1).unwrap_err();
        assert!(matches!(&refused, DeviceError::Shape { op: "copy_kv", .. }), "{refused}");
        assert!(refused.to_string().contains("states"), "{refused}");
        model.executable.copy_kv(0, BlockId(0), BlockId(1), 1).unwrap();
    }
}

#[test]
fn pools_without_the_states_of_a_program_are_refused() {
    let group = |kind, layers: &[u32], planes: &[(&str, u32, u32, Dtype)]| KvGroup {
        kind,
        layers: layers.to_vec(),
        planes: planes.iter().map(|(name, n, dim, dtype)| KvPlane::try_new(*name, *n, *dim, *dtype).unwrap()).collect(),
    };
    let full = group(GroupKind::Full, &[1], &[("k", 2, 8, Dtype::Bf16), ("v", 2, 8, Dtype::Bf16)]);
    let device = reference();
    let bind = |of_states: KvGroup| {
        let map = KvPoolMap::try_new(KvLayout::try_new(16, vec![full.clone(), of_states]).unwrap(), 4).unwrap();
        let mut executable = device.compile(program(&*device, 1), bounds(&*device)).unwrap();
        executable.bind(device.alloc_pool(&map).unwrap(), &map)
    };
    let states = |planes: &[(&str, u32, u32, Dtype)]| bind(group(GroupKind::State, &[0, 2], planes));
    let f32 = Dtype::F32;
    let conv = ("conv", 3, 56, f32);
    assert_eq!(states(&[conv, ("state", 4, 48, f32)]), Ok(()));
    let of_heads =
        group(GroupKind::Full, &[0, 2], &full.planes.iter().map(|p| (p.name(), 2, 8, f32)).collect::<Vec<_>>());
    for (refused, part) in [
        (
            states(&[conv, ("state", 4, 40, f32)]),
            "(4, 40) [heads, elements] of a state, with (3, 56) inputs in the pool",
        ),
        (
            states(&[conv, ("state", 2, 48, f32)]),
            "the model has (4, 48) [heads, elements] of a state, with (3, 56) inputs",
        ),
        (states(&[("conv", 2, 56, f32), ("state", 4, 48, f32)]), "with (2, 56) inputs in the pool"),
        (states(&[conv, ("state", 4, 48, Dtype::Bf16)]), "needs planes [\"conv\", \"state\"] in f32"),
        (states(&[("state", 4, 48, f32), conv]), "needs planes [\"conv\", \"state\"] in f32"),
        (states(&[conv]), "needs planes"),
        (bind(of_heads), "(2, 8) [heads, dim] of keys and values in the pool, the model has (4, 48)"),
    ] {
        let Err(DeviceError::Shape { op: "bind", message }) = refused else { panic!("{part}: {refused:?}") };
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn programs_that_do_not_fit_are_refused() {
    let device = reference();
    for attends in [1, 2] {
        let good = program(&*device, attends);
        let check = |op: &str, change: &dyn Fn(&mut Vec<Op>)| {
            let mut ops = good.ops.clone();
            change(&mut ops);
            match device.compile(Program { ops }, bounds(&*device)).map(drop) {
                Err(DeviceError::Shape { op: named, message }) => assert_eq!(named, op, "{message}"),
                other => panic!("{op}: {other:?}"),
            }
        };
        fn delta(ops: &mut [Op]) -> &mut GatedDelta {
            let Op::GatedDelta(op) = &mut ops[1] else { panic!("the second operation") };
            op
        }
        let at = |find: &dyn Fn(&Op) -> bool| good.ops.iter().position(find).unwrap();
        check("gated_delta", &|ops| delta(ops).layer = 1);
        check("gated_delta", &|ops| delta(ops).key_heads = 3);
        check("gated_delta", &|ops| delta(ops).key_heads = 0);
        check("gated_delta", &|ops| delta(ops).key_dim += 1);
        check("gated_delta", &|ops| delta(ops).value_dim += 1);
        for taps in [0, 1, 3, TAPS_MAX + 1] {
            check("gated_delta", &|ops| delta(ops).taps = taps);
        }
        check("gated_delta", &|ops| delta(ops).length_eps = f32::NAN);
        check("gated_delta", &|ops| delta(ops).length_eps = -1.0);
        check("gated_delta", &|ops| delta(ops).decay = delta(ops).conv);
        check("gated_delta", &|ops| delta(ops).decay_bias = delta(ops).conv);
        check("gated_delta", &|ops| delta(ops).output_norm = delta(ops).norm.unwrap());
        check("gated_delta", &|ops| delta(ops).norm = Some(delta(ops).output_norm));
        check("compile", &|ops| delta(ops).weight = load(&*device, Role::Qkv, HIDDEN, &[88], &mut Random(1)));
        // Rows are selected after the last state, and before the last layer attends.
        let select = at(&|op| *op == Op::Select);
        check("compile", &|ops| ops.swap(select - 1, select));
        check("compile", &|ops| ops.swap(select, select + 1));
        check("compile", &|ops| ops.insert(2, Op::Select));
        check("compile", &|ops| _ = ops.remove(select));
        // A gate is used if there is one.
        let gate = at(&|op| *op == Op::Gate);
        check("compile", &|ops| _ = ops.remove(gate));
        check("compile", &|ops| ops.insert(gate, Op::Gate));
        check("compile", &|ops| ops.insert(2, Op::Gate));
        check("qkv", &|ops| {
            let qkv = ops.iter_mut().find_map(|op| if let Op::Qkv(op) = op { Some(op) } else { None }).unwrap();
            qkv.gate = false;
        });
    }
}

#[test]
fn devices_without_these_kernels_say_so() {
    for device in recorded() {
        assert!(!device.info().states);
        let refused = |ops: Vec<Op>| match device.compile(Program { ops }, bounds(&*device)).map(drop) {
            Err(DeviceError::Shape { op: "compile", message }) => message,
            other => panic!("{other:?}"),
        };
        // Of two layers, the one before the other.
        let message = refused(program(&*device, 1).ops);
        assert!(message.contains("a gated delta rule, which GPU kernels do not compute yet"), "{message}");
        let message = refused(program(&*device, 0).ops);
        assert!(message.contains("gates of attention's output, which GPU kernels"), "{message}");
    }
    assert!(devices().iter().all(|device| device.info().states));
}

fn all_nan(state: &[u8]) -> bool {
    state.as_chunks().0.iter().all(|bytes| f32::from_le_bytes(*bytes).is_nan())
}

/// A state that is written to another block is poison until its fence, a state that is changed in place is the one before.
#[test]
fn late_states_are_poison_until_their_fence() {
    let lagging = Lagging::new(reference(), LagConfig::default());
    let (mut late, mut calm) = (Model::new(&*lagging, 1), Model::new(&*reference(), 1));
    for model in [&mut late, &mut calm] {
        model.launch(&step(0, 0..16, &[1])).unwrap();
        model.finish();
    }
    let before = calm.state(1);
    assert!(late.state(1) == before && !all_nan(&before));
    for (positions, states) in [(16..20, &[1, 2][..]), (20..21, &[2])] {
        let read = late.state(states[0]);
        calm.launch(&step(0, positions.clone(), states)).unwrap();
        calm.finish();
        lagging.hold();
        let mut fences: Vec<(u32, Fence)> = Vec::new();
        let launched = step(0, positions, states);
        late.executable.launch(&launched, &mut |layer, fence| fences.push((layer, fence.clone()))).unwrap();
        assert_eq!(fences.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(late.state(states[0]) == read);
        assert!(states.len() == 1 || all_nan(&late.state(2)));
        lagging.release();
        let until = Instant::now() + Duration::from_secs(20);
        while fences[2].1.poll() == FenceStatus::Pending && Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(late.state(2) == calm.state(2) && late.state(1) == before);
        late.finish();
    }
}

/// A block that a pending step reads is written by a later one.
#[test]
fn reuse_of_a_state_does_not_poison_what_earlier_work_reads() {
    let lagging = Lagging::new(reference(), LagConfig::default());
    let (mut late, mut calm) = (Model::new(&*lagging, 1), Model::new(&*reference(), 1));
    for model in [&mut late, &mut calm] {
        model.launch(&step(0, 0..16, &[1])).unwrap();
        model.finish();
    }
    // The first sequence goes on in another block, then the second one begins in the first block.
    let steps = [step(0, 16..17, &[1, 2]), step(1, 0..5, &[1])];
    let want = steps.each_ref().map(|step| {
        calm.launch(step).unwrap();
        calm.finish()
    });
    lagging.hold();
    steps.iter().for_each(|step| late.launch(step).unwrap());
    lagging.release();
    assert_eq!([late.finish(), late.finish()], want);
    assert!(late.state(1) == calm.state(1) && late.state(2) == calm.state(2));
}
