//! Loading weights, and compiling: every handle of a program is resolved once.

use super::executable::HostExecutable;
use super::{HostDevice, HostKernels, Loaded, Shared, huge_pages_of};
use crate::device::{
    Bounds, Device, DeviceError, DeviceInfo, Executable, Role, Rope, RopeTable, Weight, WeightShape, WeightSpec,
};
use crate::program::{Program, check};
use baton_memory::{HostPool, PoolMemory};
use baton_types::{KvPoolMap, MemoryKind, SAMPLING_BAD_WORDS, SAMPLING_TYPICAL_P};
use std::sync::Arc;

impl<K: HostKernels> Device for HostDevice<K> {
    fn info(&self) -> DeviceInfo {
        let kernels = &self.shared.kernels;
        DeviceInfo {
            name: kernels.name(),
            numerics: kernels.numerics(),
            kernel_revision: kernels.revision(),
            memory: MemoryKind::Host,
            asynchronous: false,
            latents: true,
            states: true,
            sampling: &[SAMPLING_TYPICAL_P, SAMPLING_BAD_WORDS],
        }
    }

    fn load(&self, spec: &WeightSpec<'_>) -> Result<Weight, DeviceError> {
        spec.parts.iter().try_for_each(|part| part.check(spec.name, spec.k))?;
        let n = spec.parts.iter().map(|part| part.rows).sum();
        let refuse = |message| Err(DeviceError::Shape { op: "load", message });
        let loaded = match spec.role {
            _ if n == 0 => return refuse(format!("{}: no rows", spec.name)),
            Role::Vector if n != 1 => return refuse(format!("{}: a vector of {n} rows", spec.name)),
            Role::Vector => {
                let mut vector = vec![0.0; spec.k];
                spec.parts[0].read(0, &mut vector);
                Loaded::Vector(vector)
            }
            role => {
                let matrix = self.shared.kernels.pack(role, spec.k, spec.parts)?;
                Loaded::Matrix { matrix, parts: spec.parts.len() }
            }
        };
        let is_matrix = matches!(loaded, Loaded::Matrix { .. });
        let weight = self.add(loaded, n, spec.k);
        if let (true, Some(kept)) = (is_matrix, &self.kept) {
            kept.was_packed(weight.id as usize, spec);
        }
        Ok(weight)
    }

    fn cached(&self, shape: &WeightShape<'_>) -> Option<Weight> {
        let kept = self.kept.as_ref()?;
        let loaded = kept.read(&self.shared.kernels, shape)?;
        let weight = self.add(loaded, shape.rows.iter().sum(), shape.k);
        kept.was_read(weight.id as usize, shape);
        Some(weight)
    }

    fn load_rope(&self, table: RopeTable) -> Result<Rope, DeviceError> {
        check::rope_table(&table)?;
        let (dim, positions) = (table.dim, table.cos.len() / (table.dim / 2));
        let mut ropes = self.shared.ropes.write();
        ropes.push(Arc::new(table));
        Ok(Rope { id: ropes.len() as u32 - 1, dim, positions })
    }

    fn alloc_pool(&self, map: &KvPoolMap) -> Result<Arc<dyn PoolMemory>, DeviceError> {
        let pool = HostPool::new(map.bytes()).map_err(DeviceError::pool)?;
        huge_pages_of(&pool);
        Ok(pool)
    }

    fn compile(&self, program: Program, bounds: Bounds) -> Result<Box<dyn Executable>, DeviceError> {
        let executable = HostExecutable::try_new(self.shared.clone(), program, bounds)?;
        // Weights are complete: a program names them.
        if let Some(kept) = &self.kept {
            kept.save(&self.shared);
        }
        Ok(Box::new(executable))
    }
}

impl<K: HostKernels> HostDevice<K> {
    fn add(&self, loaded: Loaded<K::Matrix>, n: usize, k: usize) -> Weight {
        let mut weights = self.shared.weights.write();
        weights.push(Arc::new(loaded));
        Weight { id: weights.len() as u32 - 1, n, k }
    }
}

impl<K: HostKernels> Shared<K> {
    pub(super) fn matrix(&self, weight: Weight, parts: usize) -> Result<Arc<Loaded<K::Matrix>>, DeviceError> {
        match self.weights.read().get(weight.id as usize) {
            Some(loaded) if matches!(**loaded, Loaded::Matrix { parts: found, .. } if found == parts) => {
                Ok(loaded.clone())
            }
            _ => {
                let message = format!("weight {} is of another device, or no matrix of {parts} parts", weight.id);
                Err(DeviceError::Shape { op: "compile", message })
            }
        }
    }

    pub(super) fn vector(&self, weight: Weight) -> Result<Vec<f32>, DeviceError> {
        match self.weights.read().get(weight.id as usize).map(|loaded| &**loaded) {
            Some(Loaded::Vector(vector)) => Ok(vector.clone()),
            _ => {
                let message = format!("weight {} is of another device, or no vector", weight.id);
                Err(DeviceError::Shape { op: "compile", message })
            }
        }
    }

    pub(super) fn rope(&self, rope: Rope) -> Result<Arc<RopeTable>, DeviceError> {
        self.ropes.read().get(rope.id as usize).cloned().ok_or_else(|| DeviceError::Shape {
            op: "compile",
            message: format!("rope table {} is of another device", rope.id),
        })
    }
}

impl<M> Loaded<M> {
    /// The matrix.
    ///
    /// # Panics
    /// If it is a vector: compiling resolves weights of operations to matrices.
    pub(super) fn matrix(&self) -> &M {
        match self {
            Self::Matrix { matrix, .. } => matrix,
            Self::Vector(_) => unreachable!("a vector where a program has a matrix"),
        }
    }
}
