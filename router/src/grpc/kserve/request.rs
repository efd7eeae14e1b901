//! `ModelInferRequest` to the request, with the tensors and parameters of Triton's vLLM backend.

use super::check_version;
use super::tensors::{BOOL, BYTES, INT64, Tensors};
use crate::openai::sampling;
use crate::request::{Parameters, Prompt, Segment};
use baton_proto::kserve::infer_parameter::ParameterChoice;
use baton_proto::kserve::model_metadata_response::TensorMetadata;
use baton_proto::kserve::{InferParameter, ModelInferRequest};
use baton_types::{ErrorKind, RequestError, shown};
use serde_json::{Number, Value};
use std::collections::HashMap;
use std::time::Duration;

pub(super) const TEXT_OUTPUT: &str = "text_output";
pub(super) const FINISH_REASON: &str = "finish_reason";
pub(super) const INPUT_TOKENS: &str = "num_input_tokens";
pub(super) const OUTPUT_TOKENS: &str = "num_output_tokens";
const OUTPUTS: [&str; 4] = [TEXT_OUTPUT, FINISH_REASON, INPUT_TOKENS, OUTPUT_TOKENS];

/// Inputs, with the datatype and the shape that their description has.
const INPUTS: [(&str, &str, i64); 8] = [
    ("text_input", BYTES, 1),
    ("input_ids", INT64, -1),
    ("stream", BOOL, 1),
    ("sampling_parameters", BYTES, 1),
    ("exclude_input_in_output", BOOL, 1),
    ("return_finish_reason", BOOL, 1),
    ("return_num_input_tokens", BOOL, 1),
    ("return_num_output_tokens", BOOL, 1),
];

/// What a message asks for.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) parameters: Parameters,
    pub(super) prompt: Prompt,
    /// The parameter `timeout`.
    pub(super) timeout: Option<Duration>,
    pub(super) shape: Shape,
    /// Names of parameters that the API does not have.
    pub(super) unknown: Vec<String>,
}

/// How it is answered.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Responses as tokens come.
    pub(super) is_stream: bool,
    /// Texts of the prompts, if the answers begin with them.
    pub(super) echoed: Vec<String>,
    pub(super) text: bool,
    pub(super) finish_reason: bool,
    pub(super) input_tokens: bool,
    pub(super) output_tokens: bool,
}

/// Converts a message. `may_stream`: whether the method answers as tokens come; `is_strict`: whether unknown parameters
/// are refused.
pub(super) fn request(
    mut message: ModelInferRequest,
    may_stream: bool,
    is_strict: bool,
) -> Result<Asked, RequestError> {
    check_version(&message.model_version)?;
    let mut inputs = Tensors::of(&mut message)?;
    let mut flag = |name: &str| inputs.take(name).map(|tensor| tensor.flag()).transpose();
    let is_stream = flag("stream")?.unwrap_or(false);
    let excludes = flag("exclude_input_in_output")?;
    let [finish_reason, input_tokens, output_tokens] =
        ["return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"].map(&mut flag);
    for logprobs in ["return_logprobs", "return_cumulative_logprob"] {
        if flag(logprobs)? == Some(true) {
            let message =
                format!("{logprobs} is not supported: log-probabilities come over HTTP and baton.v1.Inference");
            return Err(RequestError::new(ErrorKind::Unsupported, message).param(logprobs));
        }
    }
    let outputs = outputs(&message)?;
    let is_asked = |name: &str, flag: Result<Option<bool>, RequestError>| {
        let named = outputs.contains(&name);
        Ok::<_, RequestError>(flag?.unwrap_or(false) && outputs.is_empty() || named)
    };
    let mut shape = Shape {
        is_stream,
        echoed: Vec::new(),
        text: outputs.is_empty() || outputs.contains(&TEXT_OUTPUT),
        finish_reason: is_asked(FINISH_REASON, finish_reason)?,
        input_tokens: is_asked(INPUT_TOKENS, input_tokens)?,
        output_tokens: is_asked(OUTPUT_TOKENS, output_tokens)?,
    };
    if is_stream && !may_stream {
        let message = "stream: ModelInfer has one response; call ModelStreamInfer, or leave stream out";
        return Err(RequestError::invalid("stream", message));
    }
    if is_stream && excludes == Some(false) {
        let message = "exclude_input_in_output: a stream never has the input; leave it out, or set it to true";
        return Err(RequestError::invalid("exclude_input_in_output", message));
    }
    let text = inputs.take("sampling_parameters").map(|tensor| tensor.text()).transpose()?;
    let prompts = match (inputs.take("text_input"), inputs.take("input_ids")) {
        (Some(texts), None) => {
            let texts = texts.texts()?;
            if is_stream && texts.len() > 1 {
                let message =
                    format!("text_input has {} texts, and a stream answers one: send several requests", texts.len());
                return Err(RequestError::invalid("text_input", message));
            }
            // As in vLLM's backend, the answer begins with the prompt unless it is streamed.
            if !is_stream && !excludes.unwrap_or(false) {
                shape.echoed.clone_from(&texts);
            }
            texts.into_iter().map(Segment::Text).collect()
        }
        (None, Some(_)) if excludes == Some(false) => {
            let message =
                "exclude_input_in_output: token ids are not repeated as text; set it to true, or send text_input";
            return Err(RequestError::invalid("exclude_input_in_output", message));
        }
        (None, Some(ids)) => vec![Segment::Tokens(ids.ids()?)],
        (Some(_), Some(_)) => {
            let message = "text_input and input_ids are both there: send one of them";
            return Err(RequestError::invalid("input_ids", message));
        }
        (None, None) => {
            let message = "the input text_input is missing: it is the prompt, of datatype BYTES and shape [1]";
            return Err(RequestError::invalid("text_input", message));
        }
    };
    if let Some(name) = inputs.left() {
        let known = INPUTS.map(|(name, ..)| name).join(", ");
        let message = format!("no model here has the input {}; the inputs are {known}", shown(name));
        return Err(RequestError::invalid(format!("{name:.64}"), message));
    }
    let timeout = take_reserved(&mut message.parameters)?;
    let mut named: Vec<_> = message.parameters.iter().collect();
    named.sort_by_key(|(name, _)| *name);
    let named = named.into_iter().map(|(name, value)| Ok((&**name, json(name, value)?)));
    let named = named.collect::<Result<Vec<_>, RequestError>>()?;
    let mut common = sampling::parse(named.into_iter(), text.as_deref())?;
    if is_strict {
        common.unknown.check_none()?;
    }
    common.parameters.model = message.model_name;
    Ok(Asked {
        parameters: common.parameters,
        prompt: if prompts.len() == 1 { Prompt::Segments(prompts) } else { Prompt::List(prompts) },
        timeout,
        shape,
        unknown: common.unknown.into_names(),
    })
}

