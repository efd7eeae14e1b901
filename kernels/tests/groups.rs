//! Programs whose layers are in several groups of the pool: they have the bits of one full group, and touch only the blocks of their tables.

mod common;

use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::{Device, DeviceError};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::step::{Delta, Join, RowId, SlotRows, StepInput};
use baton_types::{BlockId, BlockTables, Dtype, GroupBlocks, GroupKind, KvGroup, KvLayout, KvPlane, KvPoolMap};
use common::recorded;
use common::tiny::{BOUNDS, Tiny, VOCAB, bounds, program, rows, soon};
use std::sync::Arc;

/// The last layer of the rich program attends to 9 tokens.
const WINDOW: GroupKind = GroupKind::Window(9);
/// Blocks of the two groups.
const BLOCKS: [u32; 2] = [8, 7];

fn reference() -> Arc<dyn Device> {
    ReferenceDevice::new(Numerics::default())
}

fn devices() -> Vec<Arc<dyn Device>> {
    let cpu = |numerics| CpuDevice::new(CpuConfig { threads: 2, numerics, ..CpuConfig::default() }).unwrap();
    let lagging = Lagging::new(cpu(Numerics::default()), LagConfig::default());
    let mut devices: Vec<Arc<dyn Device>> =
        vec![reference(), cpu(Numerics::default()), cpu(Numerics::Bf16x32), lagging];
    // The layouts here are of bf16.
    devices.extend(recorded().into_iter().take(1));
    devices
}

fn group(kind: GroupKind, layers: &[u32]) -> KvGroup {
    let planes = ["k", "v"].map(|name| KvPlane::try_new(name, 2, 8, Dtype::Bf16).unwrap());
    KvGroup { kind, layers: layers.to_vec(), planes: planes.to_vec() }
}

fn map(groups: &[KvGroup]) -> KvPoolMap {
    let layout = KvLayout::try_new(16, groups.to_vec()).unwrap();
    KvPoolMap::with_blocks(layout, BLOCKS[..groups.len()].to_vec()).unwrap()
}

fn mixed() -> KvPoolMap {
    map(&[group(GroupKind::Full, &[0]), group(WINDOW, &[1])])
}

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId).collect()
}

fn step(deltas: Vec<Delta>, position: usize, rows: usize) -> StepInput {
    let id = |position: usize| RowId::Token((position * 7 % VOCAB) as u32);
    StepInput {
        deltas,
        ids: (position..position + rows).map(id).collect(),
        segments: vec![SlotRows { slot: 1, position, rows, ..SlotRows::default() }],
        logit_rows: (0..rows).collect(),
        observed: 0..2,
    }
}

/// A prompt of 20 tokens, then one token a step. Its first block leaves the window at position 24, and holds the positions from 32 on.
fn steps() -> Vec<StepInput> {
    let tables = BlockTables::from_start(GroupBlocks(vec![ids(&[5, 2]), ids(&[3, 6])]));
    let mut steps = vec![step(vec![Delta::Join(Box::new(Join { slot: 1, tables, ..Join::default() }))], 0, 20)];
    for position in 20..BOUNDS.positions_max {
        let deltas = match position {
            24 => vec![Delta::Blocks { slot: 1, group: 1, first: 1, keep: 2, blocks: Vec::new() }],
            32 => vec![
                Delta::Blocks { slot: 1, group: 1, first: 1, keep: 2, blocks: ids(&[3]) },
                Delta::Blocks { slot: 1, group: 0, first: 0, keep: 2, blocks: ids(&[7]) },
            ],
            _ => Vec::new(),
        };
        steps.push(step(deltas, position, 1));
    }
    steps
}

/// Logits of all rows on one full group.
fn expected(device: &dyn Device) -> Vec<u32> {
    let mut tiny = Tiny::new(device, true);
    let chunks = std::iter::once((0, 20)).chain((20..BOUNDS.positions_max).map(|position| (position, 1)));
    chunks.flat_map(|(position, count)| tiny.step(&rows(position, count, &[1, 4, 6])).unwrap()).collect()
}

