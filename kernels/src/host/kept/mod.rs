//! Packed weights on disk: what a device reads of them, and what it adds.

use super::{HostKernels, Loaded, Shared};
use crate::device::{PartShape, Role, WeightShape, WeightSpec};
use crate::packed::{Key, Packed, PackedCache, Session};
use baton_types::Digest;
use parking_lot::Mutex;
use std::sync::Arc;

/// A matrix of the device.
struct Member {
    /// Its index in [`Shared::weights`].
    id: usize,
    name: String,
    k: usize,
    parts: Vec<PartShape>,
}

#[derive(Default)]
struct Members {
    all: Vec<Member>,
    /// Whether one of them is not in the file, or damaged there.
    missing: bool,
}

/// The packed weights of one model, for one device.
pub(super) struct Kept {
    session: Arc<Session>,
    members: Mutex<Members>,
}

impl Kept {
    /// `None` if these kernels keep nothing.
    pub(super) fn begin<K: HostKernels>(kernels: &K, cache: PackedCache, model: Digest) -> Option<Self> {
        let packing = kernels.packing()?;
        let key = Key { model, numerics: kernels.numerics(), revision: kernels.revision(), packing };
        Some(Self { session: Arc::new(Session::begin(cache, key)), members: Mutex::default() })
    }

    /// Reads a matrix straight to where it stays.
    pub(super) fn read<K: HostKernels>(&self, kernels: &K, shape: &WeightShape<'_>) -> Option<Loaded<K::Matrix>> {
        if shape.role == Role::Vector {
            return None; // Not worth it, and not packed.
        }
        let parts = self.session.parts(shape)?;
        let mut matrix = kernels.unpacked(shape.k, parts).ok()?;
        let into = kernels.packed_mut(&mut matrix);
        let whole = self.session.read(shape.name, into, &|tasks, task| kernels.run(tasks, task));
        whole.then(|| Loaded::Matrix { matrix, parts: parts.len() })
    }

    /// Notes a matrix that was read.
    pub(super) fn was_read(&self, id: usize, shape: &WeightShape<'_>) {
        let parts = self.session.parts(shape).unwrap_or_default().to_vec();
        self.members.lock().all.push(Member { id, name: shape.name.to_owned(), k: shape.k, parts });
    }

    /// Notes a matrix that had to be packed.
    pub(super) fn was_packed(&self, id: usize, spec: &WeightSpec<'_>) {
        let parts = spec.parts.iter().map(|part| PartShape { rows: part.rows, format: part.format }).collect();
        let mut members = self.members.lock();
        members.all.push(Member { id, name: spec.name.to_owned(), k: spec.k, parts });
        members.missing = true;
    }

    /// Writes what is there if something was missing, on a thread of its own: nobody waits for a disk.
    pub(super) fn save<K: HostKernels>(&self, shared: &Arc<Shared<K>>) {
        let Members { all, missing } = std::mem::take(&mut *self.members.lock());
        if !missing {
            return self.session.unlock();
        }
        let (session, shared, writing) = (self.session.clone(), shared.clone(), self.session.writing());
        let write = move || {
            let loaded: Vec<_> = all.iter().map(|member| shared.weights.read()[member.id].clone()).collect();
            let weights = all.iter().zip(&loaded).map(|(member, loaded)| Packed {
                name: &member.name,
                k: member.k,
                parts: &member.parts,
                bytes: shared.kernels.packed(loaded.matrix()),
            });
            let weights: Vec<_> = weights.collect();
            session.save(&weights, writing);
        };
        if let Err(error) = std::thread::Builder::new().name("packed-weights".into()).spawn(write) {
            tracing::warn!(%error, "packed weights cannot be kept");
        }
    }
}

#[cfg(test)]
mod tests;