/// Inputs and outputs of every model.
pub(super) fn metadata() -> (Vec<TensorMetadata>, Vec<TensorMetadata>) {
    let tensor = |name: &str, datatype: &str, size: i64| TensorMetadata {
        name: name.into(),
        datatype: datatype.into(),
        shape: vec![size],
    };
    let output = |name| if matches!(name, TEXT_OUTPUT | FINISH_REASON) { BYTES } else { super::tensors::UINT32 };
    (
        INPUTS.map(|(name, datatype, size)| tensor(name, datatype, size)).into(),
        OUTPUTS.map(|name| tensor(name, output(name), -1)).into(),
    )
}

/// Names of the outputs that are asked for; none: those by default.
fn outputs(message: &ModelInferRequest) -> Result<Vec<&'static str>, RequestError> {
    let known = |name: &str| OUTPUTS.into_iter().find(|known| *known == name);
    let output = |name: &str| {
        known(name).ok_or_else(|| {
            let known = OUTPUTS.join(", ");
            RequestError::invalid(
                "outputs",
                format!("no model here has the output {}; the outputs are {known}", shown(name)),
            )
        })
    };
    message.outputs.iter().map(|asked| output(&asked.name)).collect()
}

/// Takes the parameters that the protocol reserves; the result is the timeout.
fn take_reserved(parameters: &mut HashMap<String, InferParameter>) -> Result<Option<Duration>, RequestError> {
    let unsupported = |name: &str, instead: &str| {
        Err(RequestError::new(ErrorKind::Unsupported, format!("{name} is not supported: {instead}")).param(name))
    };
    for name in ["sequence_id", "sequence_start", "sequence_end"] {
        match parameters.remove(name).and_then(|parameter| parameter.parameter_choice) {
            None
            | Some(
                ParameterChoice::Int64Param(0) | ParameterChoice::Uint64Param(0) | ParameterChoice::BoolParam(false),
            ) => {}
            Some(ParameterChoice::StringParam(id)) if id.is_empty() => {}
            Some(_) => return unsupported(name, "each request has its whole prompt; leave it out"),
        }
    }
    match parameters.remove("priority").and_then(|parameter| parameter.parameter_choice) {
        None | Some(ParameterChoice::Int64Param(0) | ParameterChoice::Uint64Param(0)) => {}
        Some(_) => {
            return unsupported(
                "priority",
                "levels from 1 on; set priority in sampling_parameters, where higher goes first",
            );
        }
    }
    // A last response is always there.
    parameters.remove("triton_enable_empty_final_response");
    let timeout = match parameters.remove("timeout").and_then(|parameter| parameter.parameter_choice) {
        None => Some(0),
        Some(ParameterChoice::Int64Param(us)) => u64::try_from(us).ok(),
        Some(ParameterChoice::Uint64Param(us)) => Some(us),
        Some(_) => None,
    };
    match timeout {
        None => Err(RequestError::invalid("timeout", "timeout must be an integer, microseconds; 0 is none")),
        Some(us) => Ok((us > 0).then(|| Duration::from_micros(us))),
    }
}

