//! Where memory is.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Whose memory it is: the CPU's or a device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Memory of the CPU.
    Host,
    /// Memory of the CUDA device with this ordinal.
    Cuda(u32),
    /// Memory of a device that stands in for one which the host cannot address.
    Remote,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(n) => write!(f, "cuda({n})"),
            Self::Remote => f.write_str("remote"),
        }
    }
}
