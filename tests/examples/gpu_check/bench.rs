//! Times of steps and of kernels. `roofs.py` has what they are compared with, in the same run.

use crate::decoder::{Decoder, Shape};
use crate::{Where, write};
use anyhow::Context;
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::cuda::check::{AttentionShape, How, Target};
use baton_kernels::device::Bounds;
use baton_kernels::numerics::Half;
use baton_kernels::step::{Delta, Join, RowId, SlotRows, StepInput};
use baton_memory::{PoolMemory, Rows};
use baton_types::{BlockId, BlockTables, Fence, FenceStatus, GroupBlocks, SamplingParams};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

/// By when everything has ended that a measurement waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tokens of a KV block.
const BLOCK: usize = 64;

/// Sizes of what is measured.
struct Sizes {
    shape: Shape,
    /// Batch and context of decoded rows.
    decode: Vec<(usize, usize)>,
    steps: usize,
    prompt: usize,
    chunk: usize,
    /// Rows of products with each matrix.
    rows: Vec<usize>,
}

impl Sizes {
    fn new(on: &Where) -> Self {
        if on.is_recorded() {
            let (decode, rows) = (vec![(1, 20), (2, 20)], vec![1, 3]);
            return Self { shape: Shape::TINY, decode, steps: 2, prompt: 64, chunk: 32, rows };
        }
        let (decode, rows) = (vec![(1, 4096), (64, 4096)], vec![1, 8, 16, 32, 64, 256, 2048]);
        let steps = if on.quick { 20 } else { 100 };
        Self { shape: Shape::LLAMA_3_8B, decode, steps, prompt: 8192, chunk: 2048, rows }
    }

