//! Kernels with their grids. `kernels/cu/README.md` has the rules; they are pure functions of shapes and of the GPU's size.

use super::arguments::model::{Attend, Embed, Gemm, RmsNorm, RopeStore, Select, SiluMul};
use super::arguments::pool::{CopyRows, SumRows};
use super::arguments::sampling::{ClearCounts, CountTokens, Sample, Scatter};
use super::driver::Launch;
use super::driver::command::Arguments;
use crate::numerics::Half;

/// Most rows of a product whose weights are streamed.
pub(super) const FEW_ROWS: usize = 128;

/// Rows of one tile of prefill attention, for so many query heads of one KV head: a block of the kernel has rows times heads.
pub(super) fn tile_rows(group: usize, head_dim: usize) -> usize {
    group_max(head_dim) / group
}

/// Most query heads of a KV head.
pub(super) fn group_max(head_dim: usize) -> usize {
    if head_dim > 128 { 64 } else { 128 }
}

/// Features, and rows, of a tile of products of many rows.
const MANY: usize = 128;

/// Columns of query, key and value that one block of `rope_store` has, in heads.
const HEADS_OF_BLOCK: usize = 8;

/// Query heads that one block of decode attention has: the rows of one `mma`.
const GROUP_OF_BLOCK: usize = 16;

/// Elements that one thread of an elementwise kernel takes.
const VECTOR: usize = 8;

/// Threads of most kernels.
const THREADS: usize = 256;

/// Bytes of shared memory that a product of few rows fills with what is on its way.
const STAGES: usize = 98_304;

/// How many times as fast as device memory the second-level cache is. An estimate: it changes speed, never a bit.
const CACHE_RATE: usize = 2;

/// Rows of a tile of a product of few rows.
fn rows_of_block(m: usize) -> usize {
    [8, 16, 32, 64].into_iter().find(|rows| m <= *rows).unwrap_or(FEW_ROWS)
}

/// Chooses kernels for a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launcher {
    pub(super) half: Half,
    pub(super) processors: u32,
}

impl Launcher {
    fn name(&self, kernel: &str) -> String {
        match self.half {
            Half::Bf16 => format!("{kernel}_bf16"),
            Half::F16 => format!("{kernel}_f16"),
        }
    }

    pub(super) fn embed(&self, a: Embed) -> Launch {
        let grid = [a.rows as u32, 1, 1];
        Launch { kernel: self.name("embed"), grid, block: 256, shared: 0, arguments: Arguments::Embed(a) }
    }

    pub(super) fn rms_norm(&self, a: RmsNorm) -> Launch {
        let grid = [a.rows as u32, 1, 1];
        Launch { kernel: self.name("norm"), grid, block: 512, shared: 0, arguments: Arguments::RmsNorm(a) }
    }

    pub(super) fn gemm(&self, a: Gemm) -> Launch {
        let (m, n) = (a.m as usize, a.n as usize);
        if m > FEW_ROWS {
            let grid = [(m.div_ceil(MANY) * n.div_ceil(MANY)) as u32, 1, 1];
            let arguments = Arguments::Gemm(a);
            return Launch { kernel: self.name("gemm_many"), grid, block: 256, shared: 98_304, arguments };
        }
        self.gemm_few(a, self.features_of_block(n, rows_of_block(m)))
    }

    /// A product of few rows, in tiles of 16, 32 or 64 features.
    pub(super) fn gemm_few(&self, a: Gemm, tile: usize) -> Launch {
        let rows = rows_of_block(a.m as usize);
        let columns = if rows <= 32 { 128 } else { 64 };
        let stage = (tile + rows) * columns * 2;
        let shared = ((STAGES / stage).min(8) * stage) as u32;
        let kernel = format!("{}_n{tile}_m{rows}", self.name("gemm_few"));
        let grid = [(a.n as usize).div_ceil(tile) as u32, 1, 1];
        Launch { kernel, grid, block: 128, shared, arguments: Arguments::Gemm(a) }
    }

    /// Features of a tile of a product of few rows, for the least time of the processor with the most tiles. It streams its weights from
    /// device memory and, for each tile, the rows of X from the second-level cache; the slower of both counts. Of equal ones, the widest.
    fn features_of_block(&self, n: usize, rows: usize) -> usize {
        let time = |tile: &usize| {
            let tiles = n.div_ceil(*tile).div_ceil(self.processors as usize);
            tiles * (tile * CACHE_RATE).max(tile + rows)
        };
        [64, 32, 16].into_iter().min_by_key(time).unwrap_or(16)
    }

