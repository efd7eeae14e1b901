//! Every backend has the bits of the reference; no result depends on batch, chunking, threads, block size; and the seeded mutants
//! prove that these tests would notice.

mod common;

use baton_kernels::cpu::SimdLevel;
use baton_kernels::host::Store;
use baton_kernels::mutant::{Mutant, MutantKind};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::program::Activation;
use baton_kernels::quantize::quantize;
use baton_kernels::storage::StorageFormat;
use baton_types::Dtype;
use common::{Chunk, Kernels, Layer, Random, Shape, cpu, levels, reference};
use proptest::prelude::*;

const F32: [StorageFormat; 2] = [StorageFormat::F32; 2];

/// Class, formats of the matrices and element of KV.
fn classes() -> impl Strategy<Value = (Numerics, [StorageFormat; 2], Dtype)> {
    use StorageFormat::{F32 as Floats, Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0};
    let dtype = || prop::sample::select(vec![Dtype::Bf16, Dtype::F32, Dtype::F16]);
    let quantized = [[Q4_1, Q8_0], [Q8_0, Q4_0], [Q4_0, Q4_1], [Q4_1, Floats], [Q6K, Q4K], [Q4K, Q5K]];
    // Super-blocks make layers wide: the scalar takes long, and products of them are compared in a test of their own.
    let narrow = prop::sample::select(quantized[..4].to_vec());
    prop_oneof![
        (dtype(), dtype()).prop_map(|(weights, kv)| (Numerics::F32Fma { weights }, F32, kv)),
        Just((Numerics::Bf16x32, F32, Dtype::Bf16)),
        narrow.clone().prop_map(|formats| (Numerics::Bf16x32, formats, Dtype::Bf16)),
        prop::sample::select(quantized.to_vec()).prop_map(|formats| (Numerics::I8x32, formats, Dtype::Bf16)),
        tensor_cores().prop_map(|(class, kv)| (class, F32, kv)),
        (tensor_cores(), narrow).prop_map(|((class, kv), formats)| (class, formats, kv)),
    ]
}

/// Class and element of KV.
fn tensor_cores() -> impl Strategy<Value = (Numerics, Dtype)> {
    let cores = prop::sample::select(vec![TensorCore::Tc16F25, TensorCore::Tc8F24]);
    let half = prop::sample::select(vec![Half::Bf16, Half::F16]);
    (cores, half).prop_map(|(cores, half)| (Numerics::TensorCore { cores, half }, half.dtype()))
}

/// Dimensions are multiples of no tile; hidden and the larger contexts span three slabs and a ragged end. Where matrices are quantized,
/// hidden is whole blocks, and the others if they are not ragged.
fn shapes() -> impl Strategy<Value = Shape> {
    let sizes = (515usize..640, 1usize..=3, 1usize..=4, 3usize..=12, 5usize..=150, 20usize..90);
    // Within one slab, over the end of one, and over more than one.
    let windows = prop::sample::select(vec![None, None, Some(1), Some(30), Some(64), Some(100)]);
    (sizes, classes(), any::<(bool, bool)>(), windows, any::<u64>()).prop_map(
        |(sizes, (numerics, formats, kv), (partial, ragged), window, seed)| {
            let (hidden, kv_heads, group, half_dim, ffn, vocab) = sizes;
            let block = formats.map(|format| format.block().0).into_iter().max().unwrap_or(1);
            let (wide, narrow) = if ragged { (1, 1) } else { (block, block.min(32)) };
            let head_dim = (2 * half_dim).next_multiple_of(narrow);
            let rope_dim = if partial { head_dim - 2 } else { head_dim };
            // No slabs, and products of which the scalar takes long.
            let hidden = if let Numerics::TensorCore { .. } = numerics { hidden / 6 } else { hidden };
            let (hidden, ffn) = (hidden.next_multiple_of(block), ffn.next_multiple_of(wide));
            // Around the scores, which are mostly small.
            let soft_cap = (seed % 3 == 0).then_some(0.5);
            let activation = if seed % 2 == 0 { Activation::Silu } else { Activation::GeluTanh };
            Shape {
                hidden,
                kv_heads,
                group,
                head_dim,
                rope_dim,
                ffn,
                vocab,
                window,
                soft_cap,
                activation,
                numerics,
                formats,
                kv,
                seed,
            }
        },
    )
}

/// Two sequences: a long one in an odd chunk, and one of a few rows that joins in the middle.
fn batches() -> impl Strategy<Value = [Vec<Chunk>; 2]> {
    (130usize..200, 1usize..=33, 1usize..=7, 0usize..70).prop_map(|(context, rows, few, other)| {
        let chunk = |sequence, position, rows| Chunk { sequence, position, rows };
        let mut first = vec![chunk(0, 0, context)];
        first.extend((other > 0).then_some(chunk(1, 0, other)));
        [first, vec![chunk(1, other, few), chunk(0, context, rows)]]
    })
}

fn block_sizes() -> impl Strategy<Value = usize> {
    prop::sample::select(vec![16usize, 32, 64, 128])
}

type Result = (Vec<Vec<Vec<u32>>>, Vec<Vec<u8>>);

