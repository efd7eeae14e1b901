//! Kernels of a forward pass other than attention, and changes of slots.

use super::scene::Scene;
use crate::cuda::arguments::model::{Embed, Gemm, RmsNorm, Select, SiluMul, epilogue};
use crate::cuda::arguments::pool::{CopyRows, RowsCopy, StridedRows, SumRows};
use crate::cuda::arguments::sampling::{ClearCounts, CountTokens, Scatter};
use crate::cuda::arguments::{In, Out};
use crate::cuda::launch::{self, Launcher};
use crate::device::DeviceError;
use crate::numerics::tensor_core::inputs::Kind;

/// Rows of a product, on both sides of every bucket.
const ROWS: [usize; 16] = [1, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 300];
/// Of which these are enough for a sanitizer.
const FEW_ROWS: [usize; 6] = [1, 9, 17, 33, 65, 129];
/// Features: within a tile, over one, odd.
const FEATURES: [usize; 5] = [16, 17, 40, 130, 67];
/// Columns: less than an instruction's, ragged stages, whole ones.
const COLUMNS: [usize; 7] = [8, 24, 64, 72, 136, 520, 256];
/// Features of a tile of few rows.
const TILES: [usize; 3] = [64, 32, 16];

pub(super) fn all(scene: &mut Scene, small: bool) -> Result<(), DeviceError> {
    gemm(scene, small)?;
    elementwise(scene, small)?;
    slots(scene)?;
    pool(scene)
}

fn gemm(scene: &mut Scene, small: bool) -> Result<(), DeviceError> {
    let rows = if small { &FEW_ROWS[..] } else { &ROWS };
    let mut case = scene.random.below(1000) as usize;
    for &m in rows {
        for tile in TILES {
            for epilogue in [epilogue::STORE_HALF, epilogue::ADD_RESIDUAL, epilogue::STORE_F32, epilogue::STORE_GATED] {
                // Whatever m, every n and k meets every epilogue in a few rounds.
                case += 1;
                let (n, k) = (FEATURES[case % FEATURES.len()], COLUMNS[case % COLUMNS.len()]);
                let n = if epilogue == epilogue::STORE_GATED { n.next_multiple_of(16) } else { n };
                let kind = Kind::ALL[case / 2 % Kind::ALL.len()];
                let bias = epilogue == epilogue::STORE_HALF && case.is_multiple_of(2);
                let gemm = Gemm {
                    x: In::at(scene.halves(kind, m * k, true)?),
                    w: In::at(scene.halves(kind, n * k, false)?),
                    bias: if bias { In::at(scene.random_floats(n, 4.0)?) } else { In::null() },
                    out: Out::at(scene.random_floats(m * n, 4.0)?),
                    m: m as i32,
                    n: n as i32,
                    k: k as i32,
                    epilogue,
                };
                let launcher = scene.launcher;
                scene.run(if m <= launch::FEW_ROWS { launcher.gemm_few(gemm, tile) } else { launcher.gemm(gemm) })?;
                scene.clear();
            }
        }
    }
    Ok(())
}