/// The JSON of a parameter.
fn json(name: &str, parameter: &InferParameter) -> Result<String, RequestError> {
    Ok(match &parameter.parameter_choice {
        None => Value::Null,
        Some(ParameterChoice::BoolParam(value)) => Value::from(*value),
        Some(ParameterChoice::Int64Param(value)) => Value::from(*value),
        Some(ParameterChoice::Uint64Param(value)) => Value::from(*value),
        Some(ParameterChoice::StringParam(value)) => Value::from(&**value),
        Some(ParameterChoice::DoubleParam(value)) => Number::from_f64(*value).map(Value::Number).ok_or_else(|| {
            let name = format!("{name:.64}");
            RequestError::invalid(&*name, format!("{name} must be finite, got {value}"))
        })?,
    }
    .to_string())
}

#[cfg(test)]
mod tests {
    use super::super::VERSION;
    use super::*;
    use baton_proto::kserve::InferTensorContents;
    use baton_proto::kserve::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
    use prost::bytes::Bytes;

    fn input(name: &str, datatype: &str, size: usize, contents: InferTensorContents) -> InferInputTensor {
        let shape = vec![size as i64];
        InferInputTensor {
            name: name.into(),
            datatype: datatype.into(),
            shape,
            contents: Some(contents),
            ..Default::default()
        }
    }

    fn texts(name: &str, texts: &[&str]) -> InferInputTensor {
        let bytes_contents = texts.iter().map(|text| Bytes::copy_from_slice(text.as_bytes())).collect();
        input(name, BYTES, texts.len(), InferTensorContents { bytes_contents, ..Default::default() })
    }

    fn flag(name: &str, value: bool) -> InferInputTensor {
        input(name, BOOL, 1, InferTensorContents { bool_contents: vec![value], ..Default::default() })
    }

    fn ids(ids: &[i64]) -> InferInputTensor {
        input("input_ids", INT64, ids.len(), InferTensorContents { int64_contents: ids.to_vec(), ..Default::default() })
    }

    fn of(inputs: Vec<InferInputTensor>) -> ModelInferRequest {
        ModelInferRequest { model_name: "m".into(), inputs, ..Default::default() }
    }

    fn with(name: &str, value: ParameterChoice) -> ModelInferRequest {
        let parameters = [(name.to_owned(), InferParameter { parameter_choice: Some(value) })].into();
        ModelInferRequest { parameters, ..of(vec![texts("text_input", &["x"])]) }
    }

    fn read(message: ModelInferRequest) -> Result<Asked, (ErrorKind, String)> {
        request(message, true, false).map_err(|e| (e.kind, e.param.unwrap_or_default()))
    }

    #[test]
    fn prompts_are_texts_or_ids() {
        let text = |text: &str| Segment::Text(text.to_owned());
        let one = read(of(vec![texts("text_input", &["hi"])])).unwrap();
        assert_eq!((one.prompt, one.shape.echoed), (Prompt::Segments(vec![text("hi")]), vec!["hi".to_owned()]));
        assert_eq!(one.parameters.model, "m");
        let two = read(of(vec![texts("text_input", &["a", "b"]), flag("exclude_input_in_output", true)])).unwrap();
        assert_eq!((two.prompt, two.shape.echoed.len()), (Prompt::List(vec![text("a"), text("b")]), 0));
        let tokens = read(of(vec![ids(&[5, 6])])).unwrap();
        assert_eq!(tokens.prompt, Prompt::Segments(vec![Segment::Tokens(vec![5, 6])]));
        let stream = read(of(vec![texts("text_input", &["a"]), flag("stream", true)])).unwrap();
        assert!(stream.shape.is_stream && stream.shape.echoed.is_empty());
        let refused: [(Vec<InferInputTensor>, &str); 8] = [
            (vec![], "text_input"),
            (vec![flag("stream", true)], "text_input"),
            (vec![texts("text_input", &["a"]), ids(&[1])], "input_ids"),
            (vec![ids(&[1]), flag("exclude_input_in_output", false)], "exclude_input_in_output"),
            (vec![texts("text_input", &["a", "b"]), flag("stream", true)], "text_input"),
            (
                vec![texts("text_input", &["a"]), flag("stream", true), flag("exclude_input_in_output", false)],
                "exclude_input_in_output",
            ),
            (vec![texts("text_input", &["a"]), texts("image", &["a"])], "image"),
            (vec![texts("text_input", &["a"]), texts("stream", &["a"])], "stream"),
        ];
        for (inputs, param) in refused {
            assert_eq!(read(of(inputs)).unwrap_err(), (ErrorKind::InvalidRequest, param.to_owned()));
        }
        let logprobs = vec![texts("text_input", &["a"]), flag("return_logprobs", true)];
        assert_eq!(read(of(logprobs)).unwrap_err(), (ErrorKind::Unsupported, "return_logprobs".into()));
        let unary = of(vec![texts("text_input", &["a"]), flag("stream", true)]);
        assert_eq!(request(unary, false, false).unwrap_err().param.as_deref(), Some("stream"));
    }

