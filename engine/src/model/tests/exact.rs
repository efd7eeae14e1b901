//! Bit-exactness: neither the division of a sequence into steps nor other sequences in the batch change any bit.

use super::{RAGGED, Rig, Rows, bits, numerics, random, tokens};
use crate::model::load::partitions;
use baton_kernels::cpu::{self, CpuConfig};
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::reference::ReferenceDevice;
use baton_types::Dtype;
use std::sync::Arc;

/// Three attention slabs of 64 positions, the last ragged.
const LENGTH: usize = 150;

/// Latents, and experts in groups beside one that all tokens use.
const LATENTS: &str = "random:hidden=274,layers=2,heads=6,head_dim=20,rope_dim=8,latent=40,query_rank=33,value_dim=14,ffn=40,vocab=131,\
                       context=256,seed=3,experts=6,used=2,sigmoid=true,groups=3,groups_used=2,shared=30,dense=1";

/// Recurrent layers, also the last one, beside gated attention of which a part is rotated.
const RECURRENT: &str = "random:hidden=90,layers=3,heads=6,kv_heads=2,head_dim=10,rope_dim=6,ffn=70,vocab=131,context=256,seed=3,qk_norm=heads,\
                         gate=true,delta=6,delta_keys=2,delta_key_dim=14,delta_dim=11,attention_every=2";

/// Logits of every row, and KV bytes or the last state of every layer, as bits.
#[derive(PartialEq)]
struct Outcome {
    logits: Vec<Vec<u32>>,
    kv: Vec<Vec<u8>>,
}

/// Runs sequence 0 in chunks that end at `ends`. With `company`, sequence 1 runs too, in steps of 3, before or after it in the batch.
fn run(rig: &mut Rig, ends: &[usize], company: bool) -> Outcome {
    let all = tokens(LENGTH);
    let mut logits = Vec::new();
    let (mut from, mut other) = (0, 0);
    for (step, &to) in ends.iter().enumerate() {
        let mut rows = vec![Rows { sequence: 0, from, to }];
        let mut first_row = 0;
        if company && other + 3 <= LENGTH {
            let beside = Rows { sequence: 1, from: other, to: other + 3 };
            let before = step % 2 == 0;
            rows.insert(if before { 0 } else { 1 }, beside);
            first_row = if before { 3 } else { 0 };
            other += 3;
        }
        let result = rig.step(&rows, &all);
        logits.extend((0..to - from).map(|i| bits(result.row(first_row + i))));
        from = to;
    }
    let layers = 0..rig.model.spec().layers.len();
    Outcome { logits, kv: layers.map(|layer| rig.pool.kv(0, layer, LENGTH)).collect() }
}

fn assert_same(outcome: &Outcome, expected: &Outcome, what: &str) {
    for (row, (ours, theirs)) in outcome.logits.iter().zip(&expected.logits).enumerate() {
        assert!(ours == theirs, "{what}: logits of position {row} differ");
    }
    assert!(outcome == expected, "{what}: KV bytes or the number of rows differ");
}

/// A plain model, one with windows, biases and head norms, one with a window and a rotary embedding in one of two layers, one with norms behind,
/// caps, factors and GELU, one with experts, one with latents, and one with recurrent layers, in each class with each type of KV.
/// In the classes of tensor cores, of which the reference takes long, one model each.
fn classes() -> Vec<(String, Numerics, Dtype)> {
    let rich = format!("{RAGGED},window=70,bias=true,qk_norm=heads");
    let mixed = format!("{RAGGED},window=70,full_every=2,nope_every=2");
    let scaled = format!("{RAGGED},window=70,full_every=2,norms=both,qk_norm=all,gelu=true,soft_cap=3,factor=0.8");
    let experts = format!("{RAGGED},experts=5,used=2,factor=0.8");
    let (latents, recurrent) = (LATENTS.to_owned(), RECURRENT.to_owned());
    let classes =
        [(numerics(Dtype::Bf16), Dtype::Bf16), (numerics(Dtype::F32), Dtype::F32), (Numerics::Bf16x32, Dtype::Bf16)];
    let with = |spec: &str| classes.map(|(numerics, kv)| (spec.to_owned(), numerics, kv));
    let mut all =
        [with(RAGGED), with(&rich), with(&mixed), with(&scaled), with(&experts), with(&latents), with(&recurrent)]
            .concat();
    let cores = [
        (rich, TensorCore::Tc16F25, Half::Bf16),
        (scaled, TensorCore::Tc8F24, Half::F16),
        (latents, TensorCore::Tc16F25, Half::Bf16),
        (recurrent, TensorCore::Tc16F25, Half::Bf16),
    ];
    all.extend(cores.map(|(spec, cores, half)| (spec, Numerics::TensorCore { cores, half }, half.dtype())));
    all
}

