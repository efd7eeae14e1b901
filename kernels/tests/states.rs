//! Programs with recurrent layers, and gates of attention's output: states in pools and block tables, cuts of sequences, late devices, and what is
//! refused.

mod common;

use baton_kernels::cpu::{CpuConfig, CpuDevice, TensorCoreDevice};
use baton_kernels::device::{Device, DeviceError, Executable, Role, RopeTable};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::program::{
    Activation, Attend, Embed, GateUp, GatedDelta, Head, Norm, Op, Program, Project, Qkv, TAPS_MAX,
};
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::step::{Delta, Join, RowId, SlotRows, StepInput};
use baton_memory::PoolMemory;
use baton_types::{
    Attention, BlockId, BlockTable, BlockTables, Dtype, Fence, FenceStatus, GroupKind, KvGroup, KvLayout, KvPlane,
    KvPoolMap, LayerKv,
};
use common::tiny::{BLOCK, BOUNDS, bounds, load, soon};
use common::{Random, recorded};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

const HIDDEN: usize = 24;
const VOCAB: usize = 11;
const DIM: usize = 8;
const TAPS: usize = 4;
/// Heads of keys and of values, and their elements.
const HEADS: [usize; 2] = [2, 4];
const ELEMENTS: [usize; 2] = [8, 6];
/// Full attention, and states.
const BLOCKS: [u32; 2] = [6, 7];

fn state() -> LayerKv {
    let [[key_heads, value_heads], [key_dim, value_dim]] = [HEADS, ELEMENTS].map(|pair| pair.map(|x| x as u32));
    let channels = 2 * key_heads * key_dim + value_heads * value_dim;
    LayerKv::State { heads: value_heads, key_dim, value_dim, inputs: TAPS as u32 - 1, channels }
}

/// A program of three layers, of which one attends; each has one block of `ffn`.
fn program(device: &dyn Device, attends: u32) -> Program {
    let mut random = Random(3);
    let random = &mut random;
    let mut of = |role, k: usize, parts: &[usize]| load(device, role, k, parts, random);
    let mut ops = vec![Op::Embed(Embed::plain(of(Role::Embedding, HIDDEN, &[VOCAB])))];
    let angles: Vec<f32> = (0..BOUNDS.positions_max * DIM / 2).map(|i| i as f32 * 0.3).collect();
    let (cos, sin) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let rope = device.load_rope(RopeTable { cos, sin, dim: DIM }).unwrap();
    let norm = |gain| Norm { gain, eps: 1e-5 };
    for layer in 0..3 {
        let before = Some(norm(of(Role::Vector, HIDDEN, &[1])));
        let query = 4 * DIM;
        let columns = if layer == attends {
            let weight = of(Role::Qkv, HIDDEN, &[query, 2 * DIM, 2 * DIM, query]);
            let bias = Some(of(Role::Vector, weight.n, &[1]));
            let (heads, kv_heads, head_dim) = (4, 2, DIM);
            let qkv =
                Qkv { layer, norm: before, weight, bias, heads, kv_heads, head_dim, norms: None, rope, gate: true };
            ops.push(Op::Qkv(qkv));
            ops.extend((layer == 2).then_some(Op::Select));
            ops.push(Op::Attend(Attend { layer, scale: 0.3, window: None, soft_cap: None, sinks: None }));
            ops.push(Op::Gate);
            query
        } else {
            let [[key_heads, value_heads], [key_dim, value_dim]] = [HEADS, ELEMENTS];
            let (key, value) = (key_heads * key_dim, value_heads * value_dim);
            ops.push(Op::GatedDelta(GatedDelta {
                layer,
                norm: before,
                weight: of(Role::Qkv, HIDDEN, &[key, key, value, value, value_heads, value_heads]),
                conv: of(Role::Vector, TAPS * (2 * key + value), &[1]),
                decay: of(Role::Vector, value_heads, &[1]),
                decay_bias: of(Role::Vector, value_heads, &[1]),
                output_norm: norm(of(Role::Vector, value_dim, &[1])),
                key_heads,
                value_heads,
                key_dim,
                value_dim,
                taps: TAPS,
                length_eps: 1e-6,
            }));
            ops.extend((layer == 2).then_some(Op::Select));
            value
        };
        ops.push(Op::Out(Project::plain(of(Role::Out, columns, &[HIDDEN]))));
        let weight = of(Role::GateUp, HIDDEN, &[16, 16]);
        ops.push(Op::GateUp(GateUp { norm: before, weight, activation: Activation::Silu }));
        ops.push(Op::Down(Project::plain(of(Role::Down, 16, &[HIDDEN]))));
    }
    let head = of(Role::Head, HIDDEN, &[VOCAB]);
    ops.extend([Op::Head(Head::plain(norm(of(Role::Vector, HIDDEN, &[1])), head)), Op::Sample]);
    Program { ops }
}

fn map(device: &dyn Device, attends: u32) -> KvPoolMap {
    let kv = LayerKv::Heads { kv_heads: 2, head_dim: DIM as u32 };
    let layers = (0..3).map(|layer| (None, if layer == attends { kv } else { state() }));
    let dtype = device.info().numerics.kv().unwrap_or(Dtype::Bf16);
    let layout = Attention::of_layers(layers).layout(BLOCK as u32, dtype).unwrap();
    KvPoolMap::with_blocks(layout, BLOCKS.to_vec()).unwrap()
}

struct Model {
    executable: Box<dyn Executable>,
    pool: Arc<dyn PoolMemory>,
    map: KvPoolMap,
}

impl Model {
    fn new(device: &dyn Device, attends: u32) -> Self {
        let map = map(device, attends);
        let mut executable = device.compile(program(device, attends), bounds(device)).unwrap();
        let pool = device.alloc_pool(&map).unwrap();
        pool.write_by(soon(), 0, &vec![0xff; map.bytes()]).unwrap();
        executable.bind(pool.clone(), &map).unwrap();
        Self { executable, pool, map }
    }

    fn launch(&mut self, step: &StepInput) -> Result<(), DeviceError> {
        self.executable.launch(step, &mut |_, _| ())
    }

    /// Bits of the logits.
    fn finish(&mut self) -> Vec<u32> {
        self.executable.finish().unwrap().logits.data().iter().map(|x| x.to_bits()).collect()
    }

    /// Bytes of a state, in all layers.
    fn state(&self, block: u32) -> Vec<u8> {
        let planes = (0..2).flat_map(|layer| (0..2).map(move |plane| (layer, plane)));
        let of = |(layer, plane)| {
            let range = self.map.token_range(1, layer, BlockId(block), plane, 0..1);
            let mut bytes = vec![0; range.len()];
            self.pool.read_by(soon(), range.start, &mut bytes).unwrap();
            bytes
        };
        planes.flat_map(of).collect()
    }
}

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
            (&[1][..], "1 states from index 0 on, a step from position 16 needs 2 to 2 from 0 on"),
            (&[1, 2, 3], "3 states"),
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