    /// `[n, k]` of a layer's matrices.
    fn matrices(&self) -> [(&'static str, usize, usize); 4] {
        let Shape { hidden, heads, kv_heads, head_dim, ffn, .. } = self.shape;
        [
            ("qkv", (heads + 2 * kv_heads) * head_dim, hidden),
            ("out", hidden, heads * head_dim),
            ("gate_up", 2 * ffn, hidden),
            ("down", hidden, ffn),
        ]
    }
}

pub(crate) fn run(on: &Where, out: &Path) -> anyhow::Result<()> {
    let sizes = Sizes::new(on);
    let target = Target::open(&on.under(Half::Bf16)?, How::Plain)?;
    let Shape { heads, kv_heads, head_dim, .. } = sizes.shape;
    let attention = AttentionShape { heads, kv_heads, head_dim, block_tokens: BLOCK };
    let mut gemm = Vec::new();
    for (name, n, k) in sizes.matrices() {
        for &m in &sizes.rows {
            let seconds = target.gemm(m, n, k)?;
            gemm.push(json!({"matrix": name, "m": m, "n": n, "k": k, "seconds": seconds}));
        }
    }
    println!("bench: products");
    let mut attend = Vec::new();
    for &(rows, context) in &sizes.decode {
        let seconds = target.attend_decode(attention, rows, context)?;
        let bytes = rows * context * 2 * kv_heads * head_dim * 2;
        attend.push(json!({"of": "decode", "rows": rows, "context": context, "seconds": seconds, "bytes": bytes}));
    }
    let seconds = target.attend_prefill(attention, sizes.prompt, 0)?;
    attend.push(json!({"of": "prefill", "rows": sizes.prompt, "context": 0, "seconds": seconds}));
    println!("bench: attention");
    let (mut decode, prefill) = (Vec::new(), prompt(&target, &sizes)?);
    println!("bench: prefill");
    for &(rows, context) in &sizes.decode {
        decode.push(steps(&target, &sizes, rows, context)?);
        println!("bench: decode of {rows} rows");
    }
    let outcome = json!({
        "gpu": target.gpu().name,
        "recorded": on.is_recorded(),
        "shape": {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
        "gemm": gemm,
        "attention": attend,
        "decode": decode,
        "prefill": prefill,
    });
    write(on, out, "bench", outcome, &[])
}

fn decoder(target: &Target, sizes: &Sizes, rows: usize, slots: usize, tokens: usize) -> anyhow::Result<Decoder> {
    let adapters = AdapterBounds { slots_max: 0, rank_max: 0 };
    let bounds = Bounds { rows_max: rows, logit_rows_max: slots, slots_max: slots, positions_max: tokens, adapters };
    let blocks = slots * tokens.div_ceil(BLOCK);
    let decoder = Decoder::new(&*target.device()?, sizes.shape, BLOCK as u32, blocks as u32, bounds)?;
    // Numbers, not zeros: a GPU draws more power with them, and is slower.
    let piece: Vec<u8> = (0..1 << 20).flat_map(|i: u32| [(i * 37 % 251) as u8, 0x3c ^ (i % 2) as u8]).collect();
    let mut at = 0;
    while at < decoder.map.bytes() {
        let len = piece.len().min(decoder.map.bytes() - at);
        decoder.pool.write_by(Instant::now() + PATIENCE, at, &piece[..len]).context("the KV pool")?;
        at += len;
    }
    Ok(decoder)
}

/// A slot that has so many tokens, and blocks for `room` ones.
fn join(slot: usize, tokens: usize, room: usize) -> Delta {
    let each = room.div_ceil(BLOCK);
    let blocks = (slot * each..(slot + 1) * each).map(|block| BlockId(block as u32)).collect();
    let tables = BlockTables::from_start(GroupBlocks(vec![blocks]));
    let sampling = SamplingParams { temperature: 1.0, top_p: 0.95, ..SamplingParams::default() };
    let tokens = vec![1; tokens];
    Delta::Join(Box::new(Join { slot, tables, prompt_len: tokens.len(), tokens, sampling, ..Join::default() }))
}

/// Decoded rows behind so many tokens, each step launched before the one before has ended.
fn steps(target: &Target, sizes: &Sizes, rows: usize, context: usize) -> anyhow::Result<Value> {
    let tokens = (context + 2 * sizes.steps + 8).next_multiple_of(BLOCK);
    let mut decoder = decoder(target, sizes, rows.max(1), rows, tokens)?;
    let step = |position: usize, id: RowId, deltas: Vec<Delta>| StepInput {
        deltas,
        ids: vec![id; rows],
        segments: (0..rows).map(|slot| SlotRows { slot, position, rows: 1, samples: 1, masks: Vec::new() }).collect(),
        ..StepInput::default()
    };
    let executable = &mut decoder.executable;
    let joins = (0..rows).map(|slot| join(slot, context + 1, tokens)).collect();
    executable.launch(&step(context, RowId::Token(1), joins), &mut |_, _| ())?;
    // The first rounds make the graph, and load it.
    let mut launching = Duration::ZERO;
    let mut began = Instant::now();
    for (i, position) in (context + 1..).take(2 * sizes.steps).enumerate() {
        if i == sizes.steps {
            (began, launching) = (Instant::now(), Duration::ZERO);
        }
        let launched = Instant::now();
        executable.launch(&step(position, RowId::LastSampled, Vec::new()), &mut |_, _| ())?;
        launching += launched.elapsed();
        executable.finish()?;
    }
    let took = began.elapsed().as_secs_f64() / sizes.steps as f64;
    executable.finish()?;
    // The step's graph alone, again and again: what the GPU takes without a host between.
    let alone = target.replayed(sizes.steps as u32)?;
    Ok(json!({
        "rows": rows,
        "context": context,
        "seconds": took,
        "graph_seconds": alone,
        "launch_seconds": launching.as_secs_f64() / sizes.steps as f64,
        "bytes": sizes.shape.bytes_of_step(rows, context),
    }))
}

/// A whole prompt in chunks, and once more while each layer's KV is read as soon as it is stored.
fn prompt(target: &Target, sizes: &Sizes) -> anyhow::Result<Value> {
    let mut decoder = decoder(target, sizes, sizes.chunk, 1, sizes.prompt + BLOCK)?;
    let joins = || join(0, sizes.prompt, sizes.prompt + BLOCK);
    // The first run loads the kernels.
    chunks(&mut decoder, sizes, vec![joins()], false)?;
    let again = || vec![Delta::Leave { slot: 0 }, joins()];
    let (seconds, _) = chunks(&mut decoder, sizes, again(), false)?;
    let (moving, behind) = chunks(&mut decoder, sizes, again(), true)?;
    let attended = (sizes.prompt as f64 + 1.0) / 2.0;
    let flops = sizes.prompt as f64 * (sizes.shape.flops_of_row() + sizes.shape.flops_of_attention(attended));
    Ok(json!({
        "tokens": sizes.prompt,
        "chunk": sizes.chunk,
        "seconds": seconds,
        "flops": flops,
        "seconds_while_kv_is_read": moving,
        "kv_read_behind_seconds": behind,
        "kv_bytes": sizes.prompt * sizes.shape.kv_bytes_of_token(),
    }))
}

/// Seconds of all chunks, and from their end to that of the last read.
fn chunks(decoder: &mut Decoder, sizes: &Sizes, deltas: Vec<Delta>, reads: bool) -> anyhow::Result<(f64, f64)> {
    let (began, mut deltas, mut moved) = (Instant::now(), deltas, Reads::default());
    for position in (0..sizes.prompt).step_by(sizes.chunk) {
        let last = position + sizes.chunk == sizes.prompt;
        let rows = sizes.chunk;
        let segments = vec![SlotRows { slot: 0, position, rows, samples: usize::from(last), masks: Vec::new() }];
        let ids = (0..rows).map(|i| RowId::Token((position + i) as u32 % sizes.shape.vocab as u32)).collect();
        let observed = if reads { 0..sizes.shape.layers } else { 0..0 };
        let step = StepInput { deltas: std::mem::take(&mut deltas), ids, segments, observed, ..StepInput::default() };
        let mut fences: VecDeque<(u32, Fence)> = VecDeque::new();
        decoder.executable.launch(&step, &mut |layer, fence| fences.push_back((layer, fence.clone())))?;
        let blocks = position / BLOCK..(position + rows).div_ceil(BLOCK);
        while let Some((layer, fence)) = fences.pop_front() {
            while fence.poll() == FenceStatus::Pending {
                std::hint::spin_loop();
            }
            for block in blocks.clone() {
                for plane in 0..2 {
                    let range =
                        decoder.map.token_range(0, layer as usize, BlockId(block as u32), plane, 0..BLOCK as u32);
                    moved.read(&*decoder.pool, Rows::run(range.start, range.len()))?;
                }
            }
        }
        decoder.executable.finish()?;
    }
    let computed = began.elapsed();
    moved.end()?;
    Ok((computed.as_secs_f64(), (began.elapsed() - computed).as_secs_f64()))
}

/// Reads of the pool that run.
#[derive(Default)]
struct Reads {
    running: VecDeque<baton_memory::Pending<Vec<u8>>>,
    buffers: Vec<Vec<u8>>,
}

impl Reads {
    /// Begins one; waits for the oldest where there is no room.
    fn read(&mut self, pool: &dyn PoolMemory, rows: Rows) -> anyhow::Result<()> {
        let mut buffer = self.buffers.pop().unwrap_or_default();
        loop {
            buffer.clear();
            match pool.try_read(rows, buffer) {
                Ok(pending) => {
                    self.running.push_back(pending);
                    return Ok(());
                }
                Err(no_room) => buffer = no_room.buffer,
            }
            let oldest = self.running.pop_front().context("the pool's operations are all taken")?;
            self.buffers.push(oldest.wait(Instant::now() + PATIENCE)?);
        }
    }

    fn end(&mut self) -> anyhow::Result<()> {
        while let Some(pending) = self.running.pop_front() {
            self.buffers.push(pending.wait(Instant::now() + PATIENCE)?);
        }
        Ok(())
    }
}
