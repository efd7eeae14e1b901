//! Matrices and inputs of GEMMs, packed for the arithmetic of their class.

use super::fused::{Columns, share};
use super::source::Source;
use super::target::Target;
use super::threads::TASKS_PER_THREAD;
use super::{CpuKernels, Shared, bf16x32, f32fma, i8x32, stored};
use crate::device::{DeviceError, PartShape, StoredRows};
use crate::host::Store;
use crate::numerics::Numerics;
use half::bf16;

/// Revision of the packed forms: to be increased with any change of their bytes, or kept ones would be taken for the new form. A test
/// compares the bytes with recorded digests.
const PACKING_REVISION: u32 = 2;

/// Features that a task of [`linear`] takes together: whole panels of every class.
const LINEAR_UNIT: usize = 32;

/// Rows for which a stored panel is expanded once: that takes as long as the products of some ten rows. They may come from the third-level cache.
const EXPANDED_ROWS: usize = 64;

/// Packed matrices that are multiplied together.
#[derive(Debug)]
pub struct Matrix {
    /// Neighbouring parts of one arithmetic.
    groups: Vec<Packed>,
    k: usize,
}

#[derive(Debug)]
enum Packed {
    F32(Vec<f32fma::Panels>),
    Bf16(bf16x32::Weights),
    I8(Vec<stored::Weights>),
}

/// Rows as a product takes them; the buffers are reused.
#[derive(Debug, Default)]
pub struct Input {
    f32: Vec<f32>,
    bf16: bf16x32::Rows,
    i8: i8x32::Rows,
}

impl Matrix {
    /// Name and revision of the packed forms for these kernels.
    pub(super) fn packing(kernels: &CpuKernels) -> String {
        let layout = match kernels.numerics {
            Numerics::F32Fma { .. } => "panels",
            Numerics::Bf16x32 | Numerics::I8x32 => bf16x32::layout(kernels.simd),
            Numerics::TensorCore { .. } => unreachable!("refused at the start"),
        };
        let order = if cfg!(target_endian = "big") { "big" } else { "little" };
        format!("cpu {layout} {PACKING_REVISION} {order}-endian")
    }

    pub(super) fn pack(kernels: &CpuKernels, k: usize, parts: &[StoredRows<'_>]) -> Result<Self, DeviceError> {
        if let Numerics::F32Fma { weights } = kernels.numerics {
            let panels = parts.iter().map(|part| f32fma::Panels::pack(k, weights, part));
            return Ok(Self { groups: vec![Packed::F32(panels.collect::<Result<_, _>>()?)], k });
        }
        let groups = parts.chunk_by(|a, b| a.format.is_quantized() == b.format.is_quantized()).map(|parts| {
            if parts[0].format.is_quantized() {
                Ok(Packed::of_stored(kernels, pack_stored(kernels, k, parts)?))
            } else {
                Ok(Packed::Bf16(pack_bf16(kernels, k, parts)?))
            }
        });
        Ok(Self { groups: groups.collect::<Result<_, _>>()?, k })
    }

    /// The packed form of such parts, all zero.
    pub(super) fn zeroed(kernels: &CpuKernels, k: usize, parts: &[PartShape]) -> Result<Self, DeviceError> {
        let shape = |message| DeviceError::Shape { op: "load", message };
        if let Some(part) = parts.iter().find(|part| part.format.row_bytes(k).is_none()) {
            return Err(shape(format!("{k} elements are not whole blocks of {:?}", part.format)));
        }
        if let Numerics::F32Fma { weights } = kernels.numerics {
            let panels = parts.iter().map(|part| f32fma::Panels::zeroed(part.rows, k, weights));
            return Ok(Self { groups: vec![Packed::F32(panels.collect::<Result<_, _>>()?)], k });
        }
        let groups = parts.chunk_by(|a, b| a.format.is_quantized() == b.format.is_quantized()).map(|parts| {
            let stored = parts.iter().filter_map(|part| Some((part.rows, stored::Format::of(part.format)?)));
            let stored =
                stored.map(|(n, format)| stored::Weights::zeroed(format, n, k)).collect::<Result<Vec<_>, _>>()?;
            if stored.is_empty() {
                let heights: Vec<usize> = parts.iter().map(|part| part.rows).collect();
                return Ok(Packed::Bf16(bf16x32::Weights::zeroed(kernels.simd, &heights, k)?));
            }
            Ok(Packed::of_stored(kernels, stored))
        });
        Ok(Self { groups: groups.collect::<Result<_, _>>()?, k })
    }

    /// The packed form as bytes, in order.
    pub(super) fn bytes(&self) -> Vec<&[u8]> {
        let mut slices = Vec::new();
        for group in &self.groups {
            match group {
                Packed::F32(parts) => slices.extend(parts.iter().map(f32fma::Panels::bytes)),
                Packed::Bf16(weights) => slices.extend(weights.bytes()),
                Packed::I8(parts) => slices.extend(parts.iter().map(stored::Weights::bytes)),
            }
        }
        slices
    }

    /// The packed form as bytes, in order, to be written.
    pub(super) fn bytes_mut(&mut self) -> Vec<&mut [u8]> {
        let mut slices = Vec::new();
        for group in &mut self.groups {
            match group {
                Packed::F32(parts) => slices.extend(parts.iter_mut().map(f32fma::Panels::bytes_mut)),
                Packed::Bf16(weights) => slices.extend(weights.bytes_mut()),
                Packed::I8(parts) => slices.extend(parts.iter_mut().map(stored::Weights::bytes_mut)),
            }
        }
        slices
    }

    /// Widens a row of the first part into `out`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        match &self.groups[0] {
            Packed::F32(parts) => parts[0].row(row, out),
            Packed::Bf16(weights) => weights.row(row, out),
            Packed::I8(parts) => parts[0].row(row, out),
        }
    }
}

