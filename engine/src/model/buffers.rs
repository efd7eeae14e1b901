//! The activations of one step, allocated once at their largest size.

use super::ModelConfig;
use crate::models::{DecoderSpec, LayerSpec};
use baton_kernels::ops::{Ops, OpsError, Tensor};

/// Device tensors; the first index of each shape is a bound, a step uses the rows it needs.
pub(super) struct Buffers {
    /// Residual stream, `[rows_max, hidden]`. Never rounded between layers.
    pub(super) residual: Tensor,
    /// Normalized residual, input of the GEMMs, `[rows_max, hidden]`.
    pub(super) normed: Tensor,
    /// `[rows_max, heads * head_dim]`
    pub(super) query: Tensor,
    /// `[rows_max, kv_heads * head_dim]`
    pub(super) key: Tensor,
    /// `[rows_max, kv_heads * head_dim]`
    pub(super) value: Tensor,
    /// Attention result before its output projection, `[rows_max, heads * head_dim]`.
    pub(super) attended: Tensor,
    /// Gate of the MLP, `[rows_max, ffn]`.
    pub(super) gate: Tensor,
    /// Up projection of the MLP, `[rows_max, ffn]`.
    pub(super) up: Tensor,
    /// Rows of `residual` that need logits, `[logit_rows_max, hidden]`.
    pub(super) last_residual: Tensor,
    /// Rows of `attended` that need logits, `[logit_rows_max, heads * head_dim]`.
    pub(super) last_attended: Tensor,
    /// Logits of the selected rows, `[logit_rows_max, vocab]`.
    pub(super) logits: Tensor,
}

impl Buffers {
    pub(super) fn alloc(ops: &dyn Ops, spec: &DecoderSpec, config: &ModelConfig) -> Result<Self, OpsError> {
        let largest = |of: fn(&LayerSpec) -> usize| spec.layers.iter().map(of).max().unwrap_or(0);
        let (query, kv) = (largest(|l| l.attention.query_dim()), largest(|l| l.attention.kv_dim()));
        let ffn = largest(|l| l.ffn);
        let rows = |cols| ops.alloc(config.rows_max, cols);
        // A step never has more logit rows than rows.
        let logit_rows = |cols| ops.alloc(config.logit_rows_max.min(config.rows_max), cols);
        Ok(Self {
            residual: rows(spec.hidden)?,
            normed: rows(spec.hidden)?,
            query: rows(query)?,
            key: rows(kv)?,
            value: rows(kv)?,
            attended: rows(query)?,
            gate: rows(ffn)?,
            up: rows(ffn)?,
            last_residual: logit_rows(spec.hidden)?,
            last_attended: logit_rows(query)?,
            logits: logit_rows(spec.vocab)?,
        })
    }
}