/// All bits of both steps and of the KV they leave.
fn run(ops: Box<dyn Kernels>, shape: Shape, block: usize, steps: &[Vec<Chunk>]) -> Result {
    let layer = Layer::new(ops, shape, block, 2);
    let rows = steps.iter().map(|step| layer.step(step)).collect();
    let ends = |sequence| {
        let of = |c: &&Chunk| c.sequence == sequence;
        steps.iter().flatten().filter(of).map(|c| c.position + c.rows).max().unwrap_or(0)
    };
    (rows, (0..2).map(|s| layer.kv_bytes(s, ends(s))).collect())
}

fn no_nan(result: &Result) -> bool {
    result.0.iter().flatten().flatten().all(|&bits| !f32::from_bits(bits).is_nan())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

    #[test]
    fn backends_equal_the_reference(shape in shapes(), steps in batches(), block in block_sizes(), threads in 1usize..=3) {
        let want = run(reference(shape.numerics), shape, block, &steps);
        prop_assert!(no_nan(&want));
        let each = levels().iter().map(|level| (*level, threads));
        for (level, threads) in each.chain([(SimdLevel::detect().unwrap(), 4 - threads)]) {
            let equal = run(cpu(threads, level, shape.numerics).unwrap(), shape, block, &steps) == want;
            prop_assert!(equal, "{level:?} with {threads} threads differs");
        }
    }

    #[test]
    fn a_row_is_the_same_in_any_company(shape in shapes(), steps in batches(), blocks in (block_sizes(), block_sizes())) {
        let fast = |threads| cpu(threads, SimdLevel::detect().unwrap(), shape.numerics).unwrap();
        let (rows, kv) = run(fast(2), shape, blocks.0, &steps);
        prop_assert_eq!(&(rows.clone(), kv.clone()), &run(fast(1), shape, blocks.1, &steps));
        let alone = one_by_one(fast(1), shape, blocks.1, &steps);
        prop_assert!(alone == (rows.into_iter().flatten().collect(), kv), "rows alone differ from rows in a batch");
    }
}

/// The same rows, each in a step of its own (prefill of n as n decode steps), in the order of `run`.
fn one_by_one(
    ops: Box<dyn Kernels>,
    shape: Shape,
    block: usize,
    steps: &[Vec<Chunk>],
) -> (Vec<Vec<u32>>, Vec<Vec<u8>>) {
    let single = |c: &Chunk| {
        let c = *c;
        (0..c.rows).map(move |r| vec![Chunk { position: c.position + r, rows: 1, ..c }])
    };
    let singles: Vec<Vec<Chunk>> = steps.iter().flatten().flat_map(single).collect();
    let (rows, kv) = run(ops, shape, block, &singles);
    (rows.into_iter().flatten().collect(), kv)
}

const SMALL: Shape = Shape {
    hidden: 601,
    kv_heads: 1,
    group: 2,
    head_dim: 10,
    rope_dim: 10,
    ffn: 22,
    vocab: 40,
    window: None,
    soft_cap: None,
    activation: Activation::Silu,
    numerics: Numerics::F32Fma { weights: Dtype::F32 },
    formats: F32,
    kv: Dtype::F32,
    seed: 7,
};

/// [`SMALL`] in each class; of the matrices in `i8x32`, only attention output is not quantized.
const SMALLS: [Shape; 5] = [
    SMALL,
    Shape { numerics: Numerics::Bf16x32, kv: Dtype::Bf16, ..SMALL },
    Shape {
        hidden: 608,
        ffn: 32,
        numerics: Numerics::I8x32,
        formats: [StorageFormat::Q4_1, StorageFormat::Q8_0],
        kv: Dtype::Bf16,
        ..SMALL
    },
    Shape {
        hidden: 201,
        numerics: Numerics::TensorCore { cores: TensorCore::Tc16F25, half: Half::Bf16 },
        kv: Dtype::Bf16,
        ..SMALL
    },
    Shape {
        hidden: 201,
        numerics: Numerics::TensorCore { cores: TensorCore::Tc8F24, half: Half::F16 },
        kv: Dtype::F16,
        ..SMALL
    },
];

/// A chunk of 33 rows after 130: three attention slabs, and a chunk start that is no multiple of a slab.
fn two_chunks() -> [Vec<Chunk>; 2] {
    let chunk = |position, rows| vec![Chunk { sequence: 0, position, rows }];
    [chunk(0, 130), chunk(130, 33)]
}

#[test]
fn the_mutants_are_caught() {
    SMALLS.into_iter().for_each(mutants_are_caught);
}

