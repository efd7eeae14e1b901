//! Projections of latent attention: every instruction set has the bits of the scalar reference, in every class; and programs that do not fit are
//! refused.

mod common;

use baton_kernels::cpu::{CpuConfig, CpuKernels, SimdLevel, TensorCoreKernels};
use baton_kernels::device::{Bounds, Device, DeviceError, Role, RopeTable, StoredRows};
use baton_kernels::host::{HeadProducts, HostKernels, KvStep, LatentMatrices, LatentOf, NormOf, Scratch};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::program::Activation;
use baton_kernels::program::{
    Attend, Embed, Expand, GateUp, Head, Latent, LatentQuery, Norm, Op, Program, Project, Qkv,
};
use baton_kernels::reference::{ReferenceDevice, ReferenceKernels};
use baton_kernels::step::StepSegment;
use baton_kernels::storage::StorageFormat;
use baton_types::{Attention, BlockId, BlockTable, Dtype, KvLayout, KvPoolMap, LayerKv};
use common::tiny::{BOUNDS, bounds, load};
use common::{Random, levels, pool};

const POSITIONS: usize = 320;
const BLOCK: usize = 16;

/// Shapes of an attention.
#[derive(Clone, Copy, Debug)]
struct Shape {
    hidden: usize,
    heads: usize,
    /// Of the compressed query.
    query_rank: Option<usize>,
    rank: usize,
    /// Elements of a head that are not rotated, and that are.
    plain: usize,
    rotated: usize,
    value: usize,
}

const SHAPES: [Shape; 4] = [
    Shape { hidden: 64, heads: 3, query_rank: None, rank: 32, plain: 16, rotated: 8, value: 16 },
    Shape { hidden: 50, heads: 5, query_rank: Some(37), rank: 45, plain: 19, rotated: 6, value: 70 },
    Shape { hidden: 33, heads: 17, query_rank: Some(16), rank: 128, plain: 64, rotated: 32, value: 65 },
    Shape { hidden: 32, heads: 1, query_rank: None, rank: 8, plain: 2, rotated: 2, value: 1 },
];

fn layout(shape: Shape, layers: u32, kv: Dtype) -> KvLayout {
    let dim = (shape.rank + shape.rotated) as u32;
    Attention::alike(layers, LayerKv::Latent { dim }, None).layout(BLOCK as u32, kv).unwrap()
}

/// Bits of query, pool, and values, which begin with fresh latents.
fn bits<K: HostKernels>(kernels: &K, s: Shape, step: &[(usize, usize)]) -> [Vec<u32>; 3] {
    let mut random = Random(s.hidden as u64);
    let mut matrix = |role, heights: &[usize], k: usize| {
        let bytes: Vec<Vec<u8>> = heights
            .iter()
            .map(|n| random.floats(n * k, 0.3).into_iter().flat_map(f32::to_le_bytes).collect())
            .collect();
        let parts: Vec<_> = heights
            .iter()
            .zip(&bytes)
            .map(|(rows, bytes)| StoredRows { rows: *rows, format: StorageFormat::F32, bytes })
            .collect();
        kernels.pack(role, k, &parts).unwrap()
    };
    let columns = s.heads * (s.plain + s.rotated);
    let down = matrix(Role::Qkv, &[s.query_rank.unwrap_or(columns), s.rank, s.rotated], s.hidden);
    let query = s.query_rank.map(|rank| matrix(Role::Qkv, &[columns], rank));
    let keys = matrix(Role::Heads, &vec![s.rank; s.heads], s.plain);
    let values = matrix(Role::Heads, &vec![s.value; s.heads], s.rank);
    let (memory, map, kv) = pool(layout(s, 2, kernels.numerics().kv().unwrap_or(Dtype::F32)), 20 * step.len());
    let segment = |(i, &(position, rows)): (usize, &(usize, usize))| {
        let blocks = (0..POSITIONS / BLOCK).rev().map(|block| BlockId((block * step.len() + i) as u32)).collect();
        StepSegment { position, rows, table: BlockTable::from_start(blocks) }
    };
    let segments: Vec<_> = step.iter().enumerate().map(segment).collect();
    let rows: usize = step.iter().map(|(_, rows)| rows).sum();
    let angles: Vec<f32> = (0..POSITIONS * s.rotated / 2).map(|i| i as f32 * 0.37).collect();
    let (cos, sin) = (angles.iter().map(|a| a.cos()).collect(), angles.iter().map(|a| a.sin()).collect());
    let rope = RopeTable { cos, sin, dim: s.rotated };
    let gains = [s.hidden, s.query_rank.unwrap_or(1), s.rank].map(|cols| random.floats(cols, 1.0));
    let [norm, query_norm, kv_norm] = gains.each_ref().map(|gain| NormOf { gain, eps: 1e-6 });
    let op = LatentOf {
        norm: Some(norm),
        query_norm: s.query_rank.map(|_| query_norm),
        kv_norm,
        heads: s.heads,
        plain: s.plain,
        rope: &rope,
    };
    let residual = random.floats(rows * s.hidden, 1.0);
    let mut q = vec![f32::NAN; rows * s.heads * (s.rank + s.rotated)];
    let mut scratch = Scratch::default();
    let matrices = LatentMatrices { down: &down, query: query.as_ref(), keys: &keys };
    let at = KvStep { kv: &kv, layer: 1, segments: &segments };
    kernels.latent(&matrices, &op, at, &residual, &mut q, &mut scratch);
    let attended = random.floats(rows * s.heads * s.rank, 1.0);
    let mut expanded = vec![f32::NAN; rows * s.heads * s.value];
    let products = HeadProducts { rows, heads: s.heads, k: s.rank, n: s.value, rest: 0 };
    kernels.by_head(&values, products, &attended, &mut expanded, &mut scratch);
    let mut stored = vec![0u8; map.bytes()];
    memory.copy_out(0, &mut stored);
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
    [bits(&q), stored.into_iter().map(u32::from).collect(), bits(&expanded)]
}

