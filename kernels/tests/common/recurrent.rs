//! A small decoder with recurrent layers, and a gate of attention's output, as a program.

use super::Random;
use super::tiny::{BLOCK, BOUNDS, bounds, load, soon};
use baton_kernels::device::{Device, DeviceError, Executable, Role, RopeTable};
use baton_kernels::program::{Activation, Attend, Embed, GateUp, GatedDelta, Head, Norm, Op, Program, Project, Qkv};
use baton_kernels::step::StepInput;
use baton_memory::PoolMemory;
use baton_types::{Attention, BlockId, Dtype, KvPoolMap, LayerKv};
use std::sync::Arc;

pub const HIDDEN: usize = 24;
pub const VOCAB: usize = 11;
const DIM: usize = 8;
const TAPS: usize = 4;
/// Heads of keys and of values, and their elements.
const HEADS: [usize; 2] = [2, 4];
const ELEMENTS: [usize; 2] = [8, 6];
/// Full attention, and states.
pub const BLOCKS: [u32; 2] = [6, 7];

fn state() -> LayerKv {
    let [[key_heads, value_heads], [key_dim, value_dim]] = [HEADS, ELEMENTS].map(|pair| pair.map(|x| x as u32));
    let channels = 2 * key_heads * key_dim + value_heads * value_dim;
    LayerKv::State { heads: value_heads, key_dim, value_dim, inputs: TAPS as u32 - 1, channels }
}

/// A program of three layers, of which one attends; each has one block of `ffn`.
pub fn program(device: &dyn Device, attends: u32) -> Program {
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

pub fn map(device: &dyn Device, attends: u32) -> KvPoolMap {
    let kv = LayerKv::Heads { kv_heads: 2, head_dim: DIM as u32 };
    let layers = (0..3).map(|layer| (None, if layer == attends { kv } else { state() }));
    let dtype = device.info().numerics.kv().unwrap_or(Dtype::Bf16);
    let layout = Attention::of_layers(layers).layout(BLOCK as u32, dtype).unwrap();
    KvPoolMap::with_blocks(layout, BLOCKS.to_vec()).unwrap()
}

/// The program with its pool, of NaN.
pub struct Model {
    pub executable: Box<dyn Executable>,
    pub pool: Arc<dyn PoolMemory>,
    pub map: KvPoolMap,
}

impl Model {
    pub fn new(device: &dyn Device, attends: u32) -> Self {
        let map = map(device, attends);
        let mut executable = device.compile(program(device, attends), bounds(device)).unwrap();
        let pool = device.alloc_pool(&map).unwrap();
        pool.write_by(soon(), 0, &vec![0xff; map.bytes()]).unwrap();
        executable.bind(pool.clone(), &map).unwrap();
        Self { executable, pool, map }
    }

    pub fn launch(&mut self, step: &StepInput) -> Result<(), DeviceError> {
        self.executable.launch(step, &mut |_, _| ())
    }

    /// Bits of the logits.
    pub fn finish(&mut self) -> Vec<u32> {
        self.executable.finish().unwrap().logits.data().iter().map(|x| x.to_bits()).collect()
    }

    /// Bytes of a state, in all layers.
    pub fn state(&self, block: u32) -> Vec<u8> {
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
