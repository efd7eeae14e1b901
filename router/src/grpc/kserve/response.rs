//! Events of an answer to `ModelInferResponse`.

use super::request::{FINISH_REASON, INPUT_TOKENS, OUTPUT_TOKENS, Shape, TEXT_OUTPUT};
use super::tensors::{BYTES, UINT32};
use super::{VERSION, string};
use crate::flow::Prepared;
use crate::output::{Delta, Event, Finished, Gathered};
use baton_proto::convert::status;
use baton_proto::kserve::infer_parameter::ParameterChoice;
use baton_proto::kserve::model_infer_response::InferOutputTensor;
use baton_proto::kserve::{InferParameter, ModelInferResponse, ModelStreamInferResponse};
use baton_types::RequestError;
use std::collections::HashMap;

/// The parameter by which Triton's clients know the last response of a request.
const FINAL: &str = "triton_final_response";
/// The parameter that names what was ignored, as the header of the HTTP API.
const IGNORED: &str = "x-baton-ignored-fields";
/// The parameter of an error that tells when to try again.
const RETRY_AFTER_MS: &str = "retry-after-ms";
/// vLLM's backend writes so that an answer has not ended.
const NOT_ENDED: &str = "None";
/// Longest id that an error repeats: the longest valid one.
const ID_BYTES_MAX: usize = 128;
/// Memory of a response besides its texts; and of each answer, its lengths, reason and counts, as they are kept and as
/// they are sent.
const RESPONSE_BYTES: u64 = 2 << 10;
const ANSWER_BYTES: u64 = 64;

/// How the events of a request become responses.
#[derive(Debug)]
pub(super) struct Responses {
    id: String,
    model: String,
    shape: Shape,
    /// Tokens of each prompt.
    prompt_tokens: Vec<u32>,
    samples: usize,
    /// Names of ignored parameters, until they were told.
    ignored: Vec<String>,
}

/// What is new of one answer.
#[derive(Clone, Copy, Default)]
struct Part<'a> {
    text: &'a str,
    tokens: usize,
    reason: Option<&'static str>,
}

impl Responses {
    pub(super) fn new(request: &Prepared, shape: Shape, ignored: Vec<String>) -> Self {
        let asked = Some(&*request.parameters.model).filter(|name| !name.is_empty());
        Self {
            id: request.id.as_str().to_owned(),
            model: asked.unwrap_or_else(|| request.served_name()).to_owned(),
            shape,
            prompt_tokens: request.prompts.iter().map(|prompt| prompt.tokens.len() as u32).collect(),
            samples: request.samples as usize,
            ignored,
        }
    }

    /// Memory of a whole answer besides what the model says.
    pub(super) fn bytes_before(&self) -> u64 {
        let echoed: usize = self.shape.echoed.iter().map(String::len).sum();
        // As it is kept, and for each answer as it is written and as it is sent.
        let texts = echoed * (1 + 2 * self.samples);
        RESPONSE_BYTES + ANSWER_BYTES * self.answers() as u64 + texts as u64
    }

    /// Memory that a delta adds to a whole answer as it is written and as it is sent.
    pub(super) fn bytes_of(delta: &Delta) -> u64 {
        2 * delta.text.len() as u64
    }

    fn answers(&self) -> usize {
        self.prompt_tokens.len() * self.samples
    }

