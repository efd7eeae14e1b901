//! A program's operations with their weights' addresses.

use super::arguments::Address;
use super::arguments::model::epilogue;

/// A norm of the residual stream, or of heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) gain: Address,
    pub(super) eps: f32,
}

/// A matrix `[n, k]` of T.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) at: Address,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// Norm, projections, rotation and store of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Qkv {
    pub(super) layer: u32,
    pub(super) norm: Norm,
    pub(super) weight: Matrix,
    pub(super) bias: Option<Address>,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Of query and key.
    pub(super) head_norms: Option<[Norm; 2]>,
    pub(super) cos: Address,
    pub(super) sin: Address,
    pub(super) rope_dim: usize,
}

/// Attention of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) layer: u32,
    /// Of the scores, as a power of two.
    pub(super) factor: f32,
    pub(super) window: u32,
}

/// An operation with its weights.
#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    Embed(Matrix),
    Qkv(Qkv),
    Attend(Attention),
    Out(Matrix),
    GateUp(Norm, Matrix),
    Down(Matrix),
    Select,
    Head(Norm, Matrix),
}

/// The products of whole steps, with what is done with them. The head is computed for few rows.
pub(super) fn products(ops: &[Op]) -> impl Iterator<Item = (Matrix, i32)> {
    ops.iter().filter_map(|op| match op {
        Op::Qkv(Qkv { weight, bias: None, .. }) | Op::GateUp(_, weight) => Some((*weight, epilogue::STORE_HALF)),
        Op::Out(weight) | Op::Down(weight) => Some((*weight, epilogue::ADD_RESIDUAL)),
        Op::Qkv(_) | Op::Embed(_) | Op::Attend(_) | Op::Select | Op::Head(..) => None,
    })
}
