//! Errors of loading a model and of computing a step.

use super::ModelConfig;
use crate::families::{DecoderSpec, TensorName};
use crate::formats::WeightsError;
use baton_kernels::device::{DeviceError, DeviceInfo};
use baton_types::LayoutError;

/// Failures of loading, binding and stepping.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The model's files are invalid.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The device failed; after a device failure the model is unusable.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The KV layout is invalid.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The device does not compute a part of the model.
    #[error("the model has {what}, which {device} does not compute yet; serve it with --device cpu")]
    DeviceLacks {
        what: &'static str,
        /// Name of the device.
        device: String,
    },
    /// A setting that the model or the device does not support.
    #[error("{name} must be {expected}, got {got}")]
    Config {
        name: &'static str,
        /// Values that are accepted, in words.
        expected: String,
        got: usize,
    },
    /// A source returned a tensor whose size does not match its shape.
    #[error("tensor {name} has {got} bytes, its shape needs {expected}")]
    TensorSize {
        name: TensorName,
        /// Bytes that the shape needs.
        expected: usize,
        /// Bytes that the source returned.
        got: usize,
    },
    /// The pool is laid out for another model.
    #[error("the KV pool is laid out as {pool}, this model needs {model}")]
    WrongLayout {
        /// Layout of the pool.
        pool: String,
        /// Layout of the model.
        model: String,
    },
}

/// Checks the bounds against the model and the arithmetic that the forward pass relies on.
pub(super) fn check_config(spec: &DecoderSpec, config: &ModelConfig) -> Result<(), ModelError> {
    let check = |name, expected: String, got: usize, ok: bool| {
        if ok { Ok(()) } else { Err(ModelError::Config { name, expected, got }) }
    };
    check("rows_max", "at least 1".into(), config.rows_max, config.rows_max > 0)?;
    let logit_rows = config.logit_rows_max;
    check("logit_rows_max", "at least 1".into(), logit_rows, logit_rows > 0)?;
    check("slots_max", "at least 1".into(), config.slots_max, config.slots_max > 0)?;
    let len = config.model_len_max;
    let context = spec.context;
    check("model_len_max", format!("1 to {context}, the model's context"), len, (1..=context).contains(&len))?;
    check("layers", "at least 1".into(), spec.layers.len(), !spec.layers.is_empty())?;
    for layer in &spec.layers {
        let attention = &layer.attention;
        let divides = attention.kv_heads > 0 && attention.heads.is_multiple_of(attention.kv_heads);
        check("kv_heads", format!("a divisor of {} heads", attention.heads), attention.kv_heads, divides)?;
        let even = attention.head_dim > 0 && attention.head_dim.is_multiple_of(2);
        check("head_dim", "even: rotary embedding turns pairs".into(), attention.head_dim, even)?;
    }
    Ok(())
}

/// Checks that the device computes what the model has, where its kernels may lack it.
pub(super) fn check_device(spec: &DecoderSpec, device: &DeviceInfo) -> Result<(), ModelError> {
    let has_latents = spec.layers.iter().any(|layer| layer.attention.latent.is_some());
    let lacks = |what| Err(ModelError::DeviceLacks { what, device: device.name.clone() });
    if has_latents && !device.latents {
        return lacks("latent attention");
    }
    if device.states {
        return Ok(());
    }
    if spec.layers.iter().any(|layer| layer.delta.is_some()) {
        return lacks("recurrent layers");
    }
    if spec.layers.iter().any(|layer| layer.attention.output_gate) {
        return lacks("gates of attention's output");
    }
    Ok(())
}