fn equal(want: &[Vec<u32>; 3], got: &[Vec<u32>; 3], what: &str) {
    for ((want, got), part) in want.iter().zip(got).zip(["query", "pool", "values"]) {
        assert!(want == got, "{what}: {part}");
    }
}

#[test]
fn all_instruction_sets_have_the_bits_of_the_reference() {
    let classes = [
        Numerics::F32Fma { weights: Dtype::F32 },
        Numerics::F32Fma { weights: Dtype::Bf16 },
        Numerics::Bf16x32,
        Numerics::I8x32,
        Numerics::TensorCore { cores: TensorCore::Tc16F25, half: Half::Bf16 },
        Numerics::TensorCore { cores: TensorCore::Tc8F24, half: Half::F16 },
    ];
    let steps: [&[(usize, usize)]; 4] = [&[(5, 1)], &[(3, 7), (100, 1), (0, 2)], &[(10, 300)], &[(0, 1); 9]];
    for (numerics, shape) in classes.into_iter().flat_map(|class| SHAPES.map(|shape| (class, shape))) {
        for step in steps {
            let want = bits(&ReferenceKernels::new(numerics), shape, step);
            assert!(want[0].iter().chain(&want[2]).all(|x| f32::from_bits(*x).is_finite()), "{numerics}, {shape:?}");
            for (&simd, threads) in levels().iter().flat_map(|level| [1, 3].map(|threads| (level, threads))) {
                let config = CpuConfig { threads, simd: Some(simd), numerics };
                let got = match numerics {
                    Numerics::TensorCore { .. } if simd > SimdLevel::Avx512 => continue,
                    Numerics::TensorCore { .. } => bits(&TensorCoreKernels::new(config).unwrap(), shape, step),
                    _ => bits(&CpuKernels::new(config).unwrap(), shape, step),
                };
                equal(&want, &got, &format!("{numerics}, {simd:?}, {threads} threads, {shape:?}, {step:?}"));
            }
        }
    }
}

/// A row of a batch has the bits that it has alone.
#[test]
fn rows_do_not_depend_on_their_neighbours() {
    for (numerics, shape) in [Numerics::Bf16x32, Numerics::default()].into_iter().zip(SHAPES) {
        let kernels = CpuKernels::new(CpuConfig { threads: 3, simd: None, numerics }).unwrap();
        let [together, ..] = bits(&kernels, shape, &[(7, 40)]);
        let [alone, ..] = bits(&kernels, shape, &[(7, 1)]);
        // The first row of both has the same residual stream: weights are drawn before it.
        assert_eq!(together[..alone.len()], alone, "{numerics}");
    }
}

/// A program of one layer.
fn program(device: &dyn Device, s: Shape) -> Program {
    let mut random = Random(9);
    let mut of = |role, k, parts: &[usize]| load(device, role, k, parts, &mut random);
    let columns = s.heads * (s.plain + s.rotated);
    let mut norm = |k| Norm { gain: of(Role::Vector, k, &[1]), eps: 1e-6 };
    let (before, kv_norm, query_norm) = (norm(s.hidden), norm(s.rank), norm(s.query_rank.unwrap_or(1)));
    let angles = BOUNDS.positions_max * s.rotated / 2;
    let rope = RopeTable { cos: vec![1.0; angles], sin: vec![0.0; angles], dim: s.rotated };
    let table = of(Role::Embedding, s.hidden, &[11]);
    Program {
        ops: vec![
            Op::Embed(Embed::plain(table)),
            Op::Latent(Latent {
                layer: 0,
                norm: Some(before),
                weight: of(Role::Qkv, s.hidden, &[s.query_rank.unwrap_or(columns), s.rank, s.rotated]),
                query: s
                    .query_rank
                    .map(|rank| LatentQuery { norm: query_norm, weight: of(Role::Qkv, rank, &[columns]) }),
                kv_norm,
                keys: of(Role::Heads, s.plain, &vec![s.rank; s.heads]),
                heads: s.heads,
                rope: device.load_rope(rope).unwrap(),
            }),
            Op::Select,
            Op::Attend(Attend { layer: 0, scale: 0.3, window: None, soft_cap: None, sinks: None }),
            Op::Expand(Expand { weight: of(Role::Heads, s.rank, &vec![s.value; s.heads]), heads: s.heads }),
            Op::Out(Project::plain(of(Role::Out, s.heads * s.value, &[s.hidden]))),
            Op::GateUp(GateUp {
                norm: Some(before),
                weight: of(Role::GateUp, s.hidden, &[4, 4]),
                activation: Activation::Silu,
            }),
            Op::Down(Project::plain(of(Role::Down, 4, &[s.hidden]))),
            Op::Head(Head::plain(before, table)),
            Op::Sample,
        ],
    }
}

