//! What a GPU is given for each step: kernels in order, graphs, events, changes of tables, and no wait but the one for a step's end.

mod common;

use baton_kernels::cuda::{Recording, recording};
use baton_kernels::numerics::{Half, TensorCore};
use baton_kernels::step::{Delta, Join, RowId, SlotRows, StepInput};
use baton_types::{BlockId, BlockTables, GroupBlocks, SamplingParams};
use common::tiny::Tiny;
use expect_test::{Expect, expect};

struct World {
    tiny: Tiny,
    recording: Recording,
}

impl World {
    fn new() -> Self {
        let (device, recording) = recording(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
        let tiny = Tiny::new(&*device, false);
        recording.take();
        Self { tiny, recording }
    }

    /// Launches a step, compares what the device was given for it, and finishes it.
    fn check(&mut self, step: &StepInput, expected: Expect) {
        let mut layers = Vec::new();
        self.tiny.executable.launch(step, &mut |layer, _| layers.push(layer)).unwrap();
        expected.assert_eq(&self.recording.take().join("\n"));
        assert_eq!(layers, step.observed.clone().collect::<Vec<_>>());
        self.tiny.executable.finish().unwrap();
        assert_eq!(self.recording.take(), ["wait"]);
    }
}

fn join(slot: usize, blocks: &[u32]) -> Delta {
    let tables = BlockTables::from_start(GroupBlocks(vec![blocks.iter().copied().map(BlockId).collect()]));
    let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    Delta::Join(Box::new(Join { slot, tables, tokens: vec![3, 4, 5], prompt_len: 3, sampling, ..Join::default() }))
}

fn rows(slot: usize, position: usize, rows: usize, samples: usize) -> SlotRows {
    SlotRows { slot, position, rows, samples, masks: Vec::new() }
}

fn step(deltas: Vec<Delta>, segments: Vec<SlotRows>) -> StepInput {
    let ids = vec![RowId::Token(3); segments.iter().map(|segment| segment.rows).sum()];
    StepInput { deltas, ids, segments, ..StepInput::default() }
}

#[test]
fn a_prompt_is_computed_kernel_by_kernel() {
    let mut prompt = step(vec![join(1, &[5])], vec![rows(1, 0, 3, 1)]);
    prompt.observed = 0..2;
    World::new().check(
        &prompt,
        expect![[r#"
            upload 64
            upload 16
            upload 4
            upload 8
            scatter [1, 1, 1] 1 entries
            upload 2368
            embed_bf16 [3, 1, 1]
            norm_bf16 [3, 1, 1]
            gemm_few_bf16_n16_m8 [4, 1, 1] 3 x 64 x 24
            rope_store_bf16 [3, 1, 1]
            event
            attend_prefill_bf16_d64 [1, 2, 1]
            gemm_few_bf16_n16_m8 [2, 1, 1] 3 x 24 x 32
            norm_bf16 [3, 1, 1]
            gemm_few_bf16_n16_m8 [2, 1, 1] 3 x 32 x 24
            gemm_few_bf16_n16_m8 [2, 1, 1] 3 x 24 x 16
            norm_bf16 [3, 1, 1]
            gemm_few_bf16_n16_m8 [4, 1, 1] 3 x 64 x 24
            rope_store_bf16 [3, 1, 1]
            event
            select_bf16 [1, 1, 1]
            attend_decode_bf16_d64 [1, 2, 1] 1 rows, 1 splits
            attend_merge_bf16 [1, 1, 1]
            gemm_few_bf16_n16_m8 [2, 1, 1] 1 x 24 x 32
            norm_bf16 [1, 1, 1]
            gemm_few_bf16_n16_m8 [2, 1, 1] 1 x 32 x 24
            gemm_few_bf16_n16_m8 [2, 1, 1] 1 x 24 x 16
            norm_bf16 [1, 1, 1]
            gemm_few_bf16_n16_m8 [1, 1, 1] 1 x 11 x 24
            sample [1, 1, 1]
            download 192
            event"#]],
    );
}

/// Buckets of 1, 2 and 4 rows, each for steps of at most one split.
#[test]
fn graphs_are_made_with_the_pool_and_not_in_a_step() {
    let (device, recording) = recording(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
    let _tiny = Tiny::new(&*device, false);
    let graphs = recording.take().into_iter().filter(|line| line.starts_with("make a graph"));
    assert_eq!(graphs.collect::<Vec<_>>(), ["make a graph of 23"; 3]);
}

#[test]
fn decode_is_one_graph_for_each_bucket() {
    let mut world = World::new();
    let prompts = vec![rows(0, 0, 3, 1), rows(1, 0, 3, 1), rows(2, 0, 3, 1)];
    world
        .tiny
        .executable
        .launch(&step((0..3).map(|slot| join(slot, &[slot as u32])).collect(), prompts), &mut |_, _| ())
        .unwrap();
    world.tiny.executable.finish().unwrap();
    world.recording.take();
    let of =
        |slots: &[usize], position| step(Vec::new(), slots.iter().map(|slot| rows(*slot, position, 1, 1)).collect());
    world.check(
        &of(&[0, 1, 2], 3),
        expect![[r#"
            upload 2368
            graph
            download 576
            event"#]],
    );
    // Padded to the same bucket, and only what differs is uploaded.
    let mut grown = of(&[2, 0, 1], 4);
    grown.deltas.push(Delta::Blocks { slot: 2, group: 0, first: 0, keep: 1, blocks: vec![BlockId(6)] });
    world.check(
        &grown,
        expect![[r#"
        upload 8
        scatter [1, 1, 1] 1 entries
        upload 2368
        graph
        download 576
        event"#]],
    );
    world.check(
        &of(&[1], 5),
        expect![[r#"
            upload 2368
            graph
            download 192
            event"#]],
    );
    world.check(
        &of(&[0], 5),
        expect![[r#"
        upload 2368
        graph
        download 192
        event"#]],
    );
}

#[test]
fn rows_of_both_kinds_share_a_step() {
    let mut world = World::new();
    world.tiny.executable.launch(&step(vec![join(1, &[5])], vec![rows(1, 0, 3, 1)]), &mut |_, _| ()).unwrap();
    world.tiny.executable.finish().unwrap();
    world.recording.take();
    world.check(
        &step(vec![join(0, &[2])], vec![rows(0, 0, 3, 1), rows(1, 3, 1, 1)]),
        expect![[r#"
            upload 64
            upload 16
            upload 4
            upload 8
            scatter [1, 1, 1] 1 entries
            upload 2368
            embed_bf16 [4, 1, 1]
            norm_bf16 [4, 1, 1]
            gemm_few_bf16_n16_m8 [4, 1, 1] 4 x 64 x 24
            rope_store_bf16 [4, 1, 1]
            attend_decode_bf16_d64 [1, 2, 1] 1 rows, 1 splits
            attend_merge_bf16 [1, 1, 1]
            attend_prefill_bf16_d64 [1, 2, 1]
            gemm_few_bf16_n16_m8 [2, 1, 1] 4 x 24 x 32
            norm_bf16 [4, 1, 1]
            gemm_few_bf16_n16_m8 [2, 1, 1] 4 x 32 x 24
            gemm_few_bf16_n16_m8 [2, 1, 1] 4 x 24 x 16
            norm_bf16 [4, 1, 1]
            gemm_few_bf16_n16_m8 [4, 1, 1] 4 x 64 x 24
            rope_store_bf16 [4, 1, 1]
            select_bf16 [2, 1, 1]
            attend_decode_bf16_d64 [1, 2, 2] 2 rows, 1 splits
            attend_merge_bf16 [2, 1, 1]
            gemm_few_bf16_n16_m8 [2, 1, 1] 2 x 24 x 32
            norm_bf16 [2, 1, 1]
            gemm_few_bf16_n16_m8 [2, 1, 1] 2 x 32 x 24
            gemm_few_bf16_n16_m8 [2, 1, 1] 2 x 24 x 16
            norm_bf16 [2, 1, 1]
            gemm_few_bf16_n16_m8 [1, 1, 1] 2 x 11 x 24
            sample [2, 1, 1]
            download 384
            event"#]],
    );
}

/// What is on its way may still read what the host holds for it, so no step may follow.
#[test]
fn behind_a_step_that_was_enqueued_in_part_no_other_starts() {
    let mut world = World::new();
    let mut launch = |step: &StepInput| world.tiny.executable.launch(step, &mut |_, _| ()).map_err(|e| e.to_string());
    world.recording.refuse_launches(true);
    assert!(launch(&step(vec![join(1, &[5])], vec![rows(1, 0, 3, 1)])).is_err());
    world.recording.refuse_launches(false);
    let refused = launch(&step(vec![join(2, &[6])], vec![rows(2, 0, 3, 1)])).unwrap_err();
    assert!(refused.contains("enqueued in part"), "{refused}");
}
