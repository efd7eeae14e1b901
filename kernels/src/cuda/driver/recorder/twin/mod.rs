//! Host twins: what each kernel computes, on recorded memory. A host twin is scalar code; for products, the CPU's vector kernels of the class,
//! which are checked against the scalar twin.

mod rows;
mod samples;

use super::library;
use super::memory::Memory;
use crate::cpu::{CpuConfig, TensorCoreKernels};
use crate::cuda::arguments::Out;
use crate::cuda::arguments::known::{KnownCases, KnownTiles};
use crate::cuda::arguments::model::{Attend, Embed, Gemm, KvPlanes, RmsNorm, RopeStore, Select, SiluMul, epilogue};
use crate::cuda::driver::Launch;
use crate::cuda::driver::command::{Arguments, Product};
use crate::cuda::driver::defect::SeededDefect;
use crate::cuda::known;
use crate::cuda::launch::FEW_ROWS;
use crate::device::{Role, StoredRows};
use crate::host::{HostKernels, Store};
use crate::numerics::{Half, Numerics, TensorCore, silu};
use crate::reference::attention_splits::{Merged, TensorHead};
use crate::reference::elementwise;
use crate::storage::StorageFormat;
use std::ops::Range;

/// The host twins of a class.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda::driver) struct Twin {
    pub(in crate::cuda::driver) cores: TensorCore,
    pub(in crate::cuda::driver) half: Half,
    /// What is wrong with it on purpose.
    pub(in crate::cuda::driver) defect: Option<SeededDefect>,
}

impl Twin {
    /// Runs a kernel.
    pub(in crate::cuda::driver) fn run(&self, launch: &Launch, memory: &mut Memory) {
        let other = match self.half {
            Half::Bf16 => "_f16",
            Half::F16 => "_bf16",
        };
        assert!(!launch.kernel.contains(other), "{} on memory of {:?}", launch.kernel, self.half);
        match &launch.arguments {
            Arguments::Embed(a) => self.embed(a, memory),
            Arguments::RmsNorm(a) => self.rms_norm(a, memory),
            Arguments::Gemm(a) => self.gemm(a, memory),
            Arguments::RopeStore(a) => self.rope_store(a, memory),
            Arguments::AttendDecode(a) if self.defect == Some(SeededDefect::Scale) => {
                self.attend_decode(&Attend { factor: a.factor * 0.5, ..*a }, memory);
            }
            Arguments::AttendPrefill(a) => self.attend_prefill(a, launch.grid[0] as usize, memory),
            Arguments::AttendDecode(a) => self.attend_decode(a, memory),
            Arguments::AttendMerge(a) => self.attend_merge(a, memory),
            Arguments::SiluMul(a) => self.silu_mul(a, memory),
            Arguments::Select(a) => select(a, memory),
            Arguments::Sample(a) => samples::sample(a, memory),
            Arguments::Scatter(a) => samples::scatter(a, memory),
            Arguments::ClearCounts(a) => samples::clear_counts(a, memory),
            Arguments::CountTokens(a) => samples::count_tokens(a, memory),
            Arguments::CopyRows(a) => rows::copy(a, memory),
            Arguments::SumRows(a) => rows::sum(a, memory),
            Arguments::KnownTiles(a) => self.known_tiles(a, memory),
            Arguments::KnownCases(a) => known_cases(a, memory),
        }
    }

    fn wide(&self, bits: &[u16]) -> Vec<f32> {
        bits.iter().map(|bits| self.half.to_f32(*bits)).collect()
    }

    fn halves(&self, numbers: &[f32]) -> Vec<u16> {
        numbers.iter().map(|x| self.half.from_f32(*x)).collect()
    }

