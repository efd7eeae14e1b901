//! The store of keys and values, and attention over a paged pool.

use super::scene::Scene;
use crate::cuda::arguments::model::{Attend, KvPlanes, RopeStore};
use crate::cuda::arguments::{In, Out};
use crate::cuda::driver::Address;
use crate::cuda::launch::tile_rows;
use crate::device::DeviceError;
use crate::numerics::ATTENTION_SPLIT;
use crate::numerics::tensor_core::inputs::Kind;

/// Sizes of blocks that pools may have.
pub(super) const BLOCKS: [usize; 4] = [16, 32, 64, 128];

/// Query heads, KV heads, elements of a head.
const HEADS: [(usize, usize, usize); 7] =
    [(2, 1, 64), (3, 3, 40), (4, 2, 128), (20, 1, 72), (2, 2, 256), (5, 1, 136), (1, 1, 8)];

/// Tokens before a row: the first, on both sides of a block of 64, of a split, and of two.
const POSITIONS: [usize; 9] = [0, 1, 62, 64, 130, 511, 512, 700, 1030];
const FEW_POSITIONS: [usize; 3] = [0, 70, 515];

const WINDOWS: [usize; 4] = [0, 1, 100, 600];

/// Most rows of a tile.
const ROWS_MAX: usize = 9;

/// A pool with one layer, and the tables of some sequences.
struct Paged {
    kv: KvPlanes,
    bytes: usize,
}

impl Paged {
    /// Blocks for sequences of so many tokens, in random order.
    ///
    /// With a window, tables are as short as the engine's: entries of blocks that left it hold later ones.
    fn new(
        scene: &mut Scene,
        block: usize,
        width: usize,
        tokens: &[usize],
        window: usize,
    ) -> Result<Self, DeviceError> {
        let all = tokens.iter().max().map_or(1, |tokens| tokens.div_ceil(block));
        let stride = if window == 0 { all } else { ((window + ROWS_MAX).div_ceil(block) + 2).min(all) };
        let used: usize = tokens.iter().map(|tokens| tokens.div_ceil(block)).sum();
        let mut free: Vec<i32> = (0..used as i32 + 2).collect();
        let mut table = vec![-1; stride * tokens.len()];
        for (slot, tokens) in tokens.iter().enumerate() {
            for index in 0..tokens.div_ceil(block) {
                let taken = free.swap_remove(scene.random.below(free.len() as u32) as usize);
                table[slot * stride + index % stride] = taken;
            }
        }
        // Keys and values of a token lie beside others of the pool: tokens are wider than they need.
        let token_bytes = (width * 2).next_multiple_of(16) + 16;
        let plane = token_bytes * block;
        let blocks = used + 2;
        let pool = scene.halves(Kind::NearOne, blocks * 2 * plane / 2, true)?;
        let kv = KvPlanes {
            k: Out::at(pool),
            v: Out::at(pool.plus(plane)),
            table: In::at(scene.ints(&table)?),
            block_bytes: 2 * plane as i64,
            token_bytes: token_bytes as i32,
            block_tokens: block as i32,
            table_stride: stride as i32,
            reserved: 0,
        };
        Ok(Self { kv, bytes: blocks * 2 * plane })
    }
}

pub(super) fn all(scene: &mut Scene, small: bool) -> Result<(), DeviceError> {
    let positions = if small { &FEW_POSITIONS[..] } else { &POSITIONS };
    for (case, (heads, kv_heads, dim)) in HEADS.into_iter().enumerate() {
        for (i, block) in BLOCKS.into_iter().enumerate() {
            if small && (case + i) % BLOCKS.len() != 0 {
                continue;
            }
            let (rich, window) = ((case + i) % 2 == 1, WINDOWS[(case + 3 * i) % WINDOWS.len()]);
            rope_store(scene, block, (heads, kv_heads, dim), positions, rich)?;
            // The host twin takes as long as there are elements.
            let most = if dim > 128 { 600 } else { 1100 };
            let positions: Vec<usize> = positions.iter().copied().filter(|position| *position < most).collect();
            attend(scene, block, (heads, kv_heads, dim), &positions, window)?;
        }
    }
    Ok(())
}