#[test]
fn programs_that_do_not_fit_are_refused() {
    let device = ReferenceDevice::new(Numerics::Bf16x32);
    let of = |program: Program, bounds: Bounds| device.compile(program, bounds).map(drop);
    for shape in SHAPES {
        let good = program(&*device, shape);
        of(good.clone(), bounds(&*device)).unwrap();
        let check = |op: &str, change: &dyn Fn(&mut Vec<Op>)| {
            let mut ops = good.ops.clone();
            change(&mut ops);
            match of(Program { ops }, bounds(&*device)) {
                Err(DeviceError::Shape { op: named, message }) => assert_eq!(named, op, "{message}"),
                other => panic!("{op}: {other:?}"),
            }
        };
        fn latent(ops: &mut [Op]) -> &mut Latent {
            let Op::Latent(op) = &mut ops[1] else { panic!("the second operation") };
            op
        }
        let other = load(&*device, Role::Heads, shape.plain, &vec![shape.rank + 1; shape.heads], &mut Random(1));
        check("latent", &|ops| latent(ops).layer = 1);
        check("latent", &|ops| latent(ops).heads += 1);
        check("latent", &|ops| latent(ops).keys = other);
        check("latent", &|ops| latent(ops).kv_norm.gain = latent(ops).norm.unwrap().gain);
        check("latent", &|ops| latent(ops).norm = Some(latent(ops).kv_norm));
        check("compile", &|ops| _ = ops.remove(4));
        check("compile", &|ops| ops.swap(3, 4));
        check("expand", &|ops| {
            let Op::Expand(op) = &mut ops[4] else { panic!("the fifth operation") };
            op.heads += 1;
        });
        check("expand", &|ops| {
            let Op::Expand(op) = &mut ops[4] else { panic!("the fifth operation") };
            op.weight = other;
        });
        let short = Bounds { positions_max: BOUNDS.positions_max + 1, ..bounds(&*device) };
        assert!(of(good.clone(), short).unwrap_err().to_string().contains("the rope table has"));
    }
}

#[test]
fn pools_that_store_something_else_are_refused() {
    let (device, shape) = (ReferenceDevice::new(Numerics::Bf16x32), SHAPES[0]);
    let bind = |layout: KvLayout, program: Program| {
        let map = KvPoolMap::try_new(layout, 4).unwrap();
        let mut executable = device.compile(program, bounds(&*device)).unwrap();
        executable.bind(device.alloc_pool(&map).unwrap(), &map).map_err(|error| error.to_string())
    };
    let of = || program(&*device, shape);
    assert_eq!(bind(layout(shape, 1, Dtype::Bf16), of()), Ok(()));
    let refused = |layout, program, part: &str| {
        let error = bind(layout, program).unwrap_err();
        assert!(error.contains(part), "{error}");
    };
    let wider = Shape { rank: shape.rank + 2, ..shape };
    refused(
        layout(wider, 1, Dtype::Bf16),
        of(),
        "(1, 42) [heads, dim] of a latent in the pool, the model has (1, 40) [heads, dim] of a latent",
    );
    let heads = KvLayout::llama(BLOCK as u32, 1, 1, 40, Dtype::Bf16).unwrap();
    refused(heads, of(), "of keys and values in the pool, the model has (1, 40) [heads, dim] of a latent");
    refused(layout(shape, 1, Dtype::F32), of(), "attends to KV in bf16");
    // A model of keys and values on a pool of latents.
    let mut ops = of().ops;
    let Op::Latent(Latent { norm, rope, .. }) = ops[1] else { panic!("the second operation") };
    let weight = load(&*device, Role::Qkv, shape.hidden, &[40, 40, 40], &mut Random(1));
    let (bias, norms) = (None, None);
    ops[1] =
        Op::Qkv(Qkv { layer: 0, norm, weight, bias, heads: 1, kv_heads: 1, head_dim: 40, norms, rope, gate: false });
    ops[5] = Op::Out(Project::plain(load(&*device, Role::Out, 40, &[shape.hidden], &mut Random(1))));
    ops.remove(4);
    refused(layout(shape, 1, Dtype::Bf16), Program { ops }, "the model has (1, 40) [heads, dim] of keys and values");
}