#[test]
fn layers_in_several_groups_have_the_bits_of_one() {
    for device in devices() {
        let name = device.info().name;
        let mut tiny = Tiny::on(&*device, mixed());
        let (mut got, mut layers) = (Vec::new(), Vec::new());
        let mut finish = |tiny: &mut Tiny| got.extend(tiny.finish().unwrap().into_iter().map(f32::to_bits));
        for (index, step) in steps().iter().enumerate() {
            tiny.executable.launch(step, &mut |layer, _| layers.push(layer)).unwrap();
            // One step ahead.
            if index > 0 {
                finish(&mut tiny);
            }
        }
        finish(&mut tiny);
        assert!(got == expected(&*device), "{name}");
        assert!(layers.chunks(2).all(|pair| pair == [0, 1]), "{name}: {layers:?}");
        // Nothing else was stored to.
        for (group, used) in [(0, [5, 2, 7].as_slice()), (1, &[3, 6])] {
            for block in 0..BLOCKS[group] {
                let range = tiny.map.token_range(group, 0, BlockId(block), 0, 0..16);
                let mut bytes = vec![0; range.len()];
                tiny.pool.read_by(soon(), range.start, &mut bytes).unwrap();
                let is_empty = bytes.iter().all(|byte| *byte == 0xff);
                assert_eq!(is_empty, !used.contains(&block), "{name}: block {block} of group {group}");
            }
        }
    }
}

#[test]
fn what_a_window_needs_must_be_in_its_table() {
    for device in devices() {
        let mut tiny = Tiny::on(&*device, mixed());
        let mut launch = |step: &StepInput| tiny.executable.launch(step, &mut |_, _| ());
        let join = |tables: Vec<Vec<BlockId>>| {
            let tables = BlockTables::from_start(GroupBlocks(tables));
            step(vec![Delta::Join(Box::new(Join { slot: 1, tables, ..Join::default() }))], 0, 20)
        };
        let refused = |result: Result<(), DeviceError>, part: &str| {
            let Err(DeviceError::Step(message)) = result else { panic!("{part}: {result:?}") };
            assert!(message.contains(part), "{message}");
        };
        refused(launch(&join(vec![ids(&[5, 2])])), "1 tables for 2 groups");
        refused(launch(&join(vec![ids(&[5, 2]), ids(&[3])])), "1 blocks for 20 positions");
        refused(launch(&join(vec![ids(&[5, 2]), ids(&[3, 7])])), "block 7 of a pool of 7");
        let mut early = steps().swap_remove(0);
        // Position 23 is the last that attends to position 15.
        early.deltas.push(Delta::Blocks { slot: 1, group: 1, first: 1, keep: 2, blocks: Vec::new() });
        refused(launch(&early), "blocks from 1 on, position 0 attends to 0");
        let skip = |deltas| StepInput { deltas, ..step(Vec::new(), 23, 1) };
        refused(launch(&skip(early.deltas.clone())), "blocks from 1 on, position 23 attends to 0");
        launch(&StepInput { deltas: early.deltas, ..step(Vec::new(), 24, 1) }).expect("position 24 does not");
    }
}

#[test]
fn a_pool_must_keep_what_each_layer_attends_to() {
    let full = |layers: &[u32]| group(GroupKind::Full, layers);
    for device in devices() {
        let bind = |groups: &[KvGroup]| {
            let map = map(groups);
            let pool = device.alloc_pool(&map).unwrap();
            device.compile(program(&*device, true), bounds(&*device)).unwrap().bind(pool, &map)
        };
        assert_eq!(bind(&[full(&[1]), full(&[0])]), Ok(()), "in any order");
        for (groups, part) in [
            (vec![full(&[0])], "layer 1 is in no group"),
            (vec![group(WINDOW, &[0, 1])], "layer 0 has a window of None"),
            (vec![full(&[0]), group(GroupKind::Window(8), &[1])], "the pool keeps 8 tokens, layer 1"),
            (vec![full(&[0, 1]), group(GroupKind::State, &[2])], "State"),
        ] {
            let Err(DeviceError::Shape { op: "bind", message }) = bind(&groups) else { panic!("{part}") };
            assert!(message.contains(part), "{message}");
        }
    }
}

#[test]
fn a_copy_is_of_one_group() {
    for device in devices() {
        let mut tiny = Tiny::on(&*device, mixed());
        tiny.executable.launch(&steps()[0], &mut |_, _| ()).unwrap();
        tiny.finish().unwrap();
        let block = |tiny: &Tiny, group: usize, block: u32| {
            let range = tiny.map.token_range(group, 0, BlockId(block), 1, 0..4);
            let mut bytes = vec![0; range.len()];
            tiny.pool.read_by(soon(), range.start, &mut bytes).unwrap();
            bytes
        };
        let before = block(&tiny, 0, 0);
        tiny.executable.copy_kv(1, BlockId(6), BlockId(0), 4).unwrap();
        assert!(block(&tiny, 1, 0) == block(&tiny, 1, 6) && block(&tiny, 0, 0) == before, "{}", device.info().name);
        for (group, to) in [(1, 7), (2, 0)] {
            let refused = tiny.executable.copy_kv(group, BlockId(6), BlockId(to), 4);
            assert!(matches!(refused, Err(DeviceError::Shape { op: "copy_kv", .. })), "{refused:?}");
        }
    }
}
