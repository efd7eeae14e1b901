//! Kernels with their grids. `kernels/cu/README.md` has the rules; they are pure functions of shapes and of the GPU's size.

use super::arguments::model::{Attend, Embed, Gemm, RmsNorm, RopeStore, Select, SiluMul};
use super::arguments::pool::{CopyRows, SumRows};
use super::arguments::sampling::{ClearCounts, CountTokens, Sample, Scatter};
use super::driver::Launch;
use super::driver::command::Arguments;
use crate::numerics::Half;

/// Most rows of a product whose weights are streamed.
pub(super) const FEW_ROWS: usize = 128;

/// Query rows of a tile of prefill attention, times query heads of a KV head.
const TILE_ROWS: usize = 64;

/// Rows of one tile of prefill attention, for so many query heads of one KV head.
pub(super) fn tile_rows(group: usize) -> usize {
    (TILE_ROWS / group).max(1)
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
        Launch { kernel: self.name("rms_norm"), grid, block: 512, shared: 0, arguments: Arguments::RmsNorm(a) }
    }

    pub(super) fn gemm(&self, a: Gemm) -> Launch {
        let (m, n) = (a.m as usize, a.n as usize);
        if m > FEW_ROWS {
            let grid = [m.div_ceil(128) as u32, n.div_ceil(128) as u32, 1];
            let kernel = self.name("gemm_many");
            return Launch { kernel, grid, block: 256, shared: 0, arguments: Arguments::Gemm(a) };
        }
        // The widest tile of features that leaves no processor without one.
        let busy = |tile: &&usize| n.div_ceil(**tile) >= self.processors as usize;
        let tile = [64, 32].iter().find(busy).copied().unwrap_or(16);
        let rows = [8, 16, 32, 64].into_iter().find(|rows| m <= *rows).unwrap_or(FEW_ROWS);
        let kernel = format!("{}_n{tile}_m{rows}", self.name("gemm_few"));
        let grid = [n.div_ceil(tile) as u32, 1, 1];
        Launch { kernel, grid, block: 128, shared: 0, arguments: Arguments::Gemm(a) }
    }

    pub(super) fn rope_store(&self, a: RopeStore) -> Launch {
        let grid = [a.rows as u32, 1, 1];
        Launch { kernel: self.name("rope_store"), grid, block: 256, shared: 0, arguments: Arguments::RopeStore(a) }
    }

    /// Padded elements of a head, for which a kernel is compiled.
    fn head_dim(dim: i32) -> usize {
        [64, 128].into_iter().find(|padded| dim as usize <= *padded).unwrap_or(256)
    }

    pub(super) fn attend_prefill(&self, a: Attend, tiles: usize) -> Launch {
        let kernel = format!("{}_d{}", self.name("attend_prefill"), Self::head_dim(a.head_dim));
        let grid = [tiles as u32, a.kv_heads as u32, 1];
        Launch { kernel, grid, block: 128, shared: 0, arguments: Arguments::AttendPrefill(a) }
    }

    pub(super) fn attend_decode(&self, a: Attend) -> [Launch; 2] {
        let kernel = format!("{}_d{}", self.name("attend_decode"), Self::head_dim(a.head_dim));
        let grid = [a.splits as u32, a.kv_heads as u32, a.rows as u32];
        let decode = Launch { kernel, grid, block: 128, shared: 0, arguments: Arguments::AttendDecode(a) };
        let (kernel, grid) = (self.name("attend_merge"), [a.heads as u32, a.rows as u32, 1]);
        [decode, Launch { kernel, grid, block: 128, shared: 0, arguments: Arguments::AttendMerge(a) }]
    }

    pub(super) fn silu_mul(&self, a: SiluMul) -> Launch {
        let grid = [(a.ffn as u32).div_ceil(256 * 8), a.rows as u32, 1];
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
