//! The device that an engine computes on, as a setting.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// The device that the engine computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// SIMD kernels on the CPU.
    Cpu,
    /// Scalar kernels, the reference that the others are checked against.
    Reference,
    /// The CPU backend with delayed fences and poisoned outputs, for tests.
    Lagging,
    /// The GPU with this number, as the CUDA driver counts them; without a number the first.
    Cuda(u32),
}

impl FromStr for DeviceKind {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "`cpu`, `cuda:N` with the number of a GPU, or for tests `reference` or `lagging`";
        match text {
            "cpu" => Ok(Self::Cpu),
            "reference" => Ok(Self::Reference),
            "lagging" => Ok(Self::Lagging),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text.strip_prefix("cuda:").and_then(|n| n.parse().ok()).map(Self::Cuda).ok_or(EXPECTED),
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Reference => f.write_str("reference"),
            Self::Lagging => f.write_str("lagging"),
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl Serialize for DeviceKind {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceKind {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_a_number() {
        for (text, kind) in [
            ("cpu", Some(DeviceKind::Cpu)),
            ("reference", Some(DeviceKind::Reference)),
            ("lagging", Some(DeviceKind::Lagging)),
            ("cuda", Some(DeviceKind::Cuda(0))),
            ("cuda:3", Some(DeviceKind::Cuda(3))),
            ("cuda:", None),
            ("cuda:-1", None),
            ("gpu", None),
        ] {
            assert_eq!(text.parse().ok(), kind, "{text}");
            assert_eq!(serde_json::from_value(text.into()).ok(), kind, "{text}");
        }
        let written = [0, 1].map(|ordinal| serde_json::to_value(DeviceKind::Cuda(ordinal)).unwrap());
        assert_eq!(written, ["cuda", "cuda:1"]);
    }
}
