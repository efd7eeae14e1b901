//! What a GPU is: its driver, and by its compute capability the kernels that it runs and the class of its tensor cores.

use super::{CudaError, RemoteWrites};
use crate::numerics::TensorCore;
use std::fmt;

/// The CUDA whose compiler makes the cubins (`scripts/setup-cuda`): a driver of an older one does not load them.
pub(super) const CUDA_MIN: CudaVersion = CudaVersion(13_000);

/// The first version of NVIDIA's driver with that CUDA.
pub const DRIVER_MIN: u32 = 580;

/// Compute capability, e.g. 9.0 of an H100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Capability {
    /// Generation.
    pub major: u32,
    /// Within the generation.
    pub minor: u32,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A version of CUDA as its driver counts: 13000 is 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion(pub u32);

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// As the driver reports it.
    pub name: String,
    /// Number of the device in this process.
    pub ordinal: u32,
    /// What its cubins must be for.
    pub capability: Capability,
    /// Streaming multiprocessors.
    pub processors: u32,
    /// Bytes of device memory.
    pub memory: u64,
    /// What NICs may do with device memory.
    pub remote_writes: RemoteWrites,
    /// Newest CUDA whose cubins its driver loads.
    pub cuda: CudaVersion,
}

/// GPUs that run the same cubins in the same class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// What the compiler calls it.
    pub(super) name: &'static str,
    /// Arithmetic of the tensor cores. Known answers decide whether a GPU has it.
    pub(super) cores: TensorCore,
}

const AMPERE: Target = Target { name: "sm_80", cores: TensorCore::Tc8F24 };
const ADA: Target = Target { name: "sm_89", cores: TensorCore::Tc8F24 };
const HOPPER: Target = Target { name: "sm_90a", cores: TensorCore::Tc16F25 };
// The bits of Blackwell are not measured yet.
const BLACKWELL_100: Target = Target { name: "sm_100a", cores: TensorCore::Tc16F25 };
const BLACKWELL_120: Target = Target { name: "sm_120", cores: TensorCore::Tc16F25 };

/// Every target that there is a file of kernels for.
pub(super) const TARGETS: [Target; 5] = [AMPERE, ADA, HOPPER, BLACKWELL_100, BLACKWELL_120];

/// Their GPUs.
const CAPABILITIES: &str = "8.0 to 8.9, 9.0, 10.0 and 12.x";

impl Gpu {
    /// What it runs. Cubins of 8.0 run on all of 8.x; those of the others on no other generation.
    pub(super) fn target(&self) -> Result<Target, CudaError> {
        match (self.capability.major, self.capability.minor) {
            (8, 9) => Ok(ADA),
            (8, _) => Ok(AMPERE),
            (9, 0) => Ok(HOPPER),
            (10, 0) => Ok(BLACKWELL_100),
            (12, _) => Ok(BLACKWELL_120),
            _ => {
                let (name, capability) = (self.name.clone(), self.capability);
                Err(CudaError::NoCubin { name, capability, have: CAPABILITIES })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_its_capabilities() {
        let of = |major, minor| {
            let gpu = Gpu {
                name: "a GPU".into(),
                ordinal: 0,
                capability: Capability { major, minor },
                processors: 1,
                memory: 0,
                remote_writes: RemoteWrites::Unsupported,
                cuda: CUDA_MIN,
            };
            gpu.target().ok().map(|target| target.name)
        };
        assert_eq!(
            [of(8, 0), of(8, 6), of(8, 9), of(9, 0)],
            [Some("sm_80"), Some("sm_80"), Some("sm_89"), Some("sm_90a")]
        );
        assert_eq!([of(10, 0), of(12, 1), of(7, 5), of(10, 3)], [Some("sm_100a"), Some("sm_120"), None, None]);
        let found = [of(8, 0), of(8, 9), of(9, 0), of(10, 0), of(12, 0)];
        assert_eq!(found, TARGETS.map(|target| Some(target.name)), "a file for every target, and for no other");
    }
}