fn pack_bf16(kernels: &CpuKernels, k: usize, parts: &[StoredRows<'_>]) -> Result<bf16x32::Weights, DeviceError> {
    let mut wide = vec![0.0; k];
    let heights: Vec<usize> = parts.iter().map(|part| part.rows).collect();
    bf16x32::Weights::pack(kernels.simd, &heights, k, |part, row, out| {
        parts[part].read(row, &mut wide);
        out.iter_mut().zip(&wide).for_each(|(to, x)| *to = bf16::from_f32(*x));
    })
}

fn pack_stored(kernels: &CpuKernels, k: usize, parts: &[StoredRows<'_>]) -> Result<Vec<stored::Weights>, DeviceError> {
    let pack = |part: &StoredRows<'_>| {
        let format = stored::Format::of(part.format)
            .ok_or_else(|| DeviceError::Shape { op: "load", message: format!("{:?} has no integers", part.format) })?;
        stored::Weights::pack(&kernels.threads, format, part.rows, k, part.bytes)
    };
    parts.iter().map(pack).collect()
}

impl Packed {
    /// Quantized parts, which stay as the file stores them: `i8x32` takes their integers, `bf16x32` their values.
    fn of_stored(kernels: &CpuKernels, parts: Vec<stored::Weights>) -> Self {
        match kernels.numerics {
            Numerics::I8x32 => Self::I8(parts),
            Numerics::F32Fma { .. } | Numerics::TensorCore { .. } => unreachable!("these keep no stored parts"),
            Numerics::Bf16x32 => Self::Bf16(bf16x32::Weights::stored(kernels.simd, parts)),
        }
    }

    /// Number of parts.
    fn parts(&self) -> usize {
        match self {
            Self::F32(parts) => parts.len(),
            Self::Bf16(weights) => weights.parts().len(),
            Self::I8(parts) => parts.len(),
        }
    }
}

/// How the kernels take rows of an input.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    /// Most rows of a tile.
    pub(super) rows_max: usize,
    /// Bytes of a packed row.
    pub(super) row_bytes: usize,
    /// Rows that have to pass over a panel together, if there are so many.
    pub(super) rows_min: usize,
}

impl Matrix {
    /// Elements of a row.
    pub(super) fn k(&self) -> usize {
        self.k
    }