fn mutants_are_caught(shape: Shape) {
    let class = shape.numerics;
    let whole = [vec![Chunk { sequence: 0, position: 0, rows: 163 }]];
    let flat = |(rows, kv): Result| (rows.into_iter().flatten().collect::<Vec<_>>(), kv);
    let rechunked = |make: &dyn Fn() -> Box<dyn Kernels>| {
        flat(run(make(), shape, 16, &two_chunks())) == flat(run(make(), shape, 16, &whole))
    };
    let alone = |make: &dyn Fn() -> Box<dyn Kernels>| {
        flat(run(make(), shape, 16, &two_chunks())) == one_by_one(make(), shape, 16, &two_chunks())
    };
    let threads = |make: &dyn Fn(usize) -> Box<dyn Kernels>| {
        run(make(1), shape, 16, &two_chunks()) == run(make(2), shape, 16, &two_chunks())
    };
    let fast = |threads| cpu(threads, SimdLevel::detect().unwrap(), class).unwrap();
    let mutant = |kind| -> Box<dyn Kernels> { Box::new(Mutant::kernels(kind, class)) };
    // The properties hold for what is right ...
    assert!(rechunked(&|| fast(2)) && alone(&|| fast(2)) && threads(&fast), "{class}");
    // ... and each mutant breaks the one that it is about.
    assert!(!alone(&|| mutant(MutantKind::RowCount)), "{class}: reductions that depend on M pass");
    assert!(!rechunked(&|| mutant(MutantKind::ChunkStart)), "{class}: reductions that depend on the chunk start pass");
    let by_threads = |threads| mutant(MutantKind::ThreadCount { threads });
    assert!(!threads(&by_threads), "{class}: reductions that depend on threads pass");
}

/// Bits of `[rows, n]`, products over a K in so many partitions.
fn split_linear(kernels: &dyn Kernels, partitions: usize, k: usize, rows: usize) -> Vec<u32> {
    let (mut random, n) = (Random(k as u64), 37);
    let weight = kernels.pack(n, k, &random.floats(n * k, 0.2));
    let mut data = vec![0.0; rows * n];
    kernels.linear(&random.floats(rows * k, 1.0), &weight, partitions, Store::Set, &mut data);
    data.into_iter().map(f32::to_bits).collect()
}

#[test]
fn partitions_of_several_slabs_have_the_bits_of_the_reference() {
    // Two full slabs a partition, and a ragged third.
    for (partitions, k) in [(4, 4 * 551), (8, 8 * 523)] {
        for rows in [1, 3, 33] {
            let want = split_linear(&*reference(Numerics::default()), partitions, k, rows);
            let whole = split_linear(&*reference(Numerics::default()), 1, k, rows);
            assert_ne!(want, whole, "{partitions} partitions of {k} have the order of one, and would show nothing");
            for (level, threads) in [(SimdLevel::Avx2Fma, 1), (SimdLevel::Avx2Fma, 3), (SimdLevel::Portable, 2)] {
                let Some(ops) = cpu(threads, level, Numerics::default()) else { continue };
                let equal = split_linear(&*ops, partitions, k, rows) == want;
                assert!(equal, "{level:?}, {threads} threads: {partitions} partitions of {k}, {rows} rows differ");
            }
        }
    }
}

/// Bits of `[rows, n]`, products over an odd number of blocks that are stored so.
fn quantized_linear(kernels: &dyn Kernels, format: StorageFormat, rows: usize) -> Vec<u32> {
    let (k, n) = (if format.block().0 == 32 { 17 * 32 } else { 3 * 256 }, 37);
    let mut random = Random(k as u64);
    let weight = kernels.pack_stored(n, k, format, &quantize(format, &random.floats(n * k, 0.2)));
    let mut data = vec![0.0; rows * n];
    kernels.linear(&random.floats(rows * k, 1.0), &weight, 1, Store::Set, &mut data);
    data.into_iter().map(f32::to_bits).collect()
}

#[test]
fn matrices_of_every_quantized_format_have_the_bits_of_the_reference() {
    use StorageFormat::{Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0};
    let cases =
        [Q4_0, Q4_1, Q8_0, Q4K, Q5K, Q6K].into_iter().flat_map(|format| [1, 3, 33, 70].map(|rows| (format, rows)));
    for class in SMALLS[1..].iter().map(|shape| shape.numerics) {
        let reference = reference(class);
        let cases = cases.clone().map(|(format, rows)| (format, rows, quantized_linear(&*reference, format, rows)));
        let cases: Vec<_> = cases.collect();
        for (level, threads) in levels().iter().flat_map(|level| [(*level, 1), (*level, 3)]) {
            let ops = cpu(threads, level, class).unwrap();
            for (format, rows, want) in &cases {
                let equal = quantized_linear(&*ops, *format, *rows) == *want;
                assert!(equal, "{class} on {level:?}, {threads} threads: {rows} rows of {format:?} differ");
            }
        }
    }
}

#[test]
fn long_contexts_divide_by_slabs_with_the_same_bits() {
    // One row over 8 slabs on 3 threads takes the divided path; the reference knows no such thing.
    let steps =
        [vec![Chunk { sequence: 0, position: 0, rows: 500 }], vec![Chunk { sequence: 0, position: 500, rows: 2 }]];
    for window in [None, Some(470)] {
        let shape = Shape { ffn: 5, window, ..SMALL };
        let want = run(reference(SMALL.numerics), shape, 64, &steps);
        let got = run(cpu(3, SimdLevel::detect().unwrap(), SMALL.numerics).unwrap(), shape, 64, &steps);
        assert!(got == want, "window {window:?}");
    }
}
