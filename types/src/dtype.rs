//! Element types of weights and KV.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of a tensor or of a KV plane. All formats are elementwise: an element is decoded without its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32 bits, IEEE 754 binary32.
    F32,
    /// 16 bits, IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32, rounded to nearest even.
    Bf16,
}

impl Dtype {
    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name used in configuration, records and refusals.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// The inverse of [`Dtype::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16].into_iter().find(|d| d.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
