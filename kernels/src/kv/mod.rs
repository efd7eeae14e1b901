//! A KV pool of the host as addressed by kernels.

mod layout;

use crate::device::{Bounds, DeviceError};
use crate::host::KvStep;
use crate::program::Program;
use crate::step::Segments;
use baton_memory::{HostPool, PoolMemory};
use baton_types::{BlockId, KvPoolMap};
pub use layout::GroupLayout;
pub(crate) use layout::{LayerPlace, PoolLayout, Stored};
use std::ops::Deref;
use std::sync::Arc;

/// One group of a pool in host memory.
#[derive(Clone, Debug)]
pub struct KvBinding {
    pub(crate) memory: Arc<HostPool>,
    layout: GroupLayout,
}

impl Deref for KvBinding {
    type Target = GroupLayout;

    fn deref(&self) -> &GroupLayout {
        &self.layout
    }
}

/// Memory of the host that is large enough for a layout.
fn host(memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<Arc<HostPool>, DeviceError> {
    let Some(host) = HostPool::of(&memory) else { return Err(DeviceError::PoolOutOfReach(memory.kind())) };
    if host.bytes() < map.bytes() {
        let message = format!("the pool has {} bytes, its layout needs {}", host.bytes(), map.bytes());
        return Err(DeviceError::Shape { op: "bind", message });
    }
    Ok(host)
}

impl KvBinding {
    /// Checks that `memory` is of the host, that `map` fits it, and that the group has what a layer needs: planes `k` and `v` of equal heads and
    /// dim, or one plane `latent`, or, of states, `conv` and `state`.
    ///
    /// # Panics
    /// If the layout has no such group.
    pub fn try_new(memory: Arc<dyn PoolMemory>, map: &KvPoolMap, group: usize) -> Result<Self, DeviceError> {
        Ok(Self { memory: host(memory, map)?, layout: GroupLayout::try_new(map, group)? })
    }

    /// Copies the first `tokens` tokens of a block to another one.
    pub(crate) fn copy(&self, from: BlockId, to: BlockId, tokens: usize) {
        for layer in 0..self.layers() {
            for plane in self.distinct_planes() {
                let mut rows = vec![0; tokens * self.token_stride(plane)];
                self.memory.copy_out(self.offset(layer, plane, from, 0), &mut rows);
                self.memory.copy_in(self.offset(layer, plane, to, 0), &rows);
            }
        }
    }
}

/// A pool of the host on which a program runs.
#[derive(Clone, Debug)]
pub(crate) struct PoolBinding {
    layout: PoolLayout,
    groups: Vec<KvBinding>,
}

impl Deref for PoolBinding {
    type Target = PoolLayout;

    fn deref(&self) -> &PoolLayout {
        &self.layout
    }
}

impl PoolBinding {
    /// Binds every group, and finds the layers of `program`.
    pub(crate) fn try_new(
        memory: Arc<dyn PoolMemory>,
        map: &KvPoolMap,
        program: &Program,
        bounds: Bounds,
        vocab: usize,
    ) -> Result<Self, DeviceError> {
        let memory = host(memory, map)?;
        let layout = PoolLayout::try_new(map, program, bounds, vocab)?;
        let group = |layout: &GroupLayout| KvBinding { memory: memory.clone(), layout: layout.clone() };
        let groups = layout.groups().iter().map(group).collect();
        Ok(Self { layout, groups })
    }

    /// The groups with their memory.
    pub(crate) fn bindings(&self) -> &[KvBinding] {
        &self.groups
    }

    /// A layer's part of a step, whose segments come by group.
    pub(crate) fn step<'a>(&'a self, layer: u32, segments: &'a [Segments]) -> KvStep<'a> {
        let LayerPlace { group, layer } = self.place(layer);
        KvStep { kv: &self.groups[group], layer, segments: segments[group].as_slice() }
    }
}
