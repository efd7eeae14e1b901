//! Times whole steps of a program in the shapes of SmolLM2-135M with random weights, and attention within them: prefill of up to 512 rows, and
//! decode of 1, 8 and 32 sequences at contexts of 128 and 2048 tokens. `STEP_CLASS`, `STEP_WORK` and `STEP_THREADS` choose, so that two builds
//! can take turns; with `STEP_Q4_1` all classes have weights in Q4_1, which else only `i8x32` has. The time on processors says more than the other where the machine is not idle.

use baton_kernels::adapter::AdapterBounds;
use baton_kernels::cpu::{CpuConfig, timed};
use baton_kernels::device::{Bounds, Device, Executable, Role, RopeTable, StoredRows, Weight, WeightSpec};
use baton_kernels::host::Times;
use baton_kernels::numerics::Numerics;
use baton_kernels::program::{Activation, Attend, Embed, GateUp, Head, Norm, Op, Program, Project, Qkv};
use baton_kernels::step::{StepSegment, TableSteps};
use baton_kernels::storage::StorageFormat;
use baton_types::{BlockId, BlockTable, Dtype, KvLayout, KvPoolMap};
use std::time::{Duration, Instant};

const LAYERS: u32 = 30;
const HIDDEN: usize = 576;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const DIM: usize = 64;
const FFN: usize = 1536;
const VOCAB: usize = 49_152;
const BLOCK: usize = 16;
const POSITIONS: usize = 2048;
const SEQUENCES: usize = 32;

/// Any fixed bytes without structure, as finite weights.
fn stored(format: StorageFormat, rows: usize, k: usize) -> Vec<u8> {
    let mix = |i: usize| (i as u32).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77);
    if format == StorageFormat::F32 {
        let float = |i| (mix(i) >> 8) as f32 / (1 << 24) as f32 * 0.1 - 0.05;
        return (0..rows * k).flat_map(|i| f32::to_le_bytes(float(i))).collect();
    }
    let (elements, bytes) = format.block();
    let mut out: Vec<u8> = (0..rows * k / elements * bytes).map(|i| (mix(i) >> 11) as u8).collect();
    for block in out.chunks_exact_mut(bytes) {
        block[..4].copy_from_slice(&[0x00, 0x18, 0x00, 0x98]);
    }
    out
}

fn load(device: &dyn Device, role: Role, format: StorageFormat, k: usize, parts: &[usize]) -> Weight {
    let format = if role == Role::Vector { StorageFormat::F32 } else { format };
    let bytes: Vec<_> = parts.iter().map(|rows| stored(format, *rows, k)).collect();
    let parts: Vec<_> =
        parts.iter().zip(&bytes).map(|(&rows, bytes)| StoredRows { rows, format, bytes: bytes.as_slice() }).collect();
    device.load(&WeightSpec { name: "w", role, k, parts: &parts }).expect("loaded")
}

fn program(device: &dyn Device, format: StorageFormat) -> Program {
    let load = |role, k, parts: &[usize]| load(device, role, format, k, parts);
    let norm = || Norm { gain: load(Role::Vector, HIDDEN, &[1]), eps: 1e-5 };
    let half = DIM / 2;
    let angles: Vec<f32> = (0..POSITIONS * half).map(|i| (i / half) as f32 * 0.9f32.powi((i % half) as i32)).collect();
    let (cos, sin) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let rope = device.load_rope(RopeTable { cos, sin, dim: DIM }).expect("rope");
    let table = load(Role::Embedding, HIDDEN, &[VOCAB]);
    let mut ops = vec![Op::Embed(Embed::plain(table))];
    for layer in 0..LAYERS {
        ops.push(Op::Qkv(Qkv {
            layer,
            norm: Some(norm()),
            weight: load(Role::Qkv, HIDDEN, &[HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]),
            bias: None,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: DIM,
            norms: None,
            rope,
            gate: false,
        }));
        if layer + 1 == LAYERS {
            ops.push(Op::Select);
        }
        ops.push(Op::Attend(Attend { layer, scale: 0.125, window: None, soft_cap: None, sinks: None }));
        ops.push(Op::Out(Project::plain(load(Role::Out, HEADS * DIM, &[HIDDEN]))));
        let weight = load(Role::GateUp, HIDDEN, &[FFN, FFN]);
        ops.push(Op::GateUp(GateUp { norm: Some(norm()), weight, activation: Activation::Silu }));
        ops.push(Op::Down(Project::plain(load(Role::Down, FFN, &[HIDDEN]))));
    }
    ops.extend([Op::Head(Head::plain(norm(), table)), Op::Sample]);
    Program { ops }
}

/// What a step takes, in milliseconds.
#[derive(Clone, Copy)]
struct Time {
    wall: f64,
    processors: f64,
    attention: f64,
}

struct Stepper {
    times: Times,
    executable: Box<dyn Executable>,
    steps: TableSteps,
}