    pub(super) fn rope_store(&self, a: RopeStore) -> Launch {
        let heads = (a.heads + 2 * a.kv_heads) as usize;
        let grid = [a.rows as u32, heads.div_ceil(HEADS_OF_BLOCK) as u32, 1];
        Launch { kernel: self.name("rope_store"), grid, block: 256, shared: 0, arguments: Arguments::RopeStore(a) }
    }

    pub(super) fn attend_prefill(&self, a: Attend, tiles: usize) -> Launch {
        let (dim, shared) = match a.head_dim {
            ..=64 => (64, 49_152),
            65..=128 => (128, 98_304),
            _ => (256, 98_304),
        };
        let kernel = format!("{}_d{dim}", self.name("attend_prefill"));
        let grid = [tiles as u32, a.kv_heads as u32, 1];
        Launch { kernel, grid, block: 256, shared, arguments: Arguments::AttendPrefill(a) }
    }

    pub(super) fn attend_decode(&self, a: Attend) -> [Launch; 2] {
        let (dim, shared) = match a.head_dim {
            ..=64 => (64, 68_736),
            65..=128 => (128, 87_168),
            _ => (256, 91_264),
        };
        let kernel = format!("{}_d{dim}", self.name("attend_decode"));
        let blocks = a.kv_heads as usize * ((a.heads / a.kv_heads) as usize).div_ceil(GROUP_OF_BLOCK);
        let grid = [a.splits as u32, blocks as u32, a.rows as u32];
        let decode = Launch { kernel, grid, block: 256, shared, arguments: Arguments::AttendDecode(a) };
        let grid = [a.rows as u32, (a.heads as usize).div_ceil(HEADS_OF_BLOCK) as u32, 1];
        let kernel = self.name("attend_merge");
        [decode, Launch { kernel, grid, block: 256, shared: 0, arguments: Arguments::AttendMerge(a) }]
    }

    pub(super) fn silu_mul(&self, a: SiluMul) -> Launch {
        let vectors = a.rows as usize * a.ffn as usize / VECTOR;
        let grid = [vectors.div_ceil(THREADS) as u32, 1, 1];
        Launch { kernel: self.name("silu_mul"), grid, block: 256, shared: 0, arguments: Arguments::SiluMul(a) }
    }

    pub(super) fn select(&self, a: Select) -> Launch {
        let grid = [a.rows as u32, 1, 1];
        Launch { kernel: self.name("select"), grid, block: 256, shared: 0, arguments: Arguments::Select(a) }
    }

    pub(super) fn sample(a: Sample) -> Launch {
        let (kernel, grid) = ("sample".to_owned(), [a.rows as u32, 1, 1]);
        Launch { kernel, grid, block: 1024, shared: 0, arguments: Arguments::Sample(a) }
    }

    pub(super) fn scatter(a: Scatter) -> Launch {
        let (kernel, grid) = ("scatter".to_owned(), [(a.count as u32).div_ceil(256).clamp(1, 1024), 1, 1]);
        Launch { kernel, grid, block: 256, shared: 0, arguments: Arguments::Scatter(a) }
    }

    pub(super) fn clear_counts(a: ClearCounts) -> Launch {
        let (kernel, grid) = ("clear_counts".to_owned(), [(a.vocab as u32).div_ceil(256).min(1024), 1, 1]);
        Launch { kernel, grid, block: 256, shared: 0, arguments: Arguments::ClearCounts(a) }
    }

    pub(super) fn count_tokens(a: CountTokens) -> Launch {
        let (kernel, grid) = ("count_tokens".to_owned(), [(a.len as u32).div_ceil(256).clamp(1, 1024), 1, 1]);
        Launch { kernel, grid, block: 256, shared: 0, arguments: Arguments::CountTokens(a) }
    }

    pub(super) fn copy_rows(a: CopyRows) -> Launch {
        // Threads of a copy share it: the largest of one launch is a piece of a lane, or a block's plane.
        let (kernel, grid) = ("copy_rows".to_owned(), [32, (a.count as u32).min(4096), 1]);
        Launch { kernel, grid, block: 256, shared: 0, arguments: Arguments::CopyRows(a) }
    }

    pub(super) fn sum_rows(a: SumRows) -> Launch {
        let (kernel, grid) = ("sum_rows".to_owned(), [(a.count as u32).min(4096), 1, 1]);
        Launch { kernel, grid, block: 256, shared: 0, arguments: Arguments::SumRows(a) }
    }
}
