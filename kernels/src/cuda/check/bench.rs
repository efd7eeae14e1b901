//! How long kernels take, alone on the GPU, on memory that the second-level cache does not hold.

use super::Target;
use super::scene::Scene;
use crate::cuda::arguments::model::{Attend, Gemm, KvPlanes, epilogue};
use crate::cuda::arguments::{In, Out};
use crate::cuda::driver::{Address, Command};
use crate::cuda::launch::tile_rows;
use crate::cuda::ops::Matrix;
use crate::cuda::products::Pins;
use crate::device::DeviceError;
use crate::numerics::ATTENTION_SPLIT;
use std::time::{Duration, Instant};

/// Bytes beyond any second-level cache.
const BEYOND_CACHE: usize = 256 << 20;

/// Shortest time that is measured: what an event's wait adds is far below a hundredth.
const MEASURED_MIN: Duration = Duration::from_millis(60);

/// Most repetitions of what is measured.
const REPEATS_MAX: usize = 4096;

/// Of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
}

impl Target {
    /// Seconds of one product of `m` rows with a matrix `[n, k]`, as a step has it: by an algorithm of the library that is exact, where there is
    /// one.
    ///
    /// # Errors
    /// If the GPU fails, or has too little memory.
    pub fn gemm(&self, m: usize, n: usize, k: usize) -> Result<f64, DeviceError> {
        let mut scene = Scene::new(&self.driver, self.half, 1)?;
        let (x, out) = (scene.filled(m * k * 2)?, scene.empty(m * n * 2)?);
        let copies = self.copies(n * k * 2);
        let matrix = Matrix { at: Address(0), n, k };
        let pins = Pins::choose(&self.driver, scene.launcher, [(matrix, epilogue::STORE_HALF)], m)?;
        let launches = (0..copies)
            .map(|_| {
                let w = In::at(scene.filled(n * k * 2)?);
                let [m, n, k] = [m, n, k].map(|size| size as i32);
                let (bias, epilogue) = (In::null(), epilogue::STORE_HALF);
                let product = Gemm { x: In::at(x), w, bias, out: Out::at(out), m, n, k, epilogue };
                Ok(vec![pins.command(scene.launcher, product)])
            })
            .collect::<Result<Vec<_>, DeviceError>>()?;
        time(&scene, &launches)
    }

    /// Seconds of one layer's attention of `rows` single rows, each behind `context` tokens.
    ///
    /// # Errors
    /// As [`Target::gemm`].
    pub fn attend_decode(&self, shape: AttentionShape, rows: usize, context: usize) -> Result<f64, DeviceError> {
        let mut scene = Scene::new(&self.driver, self.half, 2)?;
        let AttentionShape { heads, head_dim, .. } = shape;
        let splits = context / ATTENTION_SPLIT + 1;
        let q = scene.filled(rows * heads * head_dim * 2)?;
        let (out, partials) =
            (scene.empty(rows * heads * head_dim * 2)?, scene.empty(rows * heads * splits * (head_dim + 2) * 4)?);
        let slots = scene.ints(&(0..rows as i32).collect::<Vec<_>>())?;
        let positions = scene.ints(&vec![context as i32; rows])?;
        let kv_bytes = rows * context * 2 * shape.kv_heads * head_dim * 2;
        let launches = (0..self.copies(kv_bytes))
            .map(|_| {
                let mut attend = attend_of(&mut scene, shape, rows, context + 1, q, out)?;
                attend.partials = Out::at(partials);
                attend.splits = splits as i32;
                let attend = Attend { slots: In::at(slots), positions: In::at(positions), ..attend };
                Ok(scene.launcher.attend_decode(attend).map(Into::into).to_vec())
            })
            .collect::<Result<Vec<_>, DeviceError>>()?;
        time(&scene, &launches)
    }

    /// Seconds of one layer's attention of a chunk of `rows` rows behind `context` tokens.
    ///
    /// # Errors
    /// As [`Target::gemm`].
    pub fn attend_prefill(&self, shape: AttentionShape, rows: usize, context: usize) -> Result<f64, DeviceError> {
        let mut scene = Scene::new(&self.driver, self.half, 3)?;
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let (q, out) = (scene.filled(rows * heads * head_dim * 2)?, scene.empty(rows * heads * head_dim * 2)?);
        let each = tile_rows(heads / kv_heads, head_dim);
        let tile = |first: usize| [0, first, each.min(rows - first), context + first].map(|x| x as i32);
        let tiles: Vec<i32> = (0..rows).step_by(each).flat_map(tile).collect();
        let mut attend = attend_of(&mut scene, shape, 1, context + rows, q, out)?;
        attend.tiles = In::at(scene.ints(&tiles)?);
        let launch = scene.launcher.attend_prefill(attend, tiles.len() / 4);
        time(&scene, &[vec![launch.into()]])
    }

    /// Copies of something that, read in turn, are not found in the cache: one where nothing is measured.
    fn copies(&self, bytes: usize) -> usize {
        if self.is_recorded() { 1 } else { (BEYOND_CACHE / bytes.max(1)).clamp(1, 32) + 1 }
    }
}

/// Attention of `slots` sequences of `tokens` tokens.
fn attend_of(
    scene: &mut Scene,
    shape: AttentionShape,
    slots: usize,
    tokens: usize,
    q: Address,
    out: Address,
) -> Result<Attend, DeviceError> {
    let AttentionShape { heads, kv_heads, head_dim, block_tokens } = shape;
    let (stride, plane) = (tokens.div_ceil(block_tokens), block_tokens * kv_heads * head_dim * 2);
    let blocks = stride * slots;
    let pool = scene.filled(blocks * 2 * plane)?;
    // Neighbours in a sequence are apart in the pool.
    let table: Vec<i32> = (0..blocks).map(|i| (i % stride * slots + i / stride) as i32).collect();
    let kv = KvPlanes {
        k: Out::at(pool),
        v: Out::at(pool.plus(blocks * plane)),
        table: In::at(scene.ints(&table)?),
        block_bytes: plane as i64,
        token_bytes: (kv_heads * head_dim * 2) as i32,
        block_tokens: block_tokens as i32,
        table_stride: stride as i32,
        reserved: 0,
    };
    Ok(Attend {
        kv,
        q: In::at(q),
        out: Out::at(out),
        slots: In::null(),
        positions: In::null(),
        tiles: In::null(),
        partials: Out::at(out),
        rows: slots as i32,
        heads: heads as i32,
        kv_heads: kv_heads as i32,
        head_dim: head_dim as i32,
        q_stride: (heads * head_dim) as i32,
        window: 0,
        splits: 1,
        factor: 0.1,
    })
}

/// Seconds of one of `sequences`, which are launched in turn until enough time has passed.
fn time(scene: &Scene, sequences: &[Vec<Command>]) -> Result<f64, DeviceError> {
    let mut repeats = sequences.len();
    loop {
        // The first round loads the kernel; each later one is twice as long.
        let began = Instant::now();
        for sequence in sequences.iter().cycle().take(repeats) {
            for command in sequence {
                scene.enqueue(command)?;
            }
        }
        scene.end()?;
        let took = began.elapsed();
        if took >= MEASURED_MIN || repeats >= REPEATS_MAX {
            return Ok(took.as_secs_f64() / repeats as f64);
        }
        repeats *= 2;
    }
}
