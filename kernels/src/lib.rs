//! The arithmetic of Baton: one interface to devices, and the backends that implement it.
//!
//! Layer: above `types`, below `engine`. The engine uses only [`device::Device`], gives it a [`program::Program`] and does not know which
//! backend runs it. This crate does not know models, requests, schedulers or networks.
//!
//! * [`device`]: weights in, a compiled program out, steps launched and finished. [`program`], [`step`] and [`storage`] are its terms.
//! * [`host`]: devices whose memory is the host's: they run a program over the [`host::HostKernels`] of one of the next two.
//! * [`mod@reference`]: scalar, without `unsafe`; implements the canonical orders literally, those below and those of `docs/numerics.md`.
//!   Every other backend must equal it.
//! * [`cpu`]: SIMD at the best [`cpu::SimdLevel`] of the processor, several threads. Equals the reference bit for bit. [`cpu::device`] has all
//!   classes; those of tensor cores are for tests, and for checking what a GPU computes.
//! * [`adapter`]: low-rank changes of the linears, by row. [`sampling`]: the next token from logits, in one written order.
//! * [`lagging`]: any device on a separate thread, with late fences and KV that is poisoned until then. It finds callers that read too
//!   early.
//! * [`packed`]: packed weights on disk, which devices of later processes read instead of packing again.
//! * [`roofline`]: peak arithmetic rate and memory bandwidth of this machine, for comparison.
//!
//! # Orders of `f32fma` (revision [`numerics::KERNEL_REVISION`])
//!
//! `docs/numerics.md` has the orders of the other classes ([`numerics::Numerics`]), and says which of these are the same in all classes.
//!
//! All arithmetic is IEEE 754 binary32, round to nearest even, subnormals kept. `fma(a, b, c)` is the fused `a * b + c` with one
//! rounding. Every order below depends only on the position of an element within its own row (feature, token position, head
//! dimension): never on the number of rows, on neighbours, on threads, on vector width, or on the block size of the pool.
//! Results that are NaN are NaN everywhere, with unspecified payload.
//!
//! **Lane sum** ([`numerics::lanes`]). A sequence is padded with `+0` to a multiple of 8. Eight lanes start at `+0`; lane `l` takes the
//! elements `i = l (mod 8)` in ascending order, by `fma(a_i, b_i, lane)` for a dot product and by addition for a sum. The lanes merge as
//! `((0+4)+(2+6)) + ((1+5)+(3+7))`.
//!
//! **Exponential** ([`numerics::exp()`]). Our own, at most 2 ulp off, `exp(±0) = 1`, defined by its source.
//!
//! **Weights** are rounded to nearest even to their format (bf16, f16, f32) and widened exactly to f32 before use.
//!
//! **Embed.** The widened row.
//!
//! **GEMM** `out[m][n] = sum_k x[m][k] * w[n][k]`. K is cut into `partitions` equal contiguous partitions (a power of two, at most
//! [`numerics::PARTITIONS_MAX`], that divides K), each partition into slabs of [`numerics::K_SLAB`] (the last may be shorter). Slab: from `+0`,
//! `acc = fma(x_k, w_k, acc)` with k ascending. Partition: its first slab sum, then slab sums added in order. Partitions merge pairwise
//! in a balanced binary tree, left plus right: `((p0+p1)+(p2+p3)) + ((p4+p5)+(p6+p7))`. `Store::Set` stores the total,
//! `Store::Add` stores `out + total`. A bias is added to the total, with one rounding.
//!
//! **RMSNorm.** `ss` = lane sum of `x_i * x_i` (fma); `r = 1 / sqrt(ss / cols + eps)`, where quotient, sum, root and reciprocal are each
//! rounded; `out_i = (x_i * r) * gain_i`, both products rounded. A norm of heads is the same over the elements of one head.
//!
//! **RoPE.** For `i < dim / 2`, with `a = x[i]`, `b = x[i + dim/2]`, `c`, `s` the table at the row's position:
//! `x[i] = fma(a, c, -(b * s))`, `x[i + dim/2] = fma(b, c, a * s)`; the inner products are rounded. Elements from `dim` on stay as they are.
//!
//! **KV.** k (rotated) and v are rounded to nearest even to the planes' types and widened exactly when read.
//!
//! **Attention**, for each (row at position p, query head h); kv head = `h / (heads / kv_heads)`. Tokens `0 ..= p` are cut into slabs of
//! [`numerics::ATTENTION_SLAB`] from position 0. Slab: `s_j` = lane dot product of q and k_j, times `scale` (rounded); `m` = maximum of `s_j`;
//! `e_j = exp(s_j - m)`; `l` = lane sum of `e_j`; `o_d` from `+0` by `fma(e_j, v_j[d], o_d)` with j ascending. The first slab is the running
//! state `(M, L, O)`; each later slab merges in order: `M' = max(M, m)`, `a = exp(M - M')`, `b = exp(m - M')`, `L = fma(l, b, L * a)`,
//! `O_d = fma(o_d, b, O_d * a)`. Result: `O_d / L`. With a window of `w` tokens, tokens before `p + 1 - w` are left out: the slabs stay where
//! they are, `e_j` of a token that is left out counts as `+0` in its lane, and a slab of such tokens alone does not exist. A sink joins the state
//! of all slabs, see `docs/numerics.md`.
//!
//! **SwiGLU.** `(g / (1 + exp(-g))) * up`, every operation rounded.

pub mod adapter;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod host;
mod kv;
pub mod lagging;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod mutant;
pub mod numerics;
pub mod packed;
pub mod program;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod quantize;
pub mod random;
pub mod reference;
pub mod sampling;
pub mod step;
pub mod storage;

pub use cpu::roofline;
pub use kv::{GroupLayout, KvBinding};