fn rope_store(
    scene: &mut Scene,
    block: usize,
    (heads, kv_heads, dim): (usize, usize, usize),
    positions: &[usize],
    rich: bool,
) -> Result<(), DeviceError> {
    let rope_dim = if rich { dim / 2 / 2 * 2 } else { dim };
    let tokens: Vec<usize> = positions.iter().map(|position| position + 1).collect();
    let paged = Paged::new(scene, block, kv_heads * dim, &tokens, 0)?;
    let most = tokens.iter().max().copied().unwrap_or(1);
    let mut slots: Vec<i32> = (0..positions.len() as i32).collect();
    let mut at: Vec<i32> = positions.iter().map(|position| *position as i32).collect();
    // A row of padding.
    slots.push(-1);
    at.push(0);
    let rows = slots.len();
    let gain = |scene: &mut Scene| if rich { scene.random_floats(dim, 2.0).map(In::at) } else { Ok(In::null()) };
    let store = RopeStore {
        kv: paged.kv,
        qkv: Out::at(scene.halves(Kind::NearOne, rows * (heads + 2 * kv_heads) * dim, true)?),
        q_gain: gain(scene)?,
        k_gain: gain(scene)?,
        cos: In::at(scene.random_floats(most * rope_dim / 2, 1.0)?),
        sin: In::at(scene.random_floats(most * rope_dim / 2, 1.0)?),
        slots: In::at(scene.ints(&slots)?),
        positions: In::at(scene.ints(&at)?),
        rows: rows as i32,
        heads: heads as i32,
        kv_heads: kv_heads as i32,
        head_dim: dim as i32,
        rope_dim: rope_dim as i32,
        q_eps: 1e-5,
        k_eps: 1e-6,
        reserved: 0,
    };
    scene.run(scene.launcher.rope_store(store))?;
    scene.clear();
    Ok(())
}

fn attend(
    scene: &mut Scene,
    block: usize,
    (heads, kv_heads, dim): (usize, usize, usize),
    positions: &[usize],
    window: usize,
) -> Result<(), DeviceError> {
    let most_rows = tile_rows(heads / kv_heads, dim).min(ROWS_MAX);
    let tokens: Vec<usize> = positions.iter().map(|position| position + most_rows).collect();
    let paged = Paged::new(scene, block, kv_heads * dim, &tokens, window)?;
    debug_assert!(paged.bytes > 0);
    let splits = positions.iter().max().map_or(1, |position| position / ATTENTION_SPLIT + 1);
    let q_stride = (heads + 2 * kv_heads) * dim;
    let mut slots: Vec<i32> = (0..positions.len() as i32).collect();
    let mut at: Vec<i32> = positions.iter().map(|position| *position as i32).collect();
    slots.push(-1);
    at.push(0);
    let rows = slots.len();
    let of = |q: Address, out: Address, partials: Address| Attend {
        kv: paged.kv,
        q: In::at(q),
        out: Out::at(out),
        slots: In::null(),
        positions: In::null(),
        tiles: In::null(),
        partials: Out::at(partials),
        rows: rows as i32,
        heads: heads as i32,
        kv_heads: kv_heads as i32,
        head_dim: dim as i32,
        q_stride: q_stride as i32,
        window: window as i32,
        splits: splits as i32,
        factor: 0.2,
    };
    let q = scene.halves(Kind::NearOne, rows * q_stride, true)?;
    let (out, partials) = (scene.empty(rows * heads * dim * 2)?, scene.empty(rows * heads * splits * (dim + 2) * 4)?);
    let (slots, at) = (In::at(scene.ints(&slots)?), In::at(scene.ints(&at)?));
    let decode = Attend { slots, positions: at, ..of(q, out, partials) };
    for launch in scene.launcher.attend_decode(decode) {
        scene.run(launch)?;
    }

    // Tiles of one row, of as many as fit, and of some between; one of none.
    let (mut tiles, mut first) = (vec![-1, 0, 1, 0, 0, 0, 0, 0], 0);
    for (slot, position) in positions.iter().enumerate() {
        let rows = [1, most_rows, most_rows.div_ceil(2)][slot % 3];
        tiles.extend([slot, first, rows, *position].map(|x| x as i32));
        first += rows;
    }
    let q = scene.halves(Kind::NearOne, first * q_stride, true)?;
    let out = scene.empty(first * heads * dim * 2)?;
    let prefill = Attend { tiles: In::at(scene.ints(&tiles)?), ..of(q, out, partials) };
    scene.run(scene.launcher.attend_prefill(prefill, tiles.len() / 4))?;
    scene.clear();
    Ok(())
}
