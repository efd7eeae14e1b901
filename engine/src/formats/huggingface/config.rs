//! Converts `config.json` to [`DecoderSpec`]: the keys of every family here, the others in the family's own file.

use super::json::JsonObject;
use super::keys;
use crate::families::{Activation, AttentionSpec, ConfigFamily, DecoderSpec, LayerSpec, registry};
use crate::formats::WeightsError;

/// Checks every key and reads the spec. Also returns the family.
pub(super) fn read(config: &JsonObject) -> Result<(DecoderSpec, &'static ConfigFamily), WeightsError> {
    let family = family(config)?;
    keys::check(config, family.keys)?;
    check_type(config, family.model_type, family)?;
    let activation = config.activation("hidden_act")?.unwrap_or(Activation::Silu);
    let size = |key: &str| config.need(key, config.size(key)?);
    let (hidden, heads) = (size("hidden_size")?, size("num_attention_heads")?);
    let head_dim = match config.size("head_dim")? {
        Some(head_dim) => head_dim,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(config.damaged("head_dim is missing and hidden_size does not divide by num_attention_heads"));
        }
    };
    let rms_eps = config.need("rms_norm_eps", config.float("rms_norm_eps")?)?;
    let rope = (family.rope)(config, head_dim)?;
    // Configurations that scale by hand keep the context that the model was trained for.
    let context = size("max_position_embeddings")?.max(rope.scaled_context());
    let kv_heads = config.size("num_key_value_heads")?.unwrap_or(heads);
    let attention = AttentionSpec::llama(heads, kv_heads, head_dim, rope);
    let layer = LayerSpec { activation, ..LayerSpec::llama(attention, size("intermediate_size")?, rms_eps) };
    let layers = DecoderSpec::uniform_layers(layer, size("num_hidden_layers")?);
    let mut spec = DecoderSpec {
        vocab: size("vocab_size")?,
        hidden,
        context,
        layers: layers.map_err(|reason| config.damaged(reason))?,
        final_rms_eps: rms_eps,
        tied: config.bool("tie_word_embeddings")?.unwrap_or(false),
        embedding_factor: 1.0,
        logit_factor: 1.0,
        logit_soft_cap: None,
    };
    (family.read)(config, &mut spec)?;
    spec.check().map_err(|reason| config.damaged(reason))?;
    spec.serve(spec.context);
    Ok((spec, family))
}

/// Keys of a model around a decoder that are the decoder's.
const OF_DECODER: &[&str] = &["eos_token_id", "quantization_config", "tie_word_embeddings"];

/// The keys of the decoder as if it were alone. Where it is inside another model, the keys of that one are checked here.
pub(super) fn of_decoder(config: JsonObject) -> Result<JsonObject, WeightsError> {
    // Without a family, `read` says what is wrong.
    let Ok(family) = family(&config) else { return Ok(config) };
    let Some(inside) = &family.inside else { return Ok(config) };
    keys::check(&config, &[&[inside.key], inside.keys].concat())?;
    check_type(&config, family.model_type, family)?;
    let decoder = config.inner(inside.key, OF_DECODER)?;
    check_type(&decoder, inside.model_type, family)?;
    Ok(decoder.with("architectures", vec![family.class].into()).with("model_type", family.model_type.into()))
}

/// transformers selects the computation by `model_type`, which must match the class.
fn check_type(config: &JsonObject, model_type: &str, family: &ConfigFamily) -> Result<(), WeightsError> {
    match config.text("model_type")? {
        Some(other) if other != model_type => {
            let hint = "the two must name the same model; correct the one that is wrong";
            let what = format!("model_type `{other}` beside architectures [\"{}\"]", family.class);
            Err(config.unsupported(what, hint))
        }
        _ => Ok(()),
    }
}

fn family(config: &JsonObject) -> Result<&'static ConfigFamily, WeightsError> {
    let classes = config.get("architectures").and_then(|value| value.as_array());
    let classes = config.need("architectures", classes)?;
    let family = match classes.as_slice() {
        [one] => one.as_str().and_then(registry::by_class),
        _ => None,
    };
    family.ok_or_else(|| {
        let names: Vec<_> = classes.iter().map(|name| name.as_str().unwrap_or("?")).collect();
        let hint = format!("one of {} is needed", registry::classes());
        config.unsupported(format!("architectures {names:?}"), hint)
    })
}