impl Stepper {
    fn new(numerics: Numerics, threads: usize) -> Self {
        let times = Times::default();
        let device = timed(CpuConfig { threads, simd: None, numerics }, times.clone()).expect("threads start");
        let quantized = numerics == Numerics::I8x32 || std::env::var_os("STEP_Q4_1").is_some();
        let format = if quantized { StorageFormat::Q4_1 } else { StorageFormat::F32 };
        let bounds = Bounds {
            rows_max: 512,
            logit_rows_max: SEQUENCES,
            slots_max: SEQUENCES,
            positions_max: POSITIONS,
            adapters: AdapterBounds::default(),
        };
        let program = program(device.as_ref(), format);
        let mut executable = device.compile(program, bounds).expect("compiled");
        let layout = KvLayout::llama(BLOCK as u32, LAYERS, KV_HEADS as u32, DIM as u32, Dtype::Bf16).expect("layout");
        let map = KvPoolMap::try_new(layout, (SEQUENCES * POSITIONS / BLOCK) as u32).expect("map");
        let pool = device.alloc_pool(&map).expect("pool");
        // Pages that nobody wrote to would all be one page of zeros.
        let bytes: Vec<u8> = stored(StorageFormat::F32, 1, 1 << 19).chunks(4).flat_map(|x| [x[2], x[3]]).collect();
        for offset in (0..map.bytes()).step_by(bytes.len()) {
            let len = bytes.len().min(map.bytes() - offset);
            pool.write_by(Instant::now() + Duration::from_secs(60), offset, &bytes[..len]).expect("filled");
        }
        executable.bind(pool, &map).expect("bound");
        Self { times, executable, steps: TableSteps::default() }
    }

    fn step(&mut self, sequences: usize, position: usize, rows: usize) -> Time {
        let each = POSITIONS / BLOCK;
        let blocks = |s: usize| (s * each..(s + 1) * each).map(|block| BlockId(block as u32)).collect();
        let segments: Vec<_> =
            (0..sequences).map(|s| StepSegment { position, rows, table: BlockTable::from_start(blocks(s)) }).collect();
        let ids = (0..sequences * rows).map(|i| (i * 7919 % VOCAB) as u32).collect();
        let logit_rows = (0..sequences).map(|s| (s + 1) * rows - 1).collect();
        let step = self.steps.step(ids, segments, logit_rows, 0);
        self.times.take();
        let (begin, used) = (Instant::now(), processor_seconds());
        self.executable.launch(&step, &mut |_, _| ()).expect("launched");
        let output = self.executable.finish().expect("finished");
        let (wall, processors) = (begin.elapsed().as_secs_f64() * 1e3, (processor_seconds() - used) * 1e3);
        assert!(output.logits.row(0)[0].is_finite());
        let attention = self.times.take().get("attend").map_or(0.0, Duration::as_secs_f64) * 1e3;
        Time { wall, processors, attention }
    }
}

/// Of all threads of this process; 0 where the system does not say.
fn processor_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let stat = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("schedstat")).ok();
    let nanoseconds = |stat: String| stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
    threads.filter_map(stat).filter_map(nanoseconds).sum::<f64>() / 1e9
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn main() {
    let asked = |name: &str| std::env::var(name).ok();
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = asked("STEP_THREADS").and_then(|count| count.parse().ok()).unwrap_or_else(cores);
    let classes = [("f32fma", Numerics::default()), ("bf16x32", Numerics::Bf16x32), ("i8x32", Numerics::I8x32)];
    let works = [
        ("prefill512", 1, 0, 512),
        ("prefill128", 1, 0, 128),
        ("b1", 1, 128, 1),
        ("b8", 8, 128, 1),
        ("b32", 32, 128, 1),
        ("chunk2048", 1, 1536, 512),
        ("b1at2048", 1, 2047, 1),
        ("b8at2048", 8, 2047, 1),
        ("b32at2048", 32, 2047, 1),
    ];
    let is_asked = |name: &str, value: &str| asked(name).is_none_or(|names| names.split(',').any(|n| n == value));
    for (class, numerics) in classes.into_iter().filter(|(class, _)| is_asked("STEP_CLASS", class)) {
        let mut stepper = Stepper::new(numerics, threads);
        for (work, sequences, position, rows) in works.into_iter().filter(|(work, ..)| is_asked("STEP_WORK", work)) {
            let count = if rows > 1 { 3 } else { 15 };
            (0..2).for_each(|_| _ = stepper.step(sequences, position, rows));
            let steps: Vec<_> = (0..count).map(|_| stepper.step(sequences, position, rows)).collect();
            let of = |of: fn(&Time) -> f64| median(steps.iter().map(of).collect());
            let (wall, processors, attention) = (of(|t| t.wall), of(|t| t.processors), of(|t| t.attention));
            println!("{class} {work} {wall:.3} ms, {processors:.3} ms on processors; attention {attention:.3} ms");
        }
    }
}
