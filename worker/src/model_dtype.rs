//! `--dtype`, by the names of vLLM: one flag for the formats of weights and KV.

use crate::settings::{DeviceKind, NumericsChoice};
use baton_types::Dtype;
use clap::ValueEnum;
use clap::builder::PossibleValue;
use std::fmt;

/// The format of weights and KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelDtype {
    /// The settings' own.
    Auto,
    Of(Dtype),
}

impl ModelDtype {
    const fn names(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Auto => ("auto", &[]),
            Self::Of(Dtype::Bf16) => ("bfloat16", &["bf16"]),
            Self::Of(Dtype::F16) => ("float16", &["half", "f16"]),
            Self::Of(Dtype::F32) => ("float32", &["float", "f32"]),
        }
    }

    /// `engine.weights` and `engine.kv`.
    pub(crate) const fn format(self) -> Option<Dtype> {
        match self {
            Self::Auto => None,
            Self::Of(dtype) => Some(dtype),
        }
    }

    /// `engine.numerics`, where only one class computes with this format. On a GPU that is the class of its tensor cores.
    pub(crate) fn class(self, device: Option<DeviceKind>) -> Option<NumericsChoice> {
        let is_gpu = matches!(device, Some(DeviceKind::Cuda(_)));
        matches!(self, Self::Of(Dtype::F16 | Dtype::F32)).then_some(NumericsChoice::F32Fma).filter(|_| !is_gpu)
    }
}

impl ValueEnum for ModelDtype {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Auto, Self::Of(Dtype::Bf16), Self::Of(Dtype::F16), Self::Of(Dtype::F32)]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, aliases) = self.names();
        Some(PossibleValue::new(name).aliases(aliases))
    }
}

impl fmt::Display for ModelDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names().0)
    }
}