    /// The response of a whole answer.
    pub(super) fn whole(&mut self, gathered: &Gathered) -> ModelInferResponse {
        fn part((delta, finished): &(Delta, Finished)) -> Part<'_> {
            Part { text: &delta.text, tokens: delta.token_ids.len(), reason: Some(finished.reason_name()) }
        }
        let parts: Vec<Part<'_>> = gathered.samples.iter().map(part).collect();
        self.response(&parts)
    }

    /// The response for an event; `None` if it says nothing.
    pub(super) fn of(&mut self, event: &Event) -> Option<ModelStreamInferResponse> {
        let mut parts = vec![Part::default(); self.answers()];
        let is_final = match event {
            Event::Delta(delta) => {
                *parts.get_mut(delta.sample as usize)? =
                    Part { text: &delta.text, tokens: delta.token_ids.len(), reason: None };
                false
            }
            Event::Finished(finished) => {
                let is_final = finished.total.is_some();
                if !is_final && !self.shape.finish_reason {
                    return None;
                }
                parts.get_mut(finished.sample as usize)?.reason = Some(finished.reason_name());
                is_final
            }
        };
        let response = self.response(&parts);
        Some(streamed(response, is_final))
    }

    fn response(&mut self, parts: &[Part<'_>]) -> ModelInferResponse {
        let mut response = ModelInferResponse {
            model_name: self.model.clone(),
            model_version: VERSION.into(),
            id: self.id.clone(),
            ..Default::default()
        };
        if !self.ignored.is_empty() {
            let names = std::mem::take(&mut self.ignored).join(", ");
            response.parameters.insert(IGNORED.into(), string(names));
        }
        let mut add = |name: &str, datatype: &str, size: usize, raw: Vec<u8>| {
            let shape = vec![size as i64];
            let output =
                InferOutputTensor { name: name.into(), datatype: datatype.into(), shape, ..Default::default() };
            response.outputs.push(output);
            response.raw_output_contents.push(raw.into());
        };
        if self.shape.text {
            let echo = |answer: usize| self.shape.echoed.get(answer / self.samples).map_or("", String::as_str);
            let texts = parts.iter().enumerate().map(|(answer, part)| [echo(answer), part.text]);
            add(TEXT_OUTPUT, BYTES, parts.len(), bytes(texts));
        }
        if self.shape.finish_reason {
            let reasons = parts.iter().map(|part| ["", part.reason.unwrap_or(NOT_ENDED)]);
            add(FINISH_REASON, BYTES, parts.len(), bytes(reasons));
        }
        if self.shape.input_tokens {
            let raw = self.prompt_tokens.iter().flat_map(|tokens| tokens.to_le_bytes()).collect();
            add(INPUT_TOKENS, UINT32, self.prompt_tokens.len(), raw);
        }
        if self.shape.output_tokens {
            let raw = parts.iter().flat_map(|part| (part.tokens as u32).to_le_bytes()).collect();
            add(OUTPUT_TOKENS, UINT32, parts.len(), raw);
        }
        response
    }
}

/// A response of a stream.
pub(super) fn streamed(mut response: ModelInferResponse, is_final: bool) -> ModelStreamInferResponse {
    let last = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(is_final)) };
    response.parameters.insert(FINAL.into(), last);
    ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) }
}

/// The response that ends a request of a stream with an error.
pub(super) fn failed(id: &str, error: &RequestError) -> ModelStreamInferResponse {
    let mut parameters = HashMap::from([(status::KIND.to_owned(), string(error.kind.name()))]);
    if let Some(wait) = error.retry_after {
        let ms = i64::try_from(wait.as_millis()).unwrap_or(i64::MAX);
        let ms = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(ms)) };
        parameters.insert(RETRY_AFTER_MS.into(), ms);
    }
    let id = id[..id.floor_char_boundary(ID_BYTES_MAX)].to_owned();
    let response = streamed(ModelInferResponse { id, parameters, ..Default::default() }, true);
    let message = &error.message[..error.message.floor_char_boundary(status::MESSAGE_BYTES_MAX)];
    ModelStreamInferResponse { error_message: message.to_owned(), ..response }
}

