//! Adapters as devices take them.

use super::{Adapter, AdapterBounds, AdapterLinear, Linear};
use crate::device::DeviceError;
use crate::program::Program;
use crate::step::AdapterSlot;
use baton_types::Digest;

/// The change of one linear: `y += scale * B (A x)`.
#[derive(Clone, Debug)]
pub(crate) struct LowRank {
    pub(crate) rank: usize,
    /// Elements of `x`.
    pub(crate) k: usize,
    /// Elements of `y`.
    pub(crate) n: usize,
    /// `[rank, k]`
    pub(crate) a: Vec<f32>,
    /// B transposed, `[rank, n]`: the kernels read it along `y`.
    pub(crate) b: Vec<f32>,
    pub(crate) scale: f32,
}

/// A checked adapter in the kernels' order. Packing reads every element: do it on a thread that runs no steps.
#[derive(Debug)]
pub struct PackedAdapter {
    rank: usize,
    digest: Digest,
    /// `[layers, linears]`, up to the last layer that is changed.
    linears: Vec<Option<LowRank>>,
}

fn refuse<T>(message: String) -> Result<T, DeviceError> {
    Err(DeviceError::Shape { op: "load_adapter", message })
}

impl PackedAdapter {
    /// Packs an adapter, and checks what depends on no program.
    pub(super) fn try_new(adapter: &Adapter) -> Result<Self, DeviceError> {
        let rank = adapter.rank;
        if !(1..=AdapterBounds::RANK_MAX).contains(&rank) {
            return Err(DeviceError::AdapterRank { rank, rank_max: AdapterBounds::RANK_MAX });
        }
        let layers = adapter.linears.iter().map(|change| change.layer as usize + 1).max().unwrap_or(0);
        let mut linears = vec![None; layers * Linear::ALL.len()];
        for AdapterLinear { layer, linear, a, b, scale } in &adapter.linears {
            if a.len() % rank != 0 || b.len() % rank != 0 {
                let (a, b) = (a.len(), b.len());
                return refuse(format!("{linear:?} of layer {layer}: {a} and {b} elements are of no rank {rank}"));
            }
            if !a.iter().chain(b).chain([scale]).all(|x| x.is_finite()) {
                return refuse(format!("{linear:?} of layer {layer} has elements that are not finite"));
            }
            let (k, n) = (a.len() / rank, b.len() / rank);
            let b = (0..rank).flat_map(|j| (0..n).map(move |i| (i, j))).map(|(i, j)| b[i * rank + j]).collect();
            let low = LowRank { rank, k, n, a: a.clone(), b, scale: *scale };
            if linears[index(*layer, *linear)].replace(low).is_some() {
                return refuse(format!("{linear:?} of layer {layer} is changed twice"));
            }
        }
        Ok(Self { rank, digest: adapter.digest(), linears })
    }

    /// See [`Adapter::digest`].
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Memory of its matrices.
    pub fn bytes(&self) -> u64 {
        let elements = self.linears.iter().flatten().map(|change| change.a.len() + change.b.len()).sum::<usize>();
        (elements * size_of::<f32>()) as u64
    }

    /// Checks slot, rank and shapes against a program.
    pub(crate) fn check(&self, slot: AdapterSlot, program: &Program, bounds: AdapterBounds) -> Result<(), DeviceError> {
        let AdapterBounds { slots_max, rank_max } = bounds;
        if slot.0 as usize >= slots_max {
            return Err(DeviceError::AdapterSlots { slot, slots_max });
        }
        if self.rank > rank_max {
            return Err(DeviceError::AdapterRank { rank: self.rank, rank_max });
        }
        for (at, change) in self.linears.iter().enumerate() {
            let Some(LowRank { k, n, .. }) = change else { continue };
            let (layer, linear) = ((at / Linear::ALL.len()) as u32, Linear::ALL[at % Linear::ALL.len()]);
            match program.linear(layer, linear) {
                None if layer < program.layers() => {
                    return refuse(format!("{linear:?} of layer {layer}, which the model has not"));
                }
                None => return refuse(format!("layer {layer} of {}", program.layers())),
                Some(shape) if shape != [*n, *k] => {
                    return refuse(format!(
                        "{linear:?} of layer {layer} is of shape [{n}, {k}], the model's {shape:?}"
                    ));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    pub(crate) fn of(&self, layer: u32, linear: Linear) -> Option<&LowRank> {
        self.linears.get(index(layer, linear))?.as_ref()
    }
}

fn index(layer: u32, linear: Linear) -> usize {
    layer as usize * Linear::ALL.len() + linear as usize
}
