//! What `tests/gpu/check` asks of a GPU's kernels: each against its host twin ([`Target::ops`]), and how long each takes ([`Target::gemm`] and so
//! on). A recorded GPU answers likewise, so that the check itself is tested where there is no GPU.

mod attention;
mod bench;
mod ops;
mod sampling;
mod scene;

use super::Gpu;
use super::device::CudaDevice;
use super::driver::Driver;
use super::driver::checked::Checked;
use super::driver::native::NativeDriver;
use super::driver::recorder::Recorder;
use super::driver::replay::Replay;
use super::{CudaConfig, CudaError, pack};
use crate::device::DeviceError;
use crate::numerics::{Half, TensorCore};
pub use bench::AttentionShape;
use std::path::Path;
use std::sync::Arc;

pub use super::driver::checked::{Compared, Finding};
pub use super::driver::defect::SeededDefect;

/// The GPU that is checked.
#[derive(Clone, Debug)]
pub enum Under {
    /// One of this machine. A configuration names its kernels, which may be those with a defect.
    Gpu(CudaConfig),
    /// A recorded one.
    Recorded {
        /// Its class.
        cores: TensorCore,
        /// Format of matrices.
        half: Half,
        /// What is wrong with it on purpose.
        defect: Option<SeededDefect>,
    },
}

/// What stands between the engine and the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Nothing.
    Plain,
    /// Every command is compared with its twin, a graph as one.
    Checked,
    /// The same, and the kernels of a graph run one by one.
    CheckedApart,
}

/// How much [`Target::ops`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// A few launches of each kernel, with small shapes: for compute-sanitizer, which slows them down a hundredfold.
    Small,
    /// Every shape that is listed, so many times with fresh inputs.
    Whole {
        /// How many times.
        rounds: u64,
    },
}

/// Device memory of a recorded GPU.
const RECORDED_MEMORY: usize = 1 << 30;

/// A GPU under check.
#[derive(Clone, Debug)]
pub struct Target {
    driver: Arc<dyn Driver>,
    checked: Option<Arc<Checked>>,
    replay: Option<Arc<Replay>>,
    half: Half,
    is_recorded: bool,
}

impl Target {
    /// Opens it.
    ///
    /// # Errors
    /// As [`super::open`].
    pub fn open(under: &Under, how: How) -> Result<Self, CudaError> {
        let (inner, cores, half): (Arc<dyn Driver>, _, _) = match under {
            Under::Gpu(config) => {
                let images = |gpu: &Gpu| pack::find(&config.kernels, gpu);
                let driver = NativeDriver::open(config.ordinal, config.half, images)?;
                let cores = driver.gpu().target()?.cores;
                (driver, cores, config.half)
            }
            Under::Recorded { cores, half, defect } => {
                (Recorder::new(*cores, *half, RECORDED_MEMORY).with_defect(*defect), *cores, *half)
            }
        };
        let is_recorded = matches!(under, Under::Recorded { .. });
        if how == How::Plain {
            let replay = Replay::new(inner);
            return Ok(Self { driver: replay.clone(), checked: None, replay: Some(replay), half, is_recorded });
        }
        let checked = Checked::new(inner, cores, half, how == How::CheckedApart)?;
        Ok(Self { driver: checked.clone(), checked: Some(checked), replay: None, half, is_recorded })
    }

    /// Whether nothing that is measured says anything of a GPU.
    pub fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    /// Names of the kernels that the file for this GPU has.
    ///
    /// # Errors
    /// If the folder has no such file, or one of another build.
    pub fn kernels(&self, folder: &Path) -> Result<Vec<String>, CudaError> {
        Ok(pack::find(folder, self.gpu())?.into_iter().flat_map(|image| image.kernels).collect())
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        self.driver.gpu()
    }

    /// The engine's device over it, which begins with known answers.
    ///
    /// # Errors
    /// As [`super::open`].
    pub fn device(&self) -> Result<Arc<CudaDevice>, CudaError> {
        CudaDevice::with_driver(self.driver.clone(), self.half)
    }

    /// Runs every kernel on fresh inputs: ragged tails, all sizes of blocks and heads, all buckets of rows.
    ///
    /// # Errors
    /// If the GPU fails. Wrong results are in [`Target::compared`].
    pub fn ops(&self, seed: u64, extent: Extent) -> Result<(), DeviceError> {
        let rounds = match extent {
            Extent::Small => 1,
            Extent::Whole { rounds } => rounds,
        };
        for round in 0..rounds {
            let mut scene = scene::Scene::new(&self.driver, self.half, seed * 1000 + round)?;
            ops::all(&mut scene, extent == Extent::Small)?;
            attention::all(&mut scene, extent == Extent::Small)?;
            sampling::all(&mut scene, extent == Extent::Small)?;
        }
        Ok(())
    }

    /// What was compared since the last call: nothing if nothing is checked.
    ///
    /// # Errors
    /// If memory can't be read.
    pub fn compared(&self) -> Result<Compared, DeviceError> {
        self.checked.as_ref().map_or(Ok(Compared::default()), |checked| checked.take())
    }

    /// Seconds of the graph that was launched last, run so many times with no host between: its buffers must still be there.
    ///
    /// # Errors
    /// If there was none, or something is checked.
    pub fn replayed(&self, times: u32) -> Result<f64, DeviceError> {
        let Some(replay) = &self.replay else {
            return Err(DeviceError::Failed("a target that is checked does not replay".into()));
        };
        Ok(replay.run(times)?.as_secs_f64() / f64::from(times.max(1)))
    }
}
