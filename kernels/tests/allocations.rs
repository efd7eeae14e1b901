//! A warm step allocates nothing on any thread: neither a chunk of a prompt nor rows of decode, in any class. Only what a step yields is
//! allocated, since it is given away. Sequences that join a slot, and longer block tables, allocate before the step.

mod common;

use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::Executable;
use baton_kernels::numerics::Numerics;
use baton_kernels::sampling::{SampleError, Sampled};
use baton_kernels::step::{Delta, Join, RowId, SlotOutput, SlotRows, StepInput, StepOutput};
use baton_types::{BlockId, BlockTables, Dtype, GroupBlocks, SamplingParams};
use common::recurrent::Model;
use common::tiny::Tiny;
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Prompt tokens of each sequence.
const PROMPT: usize = 9;

/// Consecutive steps that must allocate nothing. A thread allocates when it first has work of a size, so the first of them may come late.
const QUIET: usize = 6;

/// Most steps that sample: positions are bounded.
const SAMPLING_STEPS: usize = 30;

fn join(slot: usize) -> Delta {
    let blocks = (0..3).map(|block| BlockId((slot * 3 + block) as u32)).collect();
    let tables = BlockTables::from_start(GroupBlocks(vec![blocks]));
    let sampling = SamplingParams { temperature: 0.9 * slot as f32, top_p: 0.9, ..SamplingParams::default() };
    let tokens = (0..PROMPT as u32).collect();
    Delta::Join(Box::new(Join { slot, tables, tokens, prompt_len: PROMPT, sampling, ..Join::default() }))
}

fn step(segments: Vec<SlotRows>, id: RowId) -> StepInput {
    let rows = segments.iter().map(|segment| segment.rows).sum();
    StepInput { ids: vec![id; rows], segments, ..StepInput::default() }
}

fn rows(slot: usize, position: usize, rows: usize, samples: usize) -> SlotRows {
    SlotRows { slot, position, rows, samples, ..SlotRows::default() }
}

/// Bytes that a step gives away.
fn given(output: &StepOutput) -> usize {
    let rows: usize = output.sampled.iter().map(|slot| slot.rows.capacity()).sum();
    output.sampled.capacity() * size_of::<SlotOutput>() + rows * size_of::<Result<Sampled, SampleError>>()
}

/// Whether some consecutive steps of at most `steps` allocate nothing but what they give away.
fn becomes_quiet(executable: &mut dyn Executable, steps: usize, make: impl Fn(usize) -> StepInput) -> bool {
    let mut quiet = 0;
    for index in 0..steps {
        let step = make(index);
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        executable.launch(&step, &mut |_, _| ()).unwrap();
        let output = executable.finish().unwrap();
        let allocated = MEMORY.peak_usage() - before;
        quiet = if allocated <= given(&output) { quiet + 1 } else { 0 };
        if quiet == QUIET {
            return true;
        }
    }
    false
}

#[test]
fn a_warm_step_allocates_nothing() {
    // In turn, since all allocations of the process count.
    steps_with_states();
    for numerics in [Numerics::F32Fma { weights: Dtype::Bf16 }, Numerics::Bf16x32, Numerics::I8x32] {
        for threads in [1, 3] {
            let device = CpuDevice::new(CpuConfig { threads, simd: None, numerics }).unwrap();
            let mut tiny = Tiny::new(&*device, true);
            let executable = &mut *tiny.executable;
            // All of a slot's prompt, and the first step that samples.
            let mut first = step(vec![rows(0, 0, PROMPT, 1), rows(1, 0, PROMPT, 0)], RowId::Token(1));
            first.deltas = vec![join(0), join(1)];
            executable.launch(&first, &mut |_, _| ()).unwrap();
            executable.finish().unwrap();

            let of = |what: &str| format!("{what} allocates: {numerics} on {threads} threads");
            let chunk = |_| step(vec![rows(1, 4, 20, 0)], RowId::Token(2));
            assert!(becomes_quiet(executable, 1000, chunk), "{}", of("a chunk of a prompt"));
            let several = |_| step(vec![rows(0, PROMPT, 1, 0), rows(1, PROMPT, 2, 0)], RowId::Token(3));
            assert!(becomes_quiet(executable, 1000, several), "{}", of("rows of two slots"));
            let decode = |index| step(vec![rows(0, PROMPT + index, 1, 1)], RowId::LastSampled);
            assert!(becomes_quiet(executable, SAMPLING_STEPS, decode), "{}", of("a row that takes the best token"));
            let drawn = |index| step(vec![rows(1, PROMPT - 1 + index, 1, 1)], RowId::Token(3));
            assert!(becomes_quiet(executable, SAMPLING_STEPS, drawn), "{}", of("a row that draws a token"));
        }
    }
}

/// With recurrent layers, whose states stay in place.
fn steps_with_states() {
    for (numerics, threads) in [(Numerics::default(), 1), (Numerics::Bf16x32, 3), (Numerics::I8x32, 1)] {
        let device = CpuDevice::new(CpuConfig { threads, simd: None, numerics }).unwrap();
        let mut model = Model::new(&*device, 1);
        let join = |slot: usize| {
            let positions = (0..3).map(|block| BlockId((slot * 3 + block) as u32)).collect();
            let tables = BlockTables::from_start(GroupBlocks(vec![positions, vec![BlockId(slot as u32)]]));
            Delta::Join(Box::new(Join { slot, tables, ..Join::default() }))
        };
        let mut first = step(vec![rows(0, 0, PROMPT, 0), rows(1, 0, PROMPT, 0)], RowId::Token(1));
        first.deltas = vec![join(0), join(1)];
        model.launch(&first).unwrap();
        model.finish();

        let executable = &mut *model.executable;
        let of = |what: &str| format!("{what} allocates: {numerics} on {threads} threads");
        let chunk = |_| step(vec![rows(1, 4, 12, 0)], RowId::Token(2));
        assert!(becomes_quiet(executable, 1000, chunk), "{}", of("a chunk of a prompt"));
        let several = |_| step(vec![rows(0, PROMPT, 1, 0), rows(1, PROMPT, 2, 0)], RowId::Token(3));
        assert!(becomes_quiet(executable, 1000, several), "{}", of("rows of two slots"));
    }
}