    #[test]
    fn parameters_are_read_from_both_places() {
        let double = read(with("temperature", ParameterChoice::DoubleParam(0.5))).unwrap();
        assert_eq!(double.parameters.sampling.temperature, Some(0.5));
        let text = read(with("max_tokens", ParameterChoice::StringParam("9".into()))).unwrap();
        assert_eq!(text.parameters.sampling.max_tokens, Some(9));
        let seed = read(with("seed", ParameterChoice::Uint64Param(u64::MAX))).unwrap();
        assert_eq!(seed.parameters.sampling.seed, Some(u64::MAX));
        let tensor = texts("sampling_parameters", &[r#"{"n": 3, "priority": 7}"#]);
        let mut both = with("n", ParameterChoice::Int64Param(2));
        both.inputs.push(tensor);
        let both = read(both).unwrap();
        assert_eq!((both.parameters.samples, both.parameters.priority), (3, 7));
        let nan = read(with("temperature", ParameterChoice::DoubleParam(f64::NAN)));
        assert_eq!(nan.unwrap_err(), (ErrorKind::InvalidRequest, "temperature".into()));
        let unknown = with("early_stopping", ParameterChoice::BoolParam(true));
        assert_eq!(read(unknown.clone()).unwrap().unknown, ["early_stopping"]);
        assert_eq!(request(unknown, true, true).unwrap_err().param.as_deref(), Some("early_stopping"));
    }

    #[test]
    fn reserved_parameters_have_their_meaning() {
        use ParameterChoice::{BoolParam, Int64Param, StringParam, Uint64Param};
        let timeout = |value| read(with("timeout", value)).map(|asked| asked.timeout);
        assert_eq!(timeout(Int64Param(1_500_000)), Ok(Some(Duration::from_millis(1500))));
        assert_eq!(timeout(Int64Param(0)), Ok(None));
        for wrong in [Int64Param(-1), BoolParam(true), StringParam("1".into())] {
            assert_eq!(timeout(wrong), Err((ErrorKind::InvalidRequest, "timeout".into())));
        }
        for (name, none) in
            [("priority", Uint64Param(0)), ("sequence_id", Int64Param(0)), ("sequence_start", BoolParam(false))]
        {
            assert!(read(with(name, none)).unwrap().unknown.is_empty(), "{name}");
        }
        for (name, some) in
            [("priority", Uint64Param(1)), ("sequence_id", StringParam("a".into())), ("sequence_end", BoolParam(true))]
        {
            assert_eq!(read(with(name, some)).unwrap_err(), (ErrorKind::Unsupported, name.into()));
        }
        let empty = with("triton_enable_empty_final_response", BoolParam(true));
        assert!(read(empty).unwrap().unknown.is_empty());
    }

    #[test]
    fn outputs_are_those_asked_for() {
        let shape = |outputs: &[&str], flags: &[&str]| {
            let mut message = of(vec![texts("text_input", &["a"])]);
            message.inputs.extend(flags.iter().map(|name| flag(name, true)));
            let output = |name: &&str| InferRequestedOutputTensor { name: (*name).into(), ..Default::default() };
            message.outputs = outputs.iter().map(output).collect();
            read(message).map(|Asked { shape, .. }| (shape.text, shape.finish_reason, shape.output_tokens))
        };
        assert_eq!(shape(&[], &[]), Ok((true, false, false)));
        assert_eq!(shape(&[], &["return_finish_reason"]), Ok((true, true, false)));
        assert_eq!(shape(&["text_output"], &["return_finish_reason"]), Ok((true, false, false)));
        assert_eq!(shape(&["num_output_tokens"], &[]), Ok((false, false, true)));
        assert_eq!(shape(&["nothing"], &[]), Err((ErrorKind::InvalidRequest, "outputs".into())));
    }

    #[test]
    fn versions_are_checked() {
        let version = |version: &str| read(ModelInferRequest { model_version: version.into(), ..of(vec![ids(&[1])]) });
        assert!(version("").is_ok() && version(VERSION).is_ok());
        assert_eq!(version("2").unwrap_err().0, ErrorKind::ModelNotFound);
    }
}