    /// The tiles of its products.
    pub(super) fn tiles(&self, kernels: &CpuKernels) -> Tiles {
        let (rows_max, row_bytes) = match &self.groups[0] {
            Packed::F32(_) => (kernels.panels.rows_max(), self.k * size_of::<f32>()),
            Packed::Bf16(_) => bf16x32::rows(kernels.simd, self.k),
            Packed::I8(_) => i8x32::rows(self.k),
        };
        let rows_min = match &self.groups[0] {
            Packed::Bf16(weights) if !weights.has_words() => EXPANDED_ROWS,
            Packed::F32(_) | Packed::Bf16(_) => 1,
            Packed::I8(_) => i8x32::rows_min(kernels.simd),
        };
        Tiles { rows_max, row_bytes, rows_min }
    }

    /// The group of a part, and its number there.
    fn part(&self, mut part: usize) -> (&Packed, usize) {
        for group in &self.groups {
            if part < group.parts() {
                return (group, part);
            }
            part -= group.parts();
        }
        panic!("a matrix without part {part}");
    }

    /// Output features of a part.
    pub(super) fn height(&self, part: usize) -> usize {
        match self.part(part) {
            (Packed::F32(parts), part) => parts[part].n,
            (Packed::Bf16(weights), part) => weights.parts()[part],
            (Packed::I8(parts), part) => parts[part].n(),
        }
    }

    /// Products of all rows of an input for this matrix with the target's features of a part, which begin with a panel.
    pub(super) fn product(&self, kernels: &CpuKernels, x: &Input, part: usize, partitions: usize, target: Target) {
        match self.part(part) {
            (Packed::F32(parts), part) => f32fma::product(kernels.panels, &x.f32, &parts[part], partitions, target),
            (Packed::Bf16(weights), part) => bf16x32::product(&x.bf16, weights, part, target),
            (Packed::I8(parts), part) => i8x32::product(kernels.simd, &x.i8, &parts[part], target),
        }
    }
}

/// Rows that are copied at once.
const COPIED_ROWS: usize = 8;

impl Input {
    /// Rounds `rows` rows for products with `w`.
    pub(super) fn fill(&mut self, kernels: &CpuKernels, w: &Matrix, rows: usize, source: &mut Source<'_>) {
        let has = |of: fn(&Packed) -> bool| w.groups.iter().any(of);
        if has(|group| matches!(group, Packed::F32(_))) {
            self.f32.clear();
            for first in (0..rows).step_by(COPIED_ROWS) {
                self.f32.extend_from_slice(source.rows(first..(first + COPIED_ROWS).min(rows)));
            }
        }
        if has(|group| matches!(group, Packed::Bf16(_))) {
            self.bf16.pack(kernels.simd, rows, w.k, source);
        }
        if has(|group| matches!(group, Packed::I8(_))) {
            i8x32::quantize(kernels.simd, rows, w.k, source, &mut self.i8);
        }
    }
}

/// `out = x * w^T` for parts from `first` on.
pub(super) fn linear(
    kernels: &CpuKernels,
    x: &Input,
    w: &Matrix,
    first: usize,
    partitions: usize,
    store: Store,
    outs: &mut [&mut [f32]],
) {
    let heights: Vec<usize> = (first..first + outs.len()).map(|part| w.height(part)).collect();
    let rows = outs[0].len() / heights[0];
    assert!(outs.iter().zip(&heights).all(|(out, n)| out.len() == rows * n));
    let outs: Vec<_> = outs.iter_mut().map(|out| Shared(out.as_mut_ptr())).collect();
    let columns = Columns { parts: &heights, unit: LINEAR_UNIT };
    let tasks = (kernels.threads.count() * TASKS_PER_THREAD).min(columns.units());
    kernels.threads.run(tasks, &|task| {
        columns.each(share(columns.units(), task, tasks), usize::MAX, |part, features| {
            let n = heights[part];
            // SAFETY: the output is `[rows, n]`, and no two tasks have the same features of a part.
            let target = unsafe { Target::new(outs[part].get().add(features.start), n, features, store) };
            w.product(kernels, x, first + part, partitions, target);
        });
    });
}
