//! The description of a gated delta rule: what recurrent layers have in place of attention.

use super::DecoderSpec;
use super::spec::{in_range, positive};
use baton_kernels::program::TAPS_MAX;
use baton_types::LayerKv;

/// A gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464) behind a causal convolution; the formulas:
/// [`GatedDelta`](baton_kernels::program::GatedDelta). It keeps one state of a sequence, whatever its length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDeltaSpec {
    /// Heads of query and key; divides `value_heads`.
    pub key_heads: usize,
    /// Heads of the value, of the state, and of the output.
    pub value_heads: usize,
    /// Elements of a head's query, and of its key.
    pub key_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Rows that the convolution of each channel reaches over, the row itself included.
    pub taps: usize,
    /// Added to the sum of squares of a head's query and key before they are divided by its root.
    pub length_eps: f32,
}

impl GatedDeltaSpec {
    /// Elements of all heads' queries, and of their keys.
    pub fn query_dim(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of all heads' values, and of what goes into the output.
    pub fn attended_dim(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: query, key and value.
    pub fn channels(&self) -> usize {
        2 * self.query_dim() + self.attended_dim()
    }

    /// What is stored of a sequence.
    pub(super) fn state(&self) -> LayerKv {
        LayerKv::State {
            heads: self.value_heads as u32,
            key_dim: self.key_dim as u32,
            value_dim: self.value_dim as u32,
            inputs: self.taps.saturating_sub(1) as u32,
            channels: self.channels() as u32,
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let (Self { key_heads, value_heads, key_dim, value_dim, taps, .. }, max) = (*self, DecoderSpec::DIMENSION_MAX);
        in_range("key heads of a gated delta rule", key_heads, max)?;
        in_range("value heads of a gated delta rule", value_heads, max)?;
        in_range("elements of a key of a gated delta rule", key_dim, max)?;
        in_range("elements of a value of a gated delta rule", value_dim, max)?;
        in_range("channels of a convolution", self.channels(), max)?;
        in_range("elements of a head's state", key_dim.saturating_mul(value_dim), max)?;
        if !value_heads.is_multiple_of(key_heads) {
            return Err(format!("{value_heads} value heads do not divide among {key_heads} key heads"));
        }
        if !(2..=TAPS_MAX).contains(&taps) {
            return Err(format!("taps of a convolution is {taps}; 2 to {TAPS_MAX} is possible"));
        }
        positive("eps of the lengths of queries and keys", self.length_eps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{ModelSource as _, RandomModel};
    use baton_types::{Dtype, GroupKind};

    const DELTA: GatedDeltaSpec =
        GatedDeltaSpec { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, taps: 4, length_eps: 1e-6 };

    #[test]
    fn layers_with_a_state_form_a_group_of_their_own() {
        let mut spec = RandomModel::parse("random:layers=4").unwrap().spec().clone();
        spec.layers[..3].iter_mut().for_each(|layer| layer.delta = Some(DELTA));
        spec.check().unwrap();
        let layout = spec.kv_layout(16, Dtype::Bf16).unwrap();
        let groups: Vec<_> = layout.groups().iter().map(|group| (group.kind, group.layers.clone())).collect();
        assert_eq!(groups, [(GroupKind::Full, vec![3]), (GroupKind::State, vec![0, 1, 2])]);
        let planes: Vec<_> = layout.groups()[1].planes.iter().map(|plane| (plane.heads(), plane.dim())).collect();
        assert_eq!(planes, [(3, 2 * 16 + 24), (4, 48)]);
    }

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        let check = |part: &str, change: fn(&mut GatedDeltaSpec)| {
            let mut spec = RandomModel::parse("random:layers=2").unwrap().spec().clone();
            let mut delta = DELTA;
            change(&mut delta);
            spec.layers[1].delta = Some(delta);
            let message = spec.check().unwrap_err();
            assert!(message.contains(part), "{message}");
        };
        check("key heads of a gated delta rule is 0", |delta| delta.key_heads = 0);
        check("4 value heads do not divide among 3 key heads", |delta| delta.key_heads = 3);
        check("elements of a value of a gated delta rule is 0", |delta| delta.value_dim = 0);
        check("channels of a convolution", |delta| delta.key_dim = 1 << 20);
        check("taps of a convolution is 1; 2 to 8", |delta| delta.taps = 1);
        check("taps of a convolution is 9", |delta| delta.taps = 9);
        check("eps of the lengths", |delta| delta.length_eps = 0.0);
    }
}
