//! Sampling parameters on their own, as the KServe protocol carries them: the fields of `/v1/completions` that do not
//! say what is asked, of which model, and in which form it is answered.

use super::common::{COMMON, Common, SHARED, take_common};
use super::completions::MAX_TOKENS_DEFAULT;
use crate::wire::fields::{Fields, Policy, Row, only_false, only_null, only_one};
use crate::wire::json;
use baton_types::RequestError;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// The name of the JSON text among the inputs.
const TENSOR: &str = "sampling_parameters";
/// Longest JSON text: that of the largest schema, and more.
const TEXT_BYTES_MAX: usize = 128 << 10;

const fn elsewhere(values: &'static str) -> Policy {
    Policy::Only { accepts: |_| false, values }
}

/// Rows of fields that are no sampling parameters, or not here.
const OWN: &[Row] = &[
    ("prompt", elsewhere("null: the prompt is the input text_input or input_ids")),
    ("model", elsewhere("null: the model is model_name")),
    ("stream", elsewhere("null: the input stream asks for a stream")),
    ("lora_name", elsewhere("null: an adapter is a model, so name it in model_name")),
    ("return_token_ids", only_false()),
    ("stream_options", only_null()),
    ("logprobs", only_null()),
    ("best_of", only_one()),
    ("echo", only_false()),
];

/// Fields whose values are texts. Any other value may come as the text of its JSON: in Triton's own examples, numbers
/// do.
const TEXTS: [&str; 6] = ["stop", "guided_regex", "guided_grammar", "guided_json", "cache_salt", "prefill_policy"];

/// Reads the parameters of a request, each with its JSON, and the JSON object of the tensor, whose fields replace those
/// of the same name.
pub(crate) fn parse<'a>(
    parameters: impl Iterator<Item = (&'a str, String)>,
    tensor: Option<&str>,
) -> Result<Common, RequestError> {
    let mut body = String::from("{");
    let mut add = |name: &str, json: &str| {
        if body.len() > 1 {
            body.push(',');
        }
        body += &serde_json::Value::from(name).to_string();
        body.push(':');
        body += &bare(name, json);
    };
    for (name, json) in parameters {
        add(name, &json);
    }
    if let Some(text) = tensor {
        let refuse = |reason: &dyn std::fmt::Display| {
            RequestError::invalid(TENSOR, format!("{TENSOR} must be the text of a JSON object: {reason:.256}"))
        };
        if text.len() > TEXT_BYTES_MAX {
            return Err(refuse(&format!("it takes at most {TEXT_BYTES_MAX} bytes, got {}", text.len())));
        }
        let read = json::members(text, |name, value| {
            add(&name, value.get());
            true
        });
        read.map_err(|e| refuse(&e))?;
    }
    body.push('}');
    let all = OWN.iter().chain(COMMON).chain(SHARED);
    // The first row of a name counts.
    let table: Vec<Row> = all.copied().collect();
    let mut common = take_common(&mut Fields::parse(body.as_bytes(), &table)?)?;
    common.parameters.sampling.max_tokens_default = Some(MAX_TOKENS_DEFAULT);
    Ok(common)
}

/// The JSON of a value that came as text.
fn bare<'a>(name: &str, json: &'a str) -> Cow<'a, str> {
    if !json.starts_with('"') || TEXTS.contains(&name) {
        return Cow::Borrowed(json);
    }
    let Ok(text) = serde_json::from_str::<String>(json) else { return Cow::Borrowed(json) };
    match serde_json::from_str::<&RawValue>(&text) {
        Ok(value) if !value.get().starts_with('"') => Cow::Owned(value.get().to_owned()),
        _ => Cow::Borrowed(json),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::ErrorKind;

    fn read(parameters: &[(&'static str, &str)], tensor: Option<&str>) -> Result<Common, RequestError> {
        parse(parameters.iter().map(|(name, json)| (*name, (*json).to_owned())), tensor)
    }

    #[test]
    fn values_come_as_json_or_as_its_text() {
        let tensor = r#"{"temperature": "0.1", "top_p": 0.95, "max_tokens": "100", "stop": "5", "min_tokens": null,
            "structured_outputs": "{\"choice\": [\"a\", \"b\"]}", "ignore_eos": "false"}"#;
        let Common { mut parameters, unknown, .. } =
            read(&[("seed", "\"7\""), ("temperature", "2.0")], Some(tensor)).unwrap();
        let sampling = &parameters.sampling;
        assert_eq!((sampling.temperature, sampling.top_p), (Some(0.1), Some(0.95)), "the tensor wins");
        assert_eq!((sampling.max_tokens, sampling.max_tokens_default), (Some(100), Some(MAX_TOKENS_DEFAULT)));
        assert_eq!((sampling.seed, sampling.min_tokens, sampling.ignore_eos), (Some(7), 0, false));
        assert!(sampling.grammar.is_some() && unknown.into_names().is_empty());
        assert!(parameters.stops.push("5").1.is_some(), "a text stays one");
        assert_eq!(read(&[], None).unwrap().parameters.samples, 1);
    }

    #[test]
    fn what_is_none_is_refused_by_name() {
        type Case = (&'static [(&'static str, &'static str)], &'static str, ErrorKind, &'static str);
        let cases: [Case; 12] = [
            (&[], "[1]", ErrorKind::InvalidRequest, TENSOR),
            (&[], "", ErrorKind::InvalidRequest, TENSOR),
            (&[], r#"{"temperature": 1"#, ErrorKind::InvalidRequest, TENSOR),
            (&[], r#"{"temperature": "hot"}"#, ErrorKind::InvalidRequest, "temperature"),
            (&[("max_tokens", "-1")], "{}", ErrorKind::InvalidRequest, "max_tokens"),
            (&[], r#"{"model": "m"}"#, ErrorKind::Unsupported, "model"),
            (&[], r#"{"prompt": "m"}"#, ErrorKind::Unsupported, "prompt"),
            (&[("stream", "true")], "{}", ErrorKind::Unsupported, "stream"),
            (&[], r#"{"lora_name": "sql"}"#, ErrorKind::Unsupported, "lora_name"),
            (&[], r#"{"logprobs": 2}"#, ErrorKind::Unsupported, "logprobs"),
            (&[], r#"{"best_of": 2}"#, ErrorKind::Unsupported, "best_of"),
            (&[], r#"{"use_beam_search": true}"#, ErrorKind::Unsupported, "use_beam_search"),
        ];
        for (parameters, tensor, kind, param) in cases {
            let error = read(parameters, Some(tensor)).unwrap_err();
            assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{tensor}: {error}");
        }
        let long = read(&[], Some(&format!("{{{}}}", " ".repeat(TEXT_BYTES_MAX)))).unwrap_err();
        assert!(long.message.contains("at most 131072 bytes"), "{long}");
        let unknown = read(&[("early_stopping", "true")], Some(r#"{"top_kk": 1, "a\"b": 2}"#)).unwrap().unknown;
        assert_eq!(unknown.into_names(), ["early_stopping", "top_kk", "a\"b"]);
    }
}
