//! The gated delta rule, its convolution and its gates in the canonical order.

use crate::host::{DeltaHeads, DeltaOf, DeltaRows, KvStep};
use crate::kv::KvBinding;
use crate::numerics::{self, silu};
use crate::step::StepSegment;
use baton_types::BlockId;

/// Reads a plane of a state: `len` elements.
fn load(kv: &KvBinding, layer: usize, plane: usize, block: BlockId, len: usize) -> Vec<f32> {
    let mut bytes = vec![0; len * 4];
    kv.memory.copy_out(kv.offset(layer, plane, block, 0), &mut bytes);
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn store(kv: &KvBinding, layer: usize, plane: usize, block: BlockId, data: &[f32]) {
    let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
    kv.memory.copy_in(kv.offset(layer, plane, block, 0), &bytes);
}

/// What a plane has before a segment.
fn before(step: KvStep<'_>, plane: usize, segment: &StepSegment, len: usize) -> Vec<f32> {
    match segment.states().0 {
        Some(block) => load(step.kv, step.layer, plane, block, len),
        None => vec![0.0; len],
    }
}

/// The causal convolution of all channels of three parts, and SiLU, in place. `taps` is `[taps, channels]`.
pub(crate) fn convolve(step: KvStep<'_>, taps: &[f32], x: [&mut [f32]; 3]) {
    let rows = step.rows();
    let columns = x.each_ref().map(|part| part.len() / rows);
    let channels: usize = columns.iter().sum();
    let (plane, inputs) = (step.kv.planes()[0], taps.len() / channels - 1);
    let mut first_row = 0;
    // One row after another.
    let mut x = x;
    for segment in step.segments {
        let mut kept = before(step, plane, segment, inputs * channels);
        for row in first_row..first_row + segment.rows {
            let mut channel = 0;
            for (part, columns) in x.iter_mut().zip(columns) {
                for x in &mut part[row * columns..(row + 1) * columns] {
                    kept.push(*x);
                    let mut acc = 0.0f32;
                    for tap in 0..=inputs {
                        acc = kept[tap * channels + channel].mul_add(taps[tap * channels + channel], acc);
                    }
                    *x = silu(acc);
                    channel += 1;
                }
            }
            kept.drain(..channels);
        }
        store(step.kv, step.layer, plane, segment.states().1, &kept);
        first_row += segment.rows;
    }
}

/// Decay and beta of each row and value head, in place of their products.
pub(crate) fn decays(op: &DeltaOf<'_>, decay: &mut [f32], beta: &mut [f32]) {
    for row in decay.chunks_exact_mut(op.rates.len()) {
        for ((a, rate), bias) in row.iter_mut().zip(op.rates).zip(op.decay_bias) {
            *a = numerics::decay(*a, *rate, *bias);
        }
    }
    beta.iter_mut().for_each(|b| *b = numerics::sigmoid(*b));
}

/// The recurrence of each value head, row after row.
pub(crate) fn delta_rule(step: KvStep<'_>, heads: DeltaHeads, rows: DeltaRows<'_>, out: &mut [f32]) {
    let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = heads;
    let (plane, size) = (step.kv.planes()[1], key_dim * value_dim);
    let mut first_row = 0;
    for segment in step.segments {
        let mut states = before(step, plane, segment, value_heads * size);
        for row in first_row..first_row + segment.rows {
            for (head, state) in states.chunks_exact_mut(size).enumerate() {
                let key_head = row * key_heads + head / (value_heads / key_heads);
                let (q, k) = (&rows.query[key_head * key_dim..][..key_dim], &rows.key[key_head * key_dim..][..key_dim]);
                let at = row * value_heads + head;
                let values = at * value_dim..(at + 1) * value_dim;
                update(state, q, k, &rows.value[values.clone()], rows.decay[at], rows.beta[at], &mut out[values]);
            }
        }
        store(step.kv, step.layer, plane, segment.states().1, &states);
        first_row += segment.rows;
    }
}

/// One row of one head: `state` is `[key_dim, value_dim]`.
pub(crate) fn update(state: &mut [f32], q: &[f32], k: &[f32], v: &[f32], decay: f32, beta: f32, out: &mut [f32]) {
    let columns = v.len();
    state.iter_mut().for_each(|s| *s *= decay);
    for j in 0..columns {
        let mut m = 0.0f32;
        for (i, k) in k.iter().enumerate() {
            m = k.mul_add(state[i * columns + j], m);
        }
        let u = beta * (v[j] - m);
        let mut o = 0.0f32;
        for (i, (k, q)) in k.iter().zip(q).enumerate() {
            let s = &mut state[i * columns + j];
            *s = k.mul_add(u, *s);
            o = q.mul_add(*s, o);
        }
        out[j] = o;
    }
}