    fn norm(&self, x: &[f32], gain: &[f32], eps: f32) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        elementwise::rms_norm(Numerics::TensorCore { cores: self.cores, half: self.half }, x, gain, eps, &mut out);
        out
    }

    fn embed(&self, a: &Embed, memory: &mut Memory) {
        let hidden = a.hidden as usize;
        for row in 0..a.rows as usize {
            let (id, slot) = (memory.read(a.ids, row, 1)[0], memory.read(a.slots, row, 1)[0]);
            let out = if slot < 0 {
                vec![0.0; hidden]
            } else {
                let id: i32 = if id < 0 { memory.read(a.sampled, slot as usize, 1)[0] } else { id };
                let id = if (0..a.vocab).contains(&id) { id as usize } else { 0 };
                self.wide(&memory.read(a.table, id * hidden, hidden))
            };
            memory.write(a.residual, row * hidden, &out);
        }
    }

    fn rms_norm(&self, a: &RmsNorm, memory: &mut Memory) {
        let (rows, cols) = (a.rows as usize, a.cols as usize);
        let normed = self.norm(&memory.read(a.x, 0, rows * cols), &memory.read(a.gain, 0, cols), a.eps);
        memory.write(a.out, 0, &self.halves(&normed));
    }

    /// A product by the library, which may sum parts of K apart.
    pub(super) fn product(&self, Product { product, by, .. }: &Product, memory: &mut Memory) {
        let (m, k) = (product.m as usize, product.k as usize);
        let parts = library::parts(by, m);
        let part = k.div_ceil(parts).next_multiple_of(16);
        let (x, w): (Vec<u16>, Vec<u16>) =
            (memory.read(product.x, 0, m * k), memory.read(product.w, 0, product.n as usize * k));
        let mut totals = vec![0.0; m * product.n as usize];
        for columns in (0..k).step_by(part).map(|first| first..(first + part).min(k)) {
            let of = |rows: &[u16]| rows.chunks_exact(k).flat_map(|row| row[columns.clone()].to_vec()).collect();
            let sums = self.products(columns.len(), of(&w), of(&x));
            totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        }
        self.store_totals(product, &totals, memory);
    }

    pub(in crate::cuda::driver) fn gemm(&self, a: &Gemm, memory: &mut Memory) {
        let (m, n, k) = (a.m as usize, a.n as usize, a.k as usize);
        let mut x = memory.read(a.x, 0, m * k);
        if self.defect == Some(SeededDefect::Tail) && m <= FEW_ROWS && !k.is_multiple_of(64) {
            // The columns behind the last whole stage are left out.
            x.chunks_exact_mut(k).for_each(|row| row[k / 64 * 64..].fill(0));
        }
        let totals = self.products(k, memory.read(a.w, 0, n * k), x);
        self.store_totals(a, &totals, memory);
    }

    fn store_totals(&self, a: &Gemm, totals: &[f32], memory: &mut Memory) {
        let (m, n) = (a.m as usize, a.n as usize);
        let total = |i: usize| totals[i];
        let bias: Option<Vec<f32>> = a.bias.address().map(|at| memory.at(at, n));
        let out = a.out.address().expect("an output");
        match a.epilogue {
            epilogue::STORE_HALF => {
                let biased = |i: usize| bias.as_ref().map_or_else(|| total(i), |bias| total(i) + bias[i % n]);
                let halves: Vec<u16> = (0..m * n).map(|i| self.half.from_f32(biased(i))).collect();
                memory.put(out, &halves);
            }
            epilogue::ADD_RESIDUAL => {
                let before: Vec<f32> = memory.at(out, m * n);
                let sums: Vec<f32> = before.iter().enumerate().map(|(i, x)| x + total(i)).collect();
                memory.put(out, &sums);
            }
            epilogue::STORE_GATED => {
                let rounded: Vec<f32> =
                    totals.iter().map(|total| self.half.to_f32(self.half.from_f32(*total))).collect();
                memory.put(out, &self.halves(&gated(&rounded)));
            }
            epilogue::STORE_F32 => memory.put(out, &(0..m * n).map(total).collect::<Vec<f32>>()),
            other => panic!("epilogue {other}"),
        }
    }

    /// `[m, n]` of `w [n, k]` and `x [m, k]`, by the vectors of the CPU: the scalar reference takes a hundred times as long.
    fn products(&self, k: usize, w: Vec<u16>, x: Vec<u16>) -> Vec<f32> {
        let (m, n) = (x.len() / k, w.len() / k);
        let numerics = Numerics::TensorCore { cores: self.cores, half: self.half };
        let kernels = TensorCoreKernels::new(CpuConfig { numerics, ..CpuConfig::default() }).expect("one thread");
        let format = match self.half {
            Half::Bf16 => StorageFormat::Bf16,
            Half::F16 => StorageFormat::F16,
        };
        let bytes: Vec<u8> = w.into_iter().flat_map(u16::to_le_bytes).collect();
        let rows = StoredRows { rows: n, format, bytes: &bytes };
        let (w, x) = (kernels.pack(Role::Out, k, &[rows]).expect("whole rows"), self.wide(&x));
        let (mut input, mut out) = (Default::default(), vec![0.0; m * n]);
        kernels.input(&x, m, &w, &mut input);
        kernels.linear(&input, &w, 0, 1, Store::Set, &mut [&mut out]);
        out
    }

    fn rope_store(&self, a: &RopeStore, memory: &mut Memory) {
        let (heads, kv_heads, dim) = (a.heads as usize, a.kv_heads as usize, a.head_dim as usize);
        let (cols, half_dim) = ((heads + 2 * kv_heads) * dim, a.rope_dim as usize / 2);
        for row in 0..a.rows as usize {
            let (slot, position) = (memory.read(a.slots, row, 1)[0], memory.read(a.positions, row, 1)[0]);
            if slot < 0 {
                continue;
            }
            let mut x = self.wide(&memory.read_out(a.qkv, row * cols, cols));
            let (cos, sin) = (
                memory.read(a.cos, position as usize * half_dim, half_dim),
                memory.read(a.sin, position as usize * half_dim, half_dim),
            );
            for head in 0..heads + kv_heads {
                let (gain, eps) = if head < heads { (a.q_gain, a.q_eps) } else { (a.k_gain, a.k_eps) };
                let x = &mut x[head * dim..(head + 1) * dim];
                if let Some(gain) = gain.address() {
                    let normed = self.norm(x, &memory.at::<f32>(gain, dim), eps);
                    x.copy_from_slice(&normed);
                }
                for i in 0..half_dim {
                    let (first, second) = (x[i], x[i + half_dim]);
                    x[i] = first.mul_add(cos[i], -(second * sin[i]));
                    x[i + half_dim] = second.mul_add(cos[i], first * sin[i]);
                }
            }
            let x = self.halves(&x);
            let (q, kv) = x.split_at(heads * dim);
            memory.write(a.qkv, row * cols, q);
            let (k, v) = kv.split_at(kv_heads * dim);
            let mut position = position as usize;
            if self.defect == Some(SeededDefect::BlockIndex) {
                // The place within a block of half the tokens.
                position &= !(a.kv.block_tokens as usize / 2);
            }
            let at = place(&a.kv, slot, position, memory);
            memory.write(Out::<u16>::at(address(a.kv.k, at)), 0, k);
            memory.write(Out::<u16>::at(address(a.kv.v, at)), 0, v);
        }
    }

    /// Keys and values of a KV head at `tokens`; those before are zeros.
    fn head(&self, a: &Attend, slot: i32, kv_head: usize, tokens: &Range<usize>, memory: &Memory) -> TensorHead {
        let dim = a.head_dim as usize;
        let [k, v] = [a.kv.k, a.kv.v].map(|plane| {
            let mut out = vec![0u16; tokens.start * dim];
            for token in tokens.clone() {
                let at = place(&a.kv, slot, token, memory) + kv_head * dim * 2;
                out.extend(memory.at::<u16>(address(plane, at), dim));
            }
            out
        });
        TensorHead::new(self.cores, self.half, a.factor, dim, k, v)
    }

    fn query(&self, a: &Attend, row: usize, head: usize, memory: &Memory) -> Vec<u16> {
        let dim = a.head_dim as usize;
        memory.read(a.q, row * a.q_stride as usize + head * dim, dim)
    }

    fn store(&self, a: &Attend, row: usize, head: usize, out: &[f32], memory: &mut Memory) {
        let dim = a.head_dim as usize;
        memory.write(a.out, (row * a.heads as usize + head) * dim, &self.halves(out));
    }

    fn attend_prefill(&self, a: &Attend, tiles: usize, memory: &mut Memory) {
        let (heads, kv_heads, dim) = (a.heads as usize, a.kv_heads as usize, a.head_dim as usize);
        for tile in 0..tiles {
            let [slot, first, rows, position] = memory.read(a.tiles, 4 * tile, 4)[..] else { unreachable!("four") };
            if slot < 0 {
                continue;
            }
            let (first, rows, position) = (first as usize, rows as usize, position as usize);
            for kv_head in 0..kv_heads {
                let all = tokens_of(a, position).start..position + rows;
                let kv = self.head(a, slot, kv_head, &all, memory);
                for row in 0..rows {
                    let tokens = tokens_of(a, position + row);
                    for head in kv_head * heads / kv_heads..(kv_head + 1) * heads / kv_heads {
                        let (q, mut out) = (self.query(a, first + row, head, memory), vec![0.0; dim]);
                        kv.result(TensorHead::splits(&tokens).map(|split| kv.split(&q, &tokens, split)), &mut out);
                        self.store(a, first + row, head, &out, memory);
                    }
                }
            }
        }
    }

    fn attend_decode(&self, a: &Attend, memory: &mut Memory) {
        let (heads, kv_heads, dim) = (a.heads as usize, a.kv_heads as usize, a.head_dim as usize);
        for row in 0..a.rows as usize {
            let slot = memory.read(a.slots, row, 1)[0];
            if slot < 0 {
                continue;
            }
            let tokens = tokens_of(a, memory.read(a.positions, row, 1)[0] as usize);
            let splits = TensorHead::splits(&tokens);
            assert!(splits.clone().count() <= a.splits as usize, "row {row} has more than {} splits", a.splits);
            for head in 0..heads {
                let kv = self.head(a, slot, head * kv_heads / heads, &tokens, memory);
                let q = self.query(a, row, head, memory);
                if splits.clone().count() == 1 {
                    let mut out = vec![0.0; dim];
                    kv.result(splits.clone().map(|split| kv.split(&q, &tokens, split)), &mut out);
                    self.store(a, row, head, &out, memory);
                    continue;
                }
                for (i, split) in splits.clone().enumerate() {
                    let Merged { max, sum, o } = kv.split(&q, &tokens, split);
                    let at = ((row * heads + head) * a.splits as usize + i) * (dim + 2);
                    memory.write(a.partials, at, &[&[max, sum], &o[..]].concat());
                }
            }
        }
    }

    fn attend_merge(&self, a: &Attend, memory: &mut Memory) {
        let (heads, dim) = (a.heads as usize, a.head_dim as usize);
        for row in 0..a.rows as usize {
            if memory.read(a.slots, row, 1)[0] < 0 {
                continue;
            }
            let splits = TensorHead::splits(&tokens_of(a, memory.read(a.positions, row, 1)[0] as usize)).count();
            for head in (0..heads).filter(|_| splits > 1) {
                let order = TensorHead::new(self.cores, self.half, a.factor, dim, Vec::new(), Vec::new());
                let merged: Vec<Merged> = (0..splits)
                    .map(|split| {
                        let at = ((row * heads + head) * a.splits as usize + split) * (dim + 2);
                        let state = memory.read_out(a.partials, at, dim + 2);
                        Merged { max: state[0], sum: state[1], o: state[2..].to_vec() }
                    })
                    .collect();
                let mut out = vec![0.0; dim];
                order.result(merged.into_iter(), &mut out);
                self.store(a, row, head, &out, memory);
            }
        }
    }

    fn known_tiles(&self, a: &KnownTiles, memory: &mut Memory) {
        let k = a.k as usize;
        for i in 0..a.tiles as usize * 16 * 8 {
            let (row, column) = (i / 8, i / 128 * 8 + i % 8);
            let (x, w) = (memory.read(a.a, row * k, k), memory.read(a.b, column * k, k));
            let c = memory.read(a.c, i, 1)[0];
            memory.write(a.d, i, &[self.cores.dot(self.half, c, &x, &w)]);
        }
    }

    fn silu_mul(&self, a: &SiluMul, memory: &mut Memory) {
        let (rows, ffn) = (a.rows as usize, a.ffn as usize);
        for row in 0..rows {
            let mut inner = gated(&self.wide(&memory.read(a.gate_up, row * 2 * ffn, 2 * ffn)));
            if self.defect == Some(SeededDefect::Unwritten) && row + 1 == rows {
                inner.truncate(ffn - 8);
            }
            memory.write(a.inner, row * ffn, &self.halves(&inner));
        }
    }
}

