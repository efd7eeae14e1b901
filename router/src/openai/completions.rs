//! `POST /v1/completions`: the request.

use super::best::Best;
use super::common::{COMMON, Common, SHARED, take_common};
use crate::request::{PROMPTS_MAX, Parameters, Prompt, SAMPLES_MAX, Segment};
use crate::wire::fields::{Fields, Policy, Row};
use crate::wire::json;
use baton_types::RequestError;
use serde_json::Value;

pub(crate) const COMPLETIONS: &[Row] = &[
    ("prompt", Policy::Supported),
    ("best_of", Policy::Supported),
    ("echo", Policy::Supported),
    // It needs a model with control tokens around prefix and suffix. None of the served families is known to have them.
    (
        "suffix",
        Policy::Only { accepts: |v| v == &Value::from(""), values: "\"\", since no served model fills in the middle" },
    ),
    ("add_special_tokens", Policy::Only { accepts: |v| v == &Value::Bool(true), values: "true" }),
];

/// OpenAI's default for this endpoint.
pub(crate) const MAX_TOKENS_DEFAULT: u32 = 16;

pub(crate) fn parse(body: &[u8]) -> Result<(Prompt, Common), RequestError> {
    let table: Vec<Row> = COMPLETIONS.iter().chain(COMMON).chain(SHARED).copied().collect();
    let mut fields = Fields::parse(body, &table)?;
    let mut common = take_common(&mut fields)?;
    common.parameters.sampling.max_tokens_default = Some(MAX_TOKENS_DEFAULT);
    common.parameters.sampling.logprobs = fields.take("logprobs")?;
    take_echo(&mut fields, &mut common)?;
    take_best(&mut fields, &mut common)?;
    let asked = fields.take_raw("prompt").ok_or_else(|| RequestError::invalid("prompt", "prompt is required"))?;
    Ok((prompt(asked.get())?, common))
}

/// `echo`: answers begin with their prompts, and their log-probabilities with those of the prompts.
fn take_echo(fields: &mut Fields<'_>, common: &mut Common) -> Result<(), RequestError> {
    if fields.take::<bool>("echo")? != Some(true) {
        return Ok(());
    }
    let (parameters, options) = (&mut common.parameters, &mut common.options);
    (parameters.echo, options.echo, parameters.sampling.may_be_empty) = (true, true, true);
    options.echo_logprobs = parameters.sampling.logprobs;
    parameters.sampling.prompt_logprobs = options.prompt_logprobs.max(options.echo_logprobs);
    Ok(())
}

/// `best_of`: more answers are made than shown, and their log-probabilities tell which are.
fn take_best(fields: &mut Fields<'_>, common: &mut Common) -> Result<(), RequestError> {
    let Parameters { samples, sampling, .. } = &mut common.parameters;
    let refuse = |message: String| Err(RequestError::invalid("best_of", message));
    match fields.take::<u32>("best_of")? {
        Some(_) if *samples == 0 => Err(RequestError::invalid("n", "n must be at least 1")),
        Some(best_of) if best_of < *samples => refuse(format!("best_of {best_of} is less than n {samples}")),
        Some(best_of) if best_of > SAMPLES_MAX => {
            refuse(format!("best_of must be at most {SAMPLES_MAX}, got {best_of}"))
        }
        Some(best_of) if best_of > *samples => {
            if common.options.stream {
                return refuse("best_of over n cannot be streamed: the best answers are known at the end".into());
            }
            common.options.best = Some(Best { shown: *samples, logprobs: sampling.logprobs.is_some() });
            *samples = best_of;
            sampling.logprobs = sampling.logprobs.or(Some(0));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A string, a list of token ids, or a list of these: one prompt, or several.
fn prompt(json: &str) -> Result<Prompt, RequestError> {
    if !matches!(first(json), Some('"' | '[')) {
        return Ok(Prompt::Segments(vec![segment(json)?]));
    }
    let too_many =
        || RequestError::invalid("prompt", format!("prompt takes at most {PROMPTS_MAX} prompts; send several calls"));
    let prompts = json::items(json, PROMPTS_MAX).map_err(|_| shape())?.ok_or_else(too_many)?;
    let prompts = prompts.into_iter().map(|prompt| segment(prompt.get())).collect::<Result<Vec<_>, _>>()?;
    Ok(if prompts.len() == 1 { Prompt::Segments(prompts) } else { Prompt::List(prompts) })
}

/// The first character in a list: it tells the type of its items, so a long list is parsed once.
fn first(json: &str) -> Option<char> {
    json.strip_prefix('[').and_then(|items| items.trim_ascii_start().chars().next())
}

fn shape() -> RequestError {
    RequestError::invalid("prompt", "prompt must be a string, a list of token ids, or a list of these")
}

/// A string, or a list of token ids that is not empty.
fn segment(prompt: &str) -> Result<Segment, RequestError> {
    let segment = match first(prompt) {
        None if prompt.starts_with('"') => serde_json::from_str(prompt).map(Segment::Text),
        // The error message would repeat a text among the numbers.
        Some(_) if !prompt.contains('"') => serde_json::from_str(prompt).map(Segment::Tokens),
        _ => return Err(shape()),
    };
    match segment.map_err(|_| shape())? {
        Segment::Tokens(ids) if ids.is_empty() => {
            Err(RequestError::invalid("prompt", "the prompt is empty; give at least one token"))
        }
        segment => Ok(segment),
    }
}