/// Elements of type BYTES, each of two texts: its length, in four bytes, and its bytes.
fn bytes<'a>(texts: impl Iterator<Item = [&'a str; 2]> + Clone) -> Vec<u8> {
    let size = |[a, b]: [&str; 2]| a.len() + b.len();
    let mut raw = Vec::with_capacity(texts.clone().map(|text| size_of::<u32>() + size(text)).sum());
    for text in texts {
        raw.extend((size(text) as u32).to_le_bytes());
        text.iter().for_each(|text| raw.extend(text.as_bytes()));
    }
    raw
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Total;
    use baton_types::{ErrorKind, FinishReason, PhaseTimings};
    use std::time::Duration;

    fn responses(shape: Shape, prompts: usize, samples: usize) -> Responses {
        let (id, model, prompt_tokens) = ("r".to_owned(), "m".to_owned(), vec![3; prompts]);
        Responses { id, model, shape, prompt_tokens, samples, ignored: vec!["a".into(), "b".into()] }
    }

    fn delta(sample: u32, text: &str) -> Delta {
        Delta { sample, text: text.into(), token_ids: vec![1, 2], ..Delta::default() }
    }

    fn finished(sample: u32, total: Option<Total>) -> Finished {
        let (reason, timings) = (FinishReason::Length, PhaseTimings::default());
        Finished { sample, reason, stop: None, timings, crossed_classes: Vec::new(), total }
    }

    fn flag(response: &ModelInferResponse) -> bool {
        matches!(response.parameters[FINAL].parameter_choice, Some(ParameterChoice::BoolParam(true)))
    }

    #[test]
    fn a_stream_has_a_response_for_each_delta_and_one_at_the_end() {
        let shape = Shape { is_stream: true, text: true, output_tokens: true, ..Shape::default() };
        let mut to = responses(shape, 1, 2);
        let first = to.of(&Event::Delta(delta(1, "hé"))).unwrap().infer_response.unwrap();
        assert_eq!((&*first.id, &*first.model_name, &*first.model_version), ("r", "m", "1"));
        assert_eq!(first.outputs[0].shape, [2]);
        assert_eq!(first.raw_output_contents[0][..], *b"\0\0\0\0\x03\0\0\0h\xc3\xa9");
        assert_eq!(first.raw_output_contents[1][..], *b"\0\0\0\0\x02\0\0\0");
        assert!(!flag(&first));
        assert_eq!(first.parameters[IGNORED], string("a, b"));
        assert!(to.of(&Event::Finished(finished(1, None))).is_none(), "nothing asks for its reason");
        let last = to.of(&Event::Finished(finished(0, Some(Total::default())))).unwrap().infer_response.unwrap();
        assert_eq!(last.raw_output_contents[0][..], [0; 8]);
        assert!(flag(&last) && !last.parameters.contains_key(IGNORED));
    }

    #[test]
    fn a_whole_answer_begins_with_its_prompt() {
        let echoed = vec!["p".to_owned(), "qq".to_owned()];
        let shape = Shape { echoed, text: true, finish_reason: true, input_tokens: true, ..Shape::default() };
        let mut to = responses(shape, 2, 1);
        let samples = vec![(delta(0, "a"), finished(0, None)), (delta(1, ""), finished(1, None))];
        let hold = baton_node::intake::Intake::new(1, 1);
        let hold = hold.hold(baton_node::intake::Client::at(std::net::Ipv4Addr::LOCALHOST.into()));
        let whole = to.whole(&Gathered { samples, total: Total::default(), hold, written: 0 });
        let names: Vec<_> = whole.outputs.iter().map(|output| (&*output.name, &*output.datatype)).collect();
        assert_eq!(names, [(TEXT_OUTPUT, "BYTES"), (FINISH_REASON, "BYTES"), (INPUT_TOKENS, "UINT32")]);
        assert_eq!(whole.raw_output_contents[0][..], *b"\x02\0\0\0pa\x02\0\0\0qq");
        assert_eq!(whole.raw_output_contents[1][..], *b"\x06\0\0\0length\x06\0\0\0length");
        assert_eq!(whole.raw_output_contents[2][..], *b"\x03\0\0\0\x03\0\0\0");
        assert!(!whole.parameters.contains_key(FINAL));
        // Of each prompt, all samples behind one another.
        let echoed = vec!["p".to_owned(), "qq".to_owned()];
        let mut several = responses(Shape { echoed, text: true, ..Shape::default() }, 2, 2);
        let samples = ["a", "b", "c", "d"].iter().zip(0..).map(|(text, at)| (delta(at, text), finished(at, None)));
        let hold = baton_node::intake::Intake::new(1, 1);
        let hold = hold.hold(baton_node::intake::Client::at(std::net::Ipv4Addr::LOCALHOST.into()));
        let whole_of_several =
            several.whole(&Gathered { samples: samples.collect(), total: Total::default(), hold, written: 0 });
        let texts = &whole_of_several.raw_output_contents[0][..];
        assert_eq!(texts, *b"\x02\0\0\0pa\x02\0\0\0pb\x03\0\0\0qqc\x03\0\0\0qqd");
        let kept: usize = whole.raw_output_contents.iter().map(|raw| raw.len()).sum();
        assert!(to.bytes_before() + Responses::bytes_of(&delta(0, "a")) >= 2 * kept as u64);
    }

    #[test]
    fn an_error_names_its_request_and_its_kind() {
        let error = RequestError::new(ErrorKind::Overloaded, "x".repeat(5000)).retry_after(Duration::from_secs(2));
        let failed = failed(&"é".repeat(200), &error);
        let response = failed.infer_response.unwrap();
        assert_eq!((failed.error_message.len(), response.id.len()), (status::MESSAGE_BYTES_MAX, ID_BYTES_MAX));
        assert_eq!(response.parameters[status::KIND], string("overloaded"));
        let wait = response.parameters[RETRY_AFTER_MS].parameter_choice.clone();
        assert_eq!(wait, Some(ParameterChoice::Int64Param(2000)));
        assert!(flag(&response));
    }
}
