//! Linears that a Hugging Face folder stores quantized, by `quantization_config` of `config.json`.
//!
//! A linear `X` is then several tensors: `X.weight` in FP8 with its scales, or `X.qweight` in 4 bits with zero points and scales. Only weights are
//! read so. Activations are those of the numerics class, whatever scheme the configuration has for them.

mod fp8;
mod int4;
mod scheme;

use super::tensors::Slot;
use crate::formats::StoredTensor;
use safetensors::Dtype;
use std::ops::Range;

pub(super) use scheme::Scheme;

/// A tensor of a quantized linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Component {
    /// FP8 values, or words of eight 4-bit integers.
    Weight,
    Scales,
    ZeroPoints,
    /// GPTQ's group of each input feature.
    Groups,
    /// The scale of activations, which are not quantized here.
    Unused,
}

/// The tensors of one linear, as they are found.
#[derive(Debug, Default)]
pub(super) struct Parts {
    weight: Option<Slot>,
    scales: Option<Slot>,
    zero_points: Option<Slot>,
    groups: Option<Slot>,
}

/// A linear `[n, k]` of which everything was checked but the values.
#[derive(Debug)]
pub(super) struct Linear {
    kind: Kind,
    pub(super) n: usize,
    k: usize,
    weight: Slot,
    scales: Slot,
    zero_points: Option<Slot>,
    groups: Option<Slot>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Scales of blocks `[rows, columns]`.
    Fp8 { block: [usize; 2] },
    /// Scales and zero points of so many input features.
    Int4 { group: usize, packing: int4::Packing },
}

impl Parts {
    /// Adds a tensor; false if it is there already.
    pub(super) fn add(&mut self, component: Component, slot: Slot) -> bool {
        let to = match component {
            Component::Weight => &mut self.weight,
            Component::Scales => &mut self.scales,
            Component::ZeroPoints => &mut self.zero_points,
            Component::Groups => &mut self.groups,
            Component::Unused => return true,
        };
        to.replace(slot).is_none()
    }

    /// The linear of these tensors; otherwise what does not fit.
    pub(super) fn linear(self, scheme: Scheme) -> Result<Linear, String> {
        let weight = self.weight.ok_or("it has scales but no quantized weight")?;
        let scales = self.scales.ok_or("its scales are missing")?;
        let numbers = [Dtype::F32, Dtype::F16, Dtype::BF16];
        if !numbers.contains(&scales.dtype) {
            return Err(format!("its scales are of type {:?}; F32, F16 and BF16 are implemented", scales.dtype));
        }
        let [a, b] = *weight.shape.as_slice() else {
            return Err(format!("its weight has shape {:?}", weight.shape));
        };
        let (kind, n, k) = match scheme {
            Scheme::Fp8 { block } => (Kind::Fp8 { block: fp8::block(block, [a, b], &scales.shape)? }, a, b),
            Scheme::Int4 { .. } if weight.dtype != Dtype::I32 => {
                return Err(format!("its weight is of type {:?}; I32 is needed", weight.dtype));
            }
            Scheme::Int4 { group, packing } => {
                let [k, n] = packing.unpacked([a, b]).ok_or_else(|| format!("its weight has shape {:?}", [a, b]))?;
                let group = group.unwrap_or(k).min(k);
                let zero_points = self.zero_points.as_ref().ok_or("its zero points are missing")?;
                int4::check([k, n], group, &scales.shape, zero_points, self.groups.as_ref())?;
                (Kind::Int4 { group, packing }, n, k)
            }
        };
        Ok(Linear { kind, n, k, weight, scales, zero_points: self.zero_points, groups: self.groups })
    }
}

impl Linear {
    /// Input features.
    pub(super) fn k(&self) -> usize {
        self.k
    }

    /// The tensor with the values.
    pub(super) fn weight(&self) -> &Slot {
        &self.weight
    }

    /// Whether the values are integers, which most formats of 4 bits hold exactly.
    pub(super) fn is_integers(&self) -> bool {
        matches!(self.kind, Kind::Int4 { .. })
    }

    /// Some of the rows; otherwise what is wrong with the values. `bytes` are those of a tensor.
    pub(super) fn read<'a>(
        &self,
        rows: Range<usize>,
        bytes: impl Fn(&Slot) -> &'a [u8],
    ) -> Result<StoredTensor<'static>, String> {
        let scales = Numbers { dtype: self.scales.dtype, bytes: bytes(&self.scales) };
        match self.kind {
            Kind::Fp8 { block } => fp8::read(rows, self.k, bytes(&self.weight), block, scales),
            Kind::Int4 { group, packing } => {
                let zero_points = self.zero_points.as_ref().map_or(&[][..], &bytes);
                let groups = self.groups.as_ref().map(&bytes);
                let (n, k, weight) = (self.n, self.k, bytes(&self.weight));
                int4::Matrix { n, k, group, packing, weight, zero_points, scales, groups }.read(rows)
            }
        }
    }
}

/// Numbers of a type that scales may have.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    dtype: Dtype,
    bytes: &'a [u8],
}

impl Numbers<'_> {
    fn at(&self, i: usize) -> f32 {
        let two = || [self.bytes[2 * i], self.bytes[2 * i + 1]];
        match self.dtype {
            Dtype::F16 => half::f16::from_le_bytes(two()).to_f32(),
            Dtype::BF16 => half::bf16::from_le_bytes(two()).to_f32(),
            _ => f32::from_le_bytes(std::array::from_fn(|byte| self.bytes[4 * i + byte])),
        }
    }
}
