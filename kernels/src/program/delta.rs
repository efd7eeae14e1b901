//! The gated delta rule: what recurrent layers have in place of attention.

use super::Norm;
use super::check::{Check, matrix, require};
use crate::device::Weight;
use crate::kv::Stored;

/// Most taps of a convolution; published models have 4.
pub const TAPS_MAX: usize = 8;

/// Norm, projections, causal convolution, gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464) and gated norm:
/// `residual -> attended`, and the state in the pool.
///
/// With `h = norm(residual)`, the six products of a row are those of `h` with the parts of the weight. Query, key and value pass a causal convolution
/// of each channel over the last [`GatedDelta::taps`] rows of the sequence, and SiLU. The query and the key of each head are divided by their length, the
/// query also by `sqrt(key_dim)`. Then, for each value head, whose key head is `head / (value_heads / key_heads)`, with its state `S` of `[key_dim, value_dim]`:
///
/// ```text
/// S = exp(-exp(decay) * softplus(a + decay_bias)) * S
/// S = S + k (sigmoid(b) * (v - k^T S))
/// attended = output_norm(q^T S) * silu(z)
/// ```
///
/// A state is what all rows before leave: that of position 0 is zero, as are inputs of the convolution before it. A step reads the state from the first
/// block of a sequence's table, unless it begins at position 0, and writes it to the last one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDelta {
    /// The layer, as reported to the observer. The pool's layout names its group.
    pub layer: u32,
    /// Of the residual stream; `None`: it is projected as it is.
    pub norm: Option<Norm>,
    /// Six parts: query and key `[key_heads * key_dim, hidden]`, value and `z` `[value_heads * value_dim, hidden]`, `b` and `a` `[value_heads, hidden]`.
    pub weight: Weight,
    /// `[1, channels * taps]`: tap `t` of channel `c` is element `c * taps + t`; the last tap is that of the row itself. Channels are the rows of query,
    /// key and value, in this order.
    pub conv: Weight,
    /// `[1, value_heads]`: the logarithm of the factor of the exponent (`A_log`).
    pub decay: Weight,
    /// `[1, value_heads]`, added to `a` (`dt_bias`).
    pub decay_bias: Weight,
    /// Of each value head, before it is multiplied by `silu(z)`: `[1, value_dim]`.
    pub output_norm: Norm,
    /// Heads of query and key; divides [`GatedDelta::value_heads`].
    pub key_heads: usize,
    /// Heads of the value, and of the state.
    pub value_heads: usize,
    /// Elements of a head's query, and of its key.
    pub key_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Of the convolution: 2 to [`TAPS_MAX`].
    pub taps: usize,
    /// Added to the sum of squares of a head's query and key before they are divided by its root.
    pub length_eps: f32,
}

impl GatedDelta {
    /// Columns of the six products of a row.
    pub fn columns(&self) -> [usize; 6] {
        let (key, value) = (self.key_heads * self.key_dim, self.value_heads * self.value_dim);
        [key, key, value, value, self.value_heads, self.value_heads]
    }

    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// What it keeps of a sequence.
    pub(crate) fn stored(&self) -> Stored {
        let (heads, dim) = (self.value_heads, self.key_dim * self.value_dim);
        Stored::State { heads, dim, inputs: self.taps - 1, channels: self.channels() }
    }

    pub(super) fn check(&self, hidden: usize) -> Check {
        let op = "gated_delta";
        let Self { key_heads, value_heads, key_dim, value_dim, taps, length_eps, .. } = *self;
        self.norm.map_or(Ok(()), |norm| norm.check(op, hidden))?;
        let sizes = [key_heads, value_heads, key_dim, value_dim];
        require(op, sizes.iter().all(|size| *size > 0) && value_heads.is_multiple_of(key_heads), || {
            format!("{value_heads} heads of {value_dim} over {key_heads} key heads of {key_dim}")
        })?;
        require(op, (2..=TAPS_MAX).contains(&taps), || format!("{taps} taps; 2 to {TAPS_MAX}"))?;
        require(op, length_eps >= 0.0 && length_eps.is_finite(), || format!("{length_eps} is added to squares"))?;
        matrix(op, self.weight, self.columns().iter().sum(), hidden)?;
        matrix(op, self.conv, 1, self.channels() * taps)?;
        matrix(op, self.decay, 1, value_heads)?;
        matrix(op, self.decay_bias, 1, value_heads)?;
        self.output_norm.check(op, value_dim)
    }
}
