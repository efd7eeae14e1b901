//! Shared by all backends: the constants of the numerics class and the scalar form of each canonical order.

mod class;
mod exp;
mod exp2;
pub mod flushed;
mod gates;
pub mod lanes;
pub mod round;
mod sink;
mod soft_cap;
pub mod tensor_core;

pub use class::Numerics;
pub use exp::{clamped_swiglu, exp, gelu_tanh, silu};
pub use exp2::exp2;
pub use gates::{decay, gated, log1p, sigmoid, softplus};
pub use sink::{join_sink, join_sink_by_exp2};
pub use soft_cap::{soft_cap, soft_cap_by_exp2};
pub use tensor_core::{Half, TensorCore};

/// Revision of the canonical orders, of sampling too. Increase it with any change that can change a bit or a token.
pub const KERNEL_REVISION: u32 = 2;

/// Products summed into one GEMM slab. Long enough to make slab totals negligible, short enough to bound the error of one chain.
pub const K_SLAB: usize = 256;

/// Most partitions of a split GEMM: the largest degree of tensor parallelism whose bits do not depend on the degree.
pub const PARTITIONS_MAX: usize = 8;

/// Values of one row that share a scale in `i8x32`.
pub const QUANTIZED_BLOCK: usize = 32;

/// 2^-72. Blocks of activations with a smaller largest value count as zero: from there on, no sum of a product can be subnormal, since scales of
/// weights are multiples of 2^-24.
pub(crate) const LARGEST_MIN: f32 = f32::from_bits((127 - 72) << 23);

/// Tokens of one split of attention in all classes but `f32fma`, counted from position 0.
pub const ATTENTION_SPLIT: usize = 512;

/// Tokens of a split after which its maximum is updated.
pub const ATTENTION_BLOCK: usize = 64;

/// Tokens of one attention slab of `f32fma`, counted from position 0. Independent of the block size of any pool.
pub const ATTENTION_SLAB: usize = 64;

pub(crate) use exp::{
    EXP_BIAS, EXP_HI, EXP_LN2_HI, EXP_LN2_LO, EXP_LO, EXP_LOG2E, EXP_MAGIC, EXP_POLY, GELU_CUBE, GELU_LINE,
};