fn prefill_then_decode(prefill: usize) -> Vec<usize> {
    (prefill..=LENGTH).collect()
}

#[test]
fn chunks_blocks_and_company_change_no_bit() {
    for (spec, numerics, dtype) in classes() {
        // The reference, but where it takes long: `backends_agree` compares it with the other.
        let device: Arc<dyn Device> = match numerics {
            Numerics::TensorCore { .. } => cpu::device(CpuConfig { threads: 2, simd: None, numerics }).unwrap(),
            _ => ReferenceDevice::new(numerics),
        };
        let rig = |block_tokens| Rig::new(&random(&spec), &*device, dtype, block_tokens);
        let whole = run(&mut rig(16), &[LENGTH], false);
        assert!(whole.kv.iter().flatten().any(|&b| b != super::NEVER_STORED));
        for (block_tokens, ends, company) in [
            (64, vec![LENGTH], false),
            (16, prefill_then_decode(LENGTH - 9), false),
            (32, prefill_then_decode(LENGTH - 9), true),
            (64, vec![1, 17, 64, 65, 129, LENGTH], true),
            (16, (7..LENGTH).step_by(13).chain([LENGTH]).collect(), true),
        ] {
            let outcome = run(&mut rig(block_tokens), &ends, company);
            let what = format!("{spec}, {numerics}, {dtype}, blocks of {block_tokens}, company {company}, {ends:?}");
            assert_same(&outcome, &whole, &what);
        }
    }
}

#[test]
fn backends_agree() {
    for (spec, numerics, dtype) in classes() {
        let source = random(&spec);
        let cpu = |threads| cpu::device(CpuConfig { threads, simd: None, numerics }).unwrap();
        let lagging = || Lagging::new(cpu(1), LagConfig::default());
        let truth = run(&mut Rig::new(&source, &*ReferenceDevice::new(numerics), dtype, 16), &[LENGTH], false);
        for (device, ends) in [
            (cpu(1), vec![LENGTH]),
            (cpu(2), prefill_then_decode(60)),
            (cpu(3), vec![100, LENGTH]),
            (lagging(), vec![64, 100, 149, LENGTH]),
        ] {
            let name = device.info().name;
            let outcome = run(&mut Rig::new(&source, &*device, dtype, 32), &ends, true);
            assert_same(&outcome, &truth, &format!("{spec}, {numerics}, {dtype} on {name}"));
        }
    }
}

/// A comparison of bits proves nothing if different inputs give equal bits.
#[test]
fn different_tokens_and_precisions_change_bits() {
    let whole = run(&mut Rig::reference(RAGGED, Dtype::Bf16, 16), &[LENGTH], false);
    assert!(whole != run(&mut Rig::reference(RAGGED, Dtype::F32, 16), &[LENGTH], false));
    let mut rig = Rig::reference(RAGGED, Dtype::Bf16, 16);
    let mut all = tokens(LENGTH);
    all[3] = (all[3] + 1) % 131;
    let changed = rig.step(&[Rows { sequence: 0, from: 0, to: LENGTH }], &all);
    let same: Vec<bool> = (0..LENGTH).map(|row| bits(changed.row(row)) == whole.logits[row]).collect();
    assert_eq!(same.iter().position(|&s| !s), Some(3), "causality: earlier rows stay");
    assert!(same[3..].iter().all(|&s| !s), "every later row sees the change");
}

#[test]
fn wanting_fewer_logits_changes_none_of_them() {
    let mut rig = Rig::reference(RAGGED, Dtype::Bf16, 16);
    let all = tokens(40);
    let rows = [Rows { sequence: 0, from: 0, to: 30 }, Rows { sequence: 1, from: 0, to: 10 }];
    let every = rig.step(&rows, &all);
    let kv = |rig: &Rig| [rig.pool.kv(0, 1, 30), rig.pool.kv(1, 1, 10)];
    let full_kv = kv(&rig);
    for wanted in [vec![], vec![39], vec![29, 0, 39, 29]] {
        let mut rig = Rig::reference(RAGGED, Dtype::Bf16, 16);
        let mut batch = rig.batch(&rows, &all);
        batch.logit_rows = wanted.clone();
        let logits = rig.run(&batch, &mut |_, _| ()).unwrap();
        assert_eq!(logits.rows(), wanted.len());
        for (i, &row) in wanted.iter().enumerate() {
            assert_eq!(bits(logits.row(i)), bits(every.row(row)), "row {row} of {wanted:?}");
        }
        assert!(kv(&rig) == full_kv, "KV with {wanted:?}");
    }
}

#[test]
fn partitions_are_powers_of_two_that_divide() {
    for (extent, parts) in [(1, 1), (2, 2), (3, 1), (6, 2), (8, 8), (12, 4), (24, 8), (1536, 8), (14336, 8)] {
        assert_eq!(partitions(Numerics::default(), extent), parts, "{extent}");
    }
}