fn elementwise(scene: &mut Scene, small: bool) -> Result<(), DeviceError> {
    let columns = if small { &[24, 520][..] } else { &[8, 24, 504, 512, 520, 1024, 4096] };
    for &cols in columns {
        for rows in [1, 5] {
            let (x, gain) = (scene.random_floats(rows * cols, 3.0)?, scene.random_floats(cols, 2.0)?);
            let out = scene.empty(rows * cols * 2)?;
            let (eps, rows_, cols_) = (1e-5, rows as i32, cols as i32);
            let norm = RmsNorm {
                x: In::at(x),
                gain: In::at(gain),
                out: Out::at(out),
                rows: rows_,
                cols: cols_,
                eps,
                reserved: 0,
            };
            scene.run(scene.launcher.rms_norm(norm))?;
            let gate_up = scene.halves(Kind::Cancelling, rows * 2 * cols, true)?;
            let inner = scene.empty(rows * cols * 2)?;
            let silu = SiluMul { gate_up: In::at(gate_up), inner: Out::at(inner), rows: rows_, ffn: cols_ };
            scene.run(scene.launcher.silu_mul(silu))?;

            let (vocab, slots) = (37, 3);
            let sampled = [5, 36, vocab + 3];
            // What a slot sampled last, a token, one outside the vocabulary, padding.
            let (ids, of) = ([-1, 7, vocab, -1, -1], [0, 1, 2, 2, -1]);
            let embed = Embed {
                table: In::at(scene.halves(Kind::AnyBits, vocab as usize * cols, true)?),
                ids: In::at(scene.ints(&ids[..rows])?),
                slots: In::at(scene.ints(&of[..rows])?),
                sampled: In::at(scene.ints(&sampled[..slots])?),
                residual: Out::at(scene.empty(rows * cols * 4)?),
                rows: rows_,
                hidden: cols_,
                vocab,
                reserved: 0,
            };
            scene.run(scene.launcher.embed(embed))?;
            let (query, stride) = (cols / 8 * 4, cols + 16);
            let select = Select {
                chosen: In::at(scene.ints(&[4, -1, 0, 3, 3][..rows])?),
                residual: In::at(scene.random_floats(5 * cols, 1.0)?),
                residual_out: Out::at(scene.empty(rows * cols * 4)?),
                q: In::at(scene.halves(Kind::AnyBits, 5 * stride, true)?),
                q_out: Out::at(scene.empty(rows * query * 2)?),
                rows: rows_,
                hidden: cols_,
                query: query as i32,
                q_stride: stride as i32,
            };
            scene.run(scene.launcher.select(select))?;
            scene.clear();
        }
    }
    Ok(())
}

/// Block tables and counts of tokens.
fn slots(scene: &mut Scene) -> Result<(), DeviceError> {
    for count in [1, 255, 700] {
        let array = scene.ints(&vec![7; 2 * count])?;
        let pairs = (0..count as i32).flat_map(|i| if i % 5 == 3 { [-1, 9] } else { [2 * i, i * i] });
        let (pairs, count) = (scene.ints(&pairs.collect::<Vec<_>>())?, count as i32);
        scene.run(Launcher::scatter(Scatter { array: Out::at(array), pairs: In::at(pairs), count, reserved: 0 }))?;
    }
    for vocab in [11, 300, 5001] {
        let counts = scene.ints(&vec![3; 3 * vocab])?;
        scene.run(Launcher::clear_counts(ClearCounts { counts: Out::at(counts), row: 1, vocab: vocab as i32 }))?;
        for len in [1, 600] {
            let tokens: Vec<i32> = (0..len).map(|_| scene.random.below(vocab as u32 + 2) as i32).collect();
            let tokens = In::at(scene.ints(&tokens)?);
            let (counts, vocab, prompt_len) = (Out::at(counts), vocab as i32, len / 2);
            scene.run(Launcher::count_tokens(CountTokens { counts, tokens, row: 1, vocab, len, prompt_len }))?;
        }
    }
    scene.clear();
    Ok(())
}

/// Copies and checksums of rows: aligned ones, odd ones, long ones.
fn pool(scene: &mut Scene) -> Result<(), DeviceError> {
    let rows = |start, row_bytes, stride, rows| StridedRows { start, row_bytes, stride, rows };
    let lists = [
        rows(0, 4096, 4096, 3),
        rows(16, 256, 1024, 9),
        rows(3, 37, 101, 50),
        rows(7, 1, 1, 1),
        rows(1, 9000, 9000, 1),
        rows(1024, 1024, 1024, 1),
    ];
    let len = 20_000;
    let pool = scene.halves(Kind::AnyBits, len / 2, true)?;
    let to = scene.empty(len * 2)?;
    for (i, from) in lists.iter().enumerate() {
        let bytes = from.row_bytes * from.rows;
        // The same shape, dense, and dense at an odd place.
        for target in [*from, rows(0, bytes, bytes, 1), rows(5 + i as u64, bytes, bytes, 1)] {
            let copies = In::at(scene.structs(&[RowsCopy { from: *from, to: target }])?);
            let (from, to) = (In::at(pool), Out::at(to));
            scene.run(Launcher::copy_rows(CopyRows { from, to, copies, count: 1, reserved: 0 }))?;
        }
    }
    let (sums, count) = (scene.empty(lists.len() * 8)?, lists.len() as i32);
    let lists = In::at(scene.structs(&lists)?);
    scene.run(Launcher::sum_rows(SumRows { pool: In::at(pool), lists, sums: Out::at(sums), count, reserved: 0 }))?;
    scene.clear();
    Ok(())
}