/// The activation of 8 of gate, then 8 of up, and so on.
fn gated(both: &[f32]) -> Vec<f32> {
    let (pairs, _) = both.as_chunks::<16>();
    pairs.iter().flat_map(|pair| (0..8).map(|i| silu(pair[i]) * pair[8 + i])).collect()
}

/// The tokens that a row attends to.
fn tokens_of(a: &Attend, position: usize) -> Range<usize> {
    let first = if a.window == 0 { 0 } else { (position + 1).saturating_sub(a.window as usize) };
    first..position + 1
}

fn address(plane: Out<u8>, at: usize) -> crate::cuda::driver::Address {
    plane.address().expect("a plane").plus(at)
}

/// Offset of a token within a plane.
fn place(kv: &KvPlanes, slot: i32, token: usize, memory: &Memory) -> usize {
    let (size, stride) = (kv.block_tokens as usize, kv.table_stride as usize);
    assert!(size.is_power_of_two(), "kernels shift by a block's size, here {size}");
    let block = memory.read(kv.table, slot as usize * stride + token / size % stride, 1)[0];
    assert!(block >= 0, "slot {slot} has no block for token {token}");
    block as usize * kv.block_bytes as usize + token % size * kv.token_bytes as usize
}

fn known_cases(a: &KnownCases, memory: &mut Memory) {
    for i in 0..a.count as usize {
        let (answer, is_f32) = known::answer(&memory.element(a.cases, i));
        if is_f32 {
            // As a number, so that whoever compares knows NaN.
            let at = a.answers.address().expect("answers").plus(i * 8);
            memory.put(at, &[f32::from_bits(answer as u32)]);
            memory.put(at.plus(4), &[(answer >> 32) as u32]);
        } else {
            memory.write(a.answers, i, &[answer]);
        }
    }
}

fn select(a: &Select, memory: &mut Memory) {
    let (hidden, query, stride) = (a.hidden as usize, a.query as usize, a.q_stride as usize);
    for row in 0..a.rows as usize {
        let chosen = memory.read(a.chosen, row, 1)[0];
        let (residual, q): (Vec<f32>, Vec<u16>) = if chosen < 0 {
            (vec![0.0; hidden], vec![0; query])
        } else {
            (
                memory.read(a.residual, chosen as usize * hidden, hidden),
                memory.read(a.q, chosen as usize * stride, query),
            )
        };
        memory.write(a.residual_out, row * hidden, &residual);
        memory.write(a.q_out, row * query, &q);
    }
}
