mod calls;
mod echo;
mod options;
mod unknown;

use super::stream::Chunks;
use super::*;
use crate::request::{Prompt, Segment};
use crate::wire::{Form as _, Parts, StreamForm as _, serialize};
use baton_text::{Content, Message, Role};
use baton_types::{ErrorKind, RequestError};
use serde_json::{Value, json};

/// A body with one more field.
fn with(mut base: Value, name: &str, value: Value) -> Vec<u8> {
    base[name] = value;
    base.to_string().into_bytes()
}

fn chat() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
}

fn completion() -> Value {
    json!({"model": "m", "prompt": "Hi"})
}

#[test]
fn the_last_one_of_a_name_counts_and_null_is_none() {
    let samples = |body: &str| completions::parse(body.as_bytes()).unwrap().1.parameters.samples;
    assert_eq!(samples(r#"{"prompt": "x", "n": 2, "n": 3}"#), 3);
    assert_eq!(samples(r#"{"prompt": "x", "n": 2, "n": null}"#), 1);
}

#[test]
fn every_unsupported_field_names_itself() {
    let both = [
        ("use_beam_search", json!(true), json!(false)),
        ("length_penalty", json!(0.5), json!(1.0)),
        ("skip_special_tokens", json!(false), json!(true)),
        ("include_stop_str_in_output", json!(true), json!(false)),
        ("logits_processors", json!(["x"]), json!([])),
        ("guided_whitespace_pattern", json!("a"), Value::Null),
    ];
    let chat_only = [
        ("echo", json!(true), json!(false)),
        ("functions", json!([{}]), json!([])),
        ("function_call", json!({"name": "f"}), json!("none")),
        ("modalities", json!(["text", "audio"]), json!(["text"])),
        ("audio", json!({}), Value::Null),
        ("prediction", json!({}), Value::Null),
        ("web_search_options", json!({}), Value::Null),
        ("verbosity", json!("low"), Value::Null),
        ("chat_template", json!("x"), Value::Null),
        ("documents", json!([{}]), json!([])),
        ("best_of", json!(2), json!(1)),
    ];
    let completions_only = [("suffix", json!("x"), json!("")), ("add_special_tokens", json!(false), json!(true))];
    let check =
        |name: &str, refused: Vec<u8>, accepted: Vec<u8>, parse: fn(&[u8]) -> Result<(), baton_types::RequestError>| {
            let error = parse(&refused).unwrap_err();
            assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::Unsupported, Some(name)));
            parse(&accepted).unwrap_or_else(|e| panic!("{name} at its default: {e}"));
        };
    for (name, bad, good) in both.iter().chain(&chat_only) {
        check(name, with(chat(), name, bad.clone()), with(chat(), name, good.clone()), |b| chat::parse(b).map(drop));
    }
    for (name, bad, good) in both.iter().chain(&completions_only) {
        let (bad, good) = (with(completion(), name, bad.clone()), with(completion(), name, good.clone()));
        check(name, bad, good, |b| completions::parse(b).map(drop));
    }
}

/// A message about a wrong type would repeat the whole value, with eight bytes for each byte.
#[test]
fn no_message_is_as_long_as_what_it_is_about() {
    let long = "\u{7f}".repeat(1 << 20);
    let cases = [
        ("max_tokens", json!(long)),
        ("stream_options", json!({long.as_str(): true})),
        ("cache", json!({long.as_str(): 1})),
        ("prefill_policy", json!(long)),
        ("prefill_policy", json!(&long[..10 << 10])),
        ("stop", json!({long.as_str(): 1})),
        ("stop_token_ids", json!([1, long])),
        ("logit_bias", json!({long.as_str(): 1})),
        ("logit_bias", json!({"1": long})),
        ("allowed_token_ids", json!([1, long])),
        ("chat_template_kwargs", json!(&long[..10 << 10])),
        ("messages", json!(long)),
        ("messages", json!([long])),
        ("messages", json!([{"role": long, "content": "x"}])),
        ("messages", json!([{"role": "user", "content": {long.as_str(): 1}}])),
        ("messages", json!([{"role": "user", "content": [long]}])),
    ];
    for (name, value) in cases {
        let error = chat::parse(&with(chat(), name, value)).unwrap_err();
        assert!(error.message.len() < 1024, "{name:.20}: {} bytes", error.message.len());
    }
    for prompt in [json!([1, long]), json!({long.as_str(): 1}), json!([[1, long]])] {
        let error = completions::parse(json!({"prompt": prompt}).to_string().as_bytes()).unwrap_err();
        assert!(error.message.len() < 1024, "{} bytes", error.message.len());
    }
    assert!(chat::parse(json!(long).to_string().as_bytes()).unwrap_err().message.len() < 1024);
}

#[test]
fn malformed_fields_name_themselves() {
    let cases = [
        ("temperature", json!("hot"), "temperature"),
        ("top_k", json!(-2), "top_k"),
        ("seed", json!(1.5), "seed"),
        ("stop", json!(5), "stop"),
        ("stop", json!(["a", ""]), "stop"),
        ("stop", json!(vec!["a"; 17]), "stop"),
        ("max_tokens", json!(-1), "max_tokens"),
        ("stream_options", json!({"include_usage": true}), "stream_options"),
        ("chat_template_kwargs", json!([]), "chat_template_kwargs"),
        ("top_logprobs", json!(3), "top_logprobs"),
        ("prefill_policy", json!("never"), "prefill_policy"),
        ("messages", json!([]), "messages"),
        ("messages", json!("hi"), "messages"),
        ("messages", json!([{"role": "king", "content": "x"}]), "messages[0].role"),
        ("messages", json!([{"role": "user"}]), "messages[0].content"),
        ("messages", json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0]"),
        ("messages", json!([{"role": "assistant", "content": "", "tool_calls": [{}]}]), "messages[0].tool_calls"),
    ];
    for (name, value, param) in cases {
        let error = chat::parse(&with(chat(), name, value)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
        assert_eq!(error.kind.http_status(), 400);
    }
    for body in [&b"{"[..], b"[]", b"{}", b""] {
        assert_eq!(chat::parse(body).unwrap_err().kind, ErrorKind::InvalidRequest);
        assert_eq!(completions::parse(body).unwrap_err().kind, ErrorKind::InvalidRequest);
    }
}

#[test]
fn chat_parts_and_roles() {
    let body = json!({"model": "m", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 5,
        "max_completion_tokens": 7, "logprobs": true, "top_logprobs": 2, "seed": -1, "stop": "END", "top_k": -1,
        "chat_template_kwargs": {"enable_thinking": false}, "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]});
    let (prompt, common) = chat::parse(body.to_string().as_bytes()).unwrap();
    let Prompt::Chat { messages, template_kwargs, .. } = prompt else { panic!("not a chat") };
    assert_eq!(messages[0], Message::text(Role::Developer, "Be brief."));
    assert_eq!(messages[1].content, Some(Content::Parts(vec!["a".into(), "b".into()])));
    assert_eq!(messages[1].extra["name"], json!("ann"));
    assert_eq!(template_kwargs["enable_thinking"], json!(false));
    assert!(common.options.stream && common.options.include_usage);
    let (s, mut stops) = (common.parameters.sampling, common.parameters.stops);
    assert_eq!(
        (s.max_tokens, s.max_tokens_default, s.logprobs, s.seed, s.top_k),
        (Some(7), None, Some(2), Some(u64::MAX), Some(0))
    );
    assert!(stops.push("EN").1.is_none() && stops.push("D").1.is_some());
}

#[test]
fn completion_prompts() {
    let text = |s: &str| Segment::Text(s.into());
    let one = |segment| Some(Prompt::Segments(vec![segment]));
    let ids = |ids: &[u32]| Segment::Tokens(ids.to_vec());
    let cases = [
        (json!("a"), one(text("a"))),
        (json!(["a"]), one(text("a"))),
        (json!([1, 2]), one(ids(&[1, 2]))),
        (json!([[1, 2]]), one(ids(&[1, 2]))),
        (json!(["a", "b"]), Some(Prompt::List(vec![text("a"), text("b")]))),
        (json!([[1], [2, 3]]), Some(Prompt::List(vec![ids(&[1]), ids(&[2, 3])]))),
        (json!(vec!["a"; 256]), Some(Prompt::List(vec![text("a"); 256]))),
        (json!(vec!["a"; 257]), None),
        (json!([[1], []]), None),
        (json!(["a", 1]), None),
        (json!([1, "a"]), None),
        (json!([[1], ["a"]]), None),
        (json!([[[1]]]), None),
        (json!([]), None),
        (json!([-1]), None),
        (json!({}), None),
    ];
    for (value, expected) in cases {
        let parsed = completions::parse(&with(completion(), "prompt", value.clone()));
        match (parsed, expected) {
            (Ok((prompt, common)), Some(expected)) => {
                assert_eq!(prompt, expected);
                assert_eq!(common.parameters.sampling.max_tokens_default, Some(16));
            }
            (Err(error), None) => assert_eq!(error.param.as_deref(), Some("prompt"), "{value}"),
            (parsed, _) => panic!("{value}: {parsed:?}"),
        }
    }
}

fn shown() -> PromptShown {
    PromptShown { tokens: 2, ids: [7, 8].into(), ..Default::default() }
}

pub(super) fn head(endpoint: Endpoint) -> AnswerHead {
    AnswerHead {
        endpoint,
        id: "id".into(),
        model: "m".into(),
        created: 0,
        options: AnswerOptions::default(),
        prompts: vec![PromptShown { tokens: 3, ..Default::default() }],
        samples: 1,
        seed: 1,
        token_text: std::sync::Arc::new(|token| (token < 256).then(|| vec![token as u8])),
        parts: None,
    }
}

/// A stream that may keep as much as it likes.
pub(super) fn chunks_of(head: AnswerHead) -> Chunks {
    let all = baton_node::intake::Intake::new(1 << 30, 1 << 30);
    Chunks::new(head, all.hold(baton_node::intake::Client::Tenant("a".into())))
}

fn read(chunk: &str) -> Value {
    serde_json::from_str(chunk).unwrap()
}

/// The chunks that are written, without the end of the stream.
fn written(write: impl FnOnce(&mut Vec<u8>) -> Result<(), RequestError>) -> Vec<Value> {
    let mut events = Vec::new();
    write(&mut events).unwrap();
    let events = String::from_utf8(events).unwrap();
    let events = events.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
    events.filter(|event| *event != "[DONE]").map(read).collect()
}

fn opening(chunks: &mut Chunks) -> Vec<Value> {
    (0..chunks.samples()).flat_map(|sample| written(|to| chunks.opening(sample, to))).collect()
}

fn closing(chunks: &mut Chunks, finished: &crate::output::Finished) -> Vec<Value> {
    written(|to| chunks.finished(finished, to))
}

#[test]
fn usage_so_far_stands_in_every_chunk_that_asks_for_it() {
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let options = AnswerOptions { stream: true, include_usage: true, continuous_usage: true, ..Default::default() };
        let mut chunks = chunks_of(AnswerHead { options, ..head(endpoint) });
        for chunk in opening(&mut chunks) {
            assert_eq!(chunk["usage"]["completion_tokens"], json!(0), "{chunk}");
        }
        // The first token shows nothing yet, and counts.
        let delta = |text: &str| crate::output::Delta { text: text.into(), token_ids: vec![5], ..Default::default() };
        assert!(written(|to| chunks.delta(&delta(""), to)).is_empty());
        let chunk = &written(|to| chunks.delta(&delta("x"), to))[0];
        let expected = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5});
        assert_eq!(chunk["usage"], expected, "{chunk}");
        let last = closing(&mut chunks, &finished(0, &[]));
        assert_eq!(last[0]["usage"], expected);
        assert!(last[1]["choices"].as_array().is_some_and(Vec::is_empty) && last[1]["usage"].is_object());
    }
}

/// A body of a million nodes in a field that is not read, or is refused: no tree is built of either.
#[test]
fn what_is_not_read_is_not_built() {
    let many = format!("[{}0]", "0,".repeat(1 << 20));
    let ignored = format!(r#"{{"prompt": [1, 2], "metadata": {many}, "user": {many}}}"#);
    assert!(completions::parse(ignored.as_bytes()).is_ok());
    let unknown = format!(r#"{{"prompt": [1, 2], "nobody_knows_it": {many}}}"#);
    assert_eq!(completions::parse(unknown.as_bytes()).unwrap().1.unknown.into_names(), ["nobody_knows_it"]);
    let refused = |field: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {many}}}"#);
        chat::parse(body.as_bytes()).unwrap_err().param
    };
    for field in ["tools", "logit_bias", "stop"] {
        assert_eq!(refused(field).as_deref(), Some(field));
    }
    let kwargs =
        format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {{"a": {many}}}}}"#);
    let error = chat::parse(kwargs.as_bytes()).unwrap_err();
    assert!(error.message.contains("16384 bytes") && error.param.as_deref() == Some("chat_template_kwargs"), "{error}");
    let deep = format!(r#"{{"prompt": {}}}"#, "[".repeat(1 << 20));
    assert_eq!(completions::parse(deep.as_bytes()).unwrap_err().kind, ErrorKind::InvalidRequest);
    let nested = format!(r#"{{"prompt": {}1{}}}"#, "[".repeat(100), "]".repeat(100));
    assert_eq!(completions::parse(nested.as_bytes()).unwrap_err().param.as_deref(), Some("prompt"));
}

fn finished(sample: u32, crossed: &[&str]) -> crate::output::Finished {
    crate::output::Finished {
        sample,
        reason: baton_types::FinishReason::Stop,
        stop: None,
        timings: Default::default(),
        crossed_classes: crossed.iter().map(|class| (*class).to_owned()).collect(),
        total: Some(Default::default()),
    }
}

#[test]
fn answers_that_crossed_classes_say_so_and_no_others() {
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let (head, crossed) = (head(endpoint), finished(0, &["a/r1", "a/r2"]));
        let whole = |finished: &crate::output::Finished| {
            serde_json::to_value(head.whole(&[(Default::default(), finished.clone())], &Default::default())).unwrap()
        };
        assert_eq!(whole(&crossed)["crossed_classes"], json!(["a/r1", "a/r2"]));
        assert_eq!(closing(&mut chunks_of(head.clone()), &crossed)[0]["crossed_classes"], json!(["a/r1", "a/r2"]));
        assert_eq!(whole(&finished(0, &[])).get("crossed_classes"), None);
    }
}

#[test]
fn samples_are_choices() {
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let head = AnswerHead { samples: 2, ..head(endpoint) };
        let classes = ["a", "b"];
        let samples = [0, 1].map(|sample| (Default::default(), finished(sample, &classes[sample as usize..][..1])));
        let body = serde_json::to_value(head.whole(&samples, &Default::default())).unwrap();
        for i in 0..2 {
            let choice = &body["choices"][i];
            assert_eq!((choice["index"].as_u64(), choice["finish_reason"].as_str()), (Some(i as u64), Some("stop")));
            assert_eq!(choice["crossed_classes"], json!([classes[i]]));
            assert!(choice["timings"].is_object());
        }
        assert!(body["timings"].is_null() && body["usage"].is_object() && body["seed"] == json!(1), "{body}");
        let opened = if endpoint == Endpoint::Chat { 2 } else { 0 };
        let mut chunks = chunks_of(head.clone());
        assert_eq!(opening(&mut chunks).len(), opened);
        let delta = crate::output::Delta { sample: 1, text: "x".into(), ..Default::default() };
        assert_eq!(written(|to| chunks.delta(&delta, to))[0]["choices"][0]["index"], json!(1));
        assert_eq!(closing(&mut chunks, &samples[1].1)[0]["choices"][0]["index"], json!(1));
    }
}

#[test]
fn logprobs_have_both_shapes() {
    let logprobs = |chosen, top| baton_types::TokenLogprobs { chosen, top };
    let delta = crate::output::Delta {
        sample: 0,
        text: "ab".into(),
        token_ids: vec![97, 300],
        logprobs: vec![logprobs(-0.5, vec![(97, -0.5), (98, f32::NEG_INFINITY)]), logprobs(-1.0, vec![])],
        ..Default::default()
    };
    let shape = |endpoint| {
        let mut chunks = chunks_of(head(endpoint));
        let before = crate::output::Delta {
            text: "aaa".into(),
            token_ids: vec![97; 3],
            logprobs: vec![logprobs(-0.5, vec![]); 3],
            ..Default::default()
        };
        written(|to| chunks.delta(&before, to));
        written(|to| chunks.delta(&delta, to))[0]["choices"][0]["logprobs"].to_string()
    };
    expect_test::expect![[r#"{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-0.5,"bytes":[97]},{"token":"b","logprob":-9999.0,"bytes":[98]}]},{"token":"token_id:300","logprob":-1.0,"bytes":null,"top_logprobs":[]}],"refusal":null}"#]]
    .assert_eq(&shape(Endpoint::Chat));
    expect_test::expect![[r#"{"tokens":["a","token_id:300"],"token_logprobs":[-0.5,-1.0],"top_logprobs":[{"a":-0.5,"b":-9999.0},{"token_id:300":-1.0}],"text_offset":[3,4]}"#]]
    .assert_eq(&shape(Endpoint::Completions));
}

const USAGE: &str = r#"{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1,"cache_write_tokens":2},"recomputed_tokens":7,"cost":0.5,"currency":"EUR"}"#;
const TIMINGS: &str = r#"{"queue_us":null,"prefill_us":null,"transfer_us":null,"exposed_us":null,"transfer_bytes":null,"ttft_us":null,"decode_us":null}"#;

fn total() -> crate::output::Total {
    let usage = baton_types::Usage {
        prompt_tokens: 3,
        completion_tokens: 2,
        cached_tokens: 1,
        cache_write_tokens: 2,
        recomputed_tokens: 7,
    };
    crate::output::Total { usage, cost: Some(crate::prices::Cost { amount: 0.5, currency: "EUR".into() }) }
}

/// Two tokens with log-probabilities, of which two of the most likely have one text.
fn generated() -> crate::output::Delta {
    let logprobs = |chosen, top| baton_types::TokenLogprobs { chosen, top };
    crate::output::Delta {
        text: "a\"".into(),
        token_ids: vec![97, 34],
        logprobs: vec![logprobs(-0.1, vec![(200, -0.1), (201, f32::NEG_INFINITY)]), logprobs(-1.0, vec![])],
        ..Default::default()
    }
}

#[test]
fn of_tokens_with_one_text_the_one_of_the_answer_is_reported() {
    let logprobs = vec![baton_types::TokenLogprobs { chosen: -2.0, top: vec![(201, -0.5)] }];
    let delta = crate::output::Delta { text: "\u{fffd}".into(), token_ids: vec![200], logprobs, ..Default::default() };
    let (head, all, total) = (head(Endpoint::Completions), [(delta, finished(0, &[]))], total());
    let whole = head.whole(&all, &total);
    let json = serialize::write(&whole, serialize::length(&whole)).unwrap();
    let answer: Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(answer["choices"][0]["logprobs"]["top_logprobs"], json!([{"\u{fffd}": -2.0}]));
}

#[test]
fn whole_answers_have_their_shape() {
    let check = |endpoint, ids: bool, samples: u32, expected: String| {
        let options = AnswerOptions { return_token_ids: ids, ..Default::default() };
        let head = AnswerHead { options, samples, prompts: vec![shown()], ..head(endpoint) };
        let all: Vec<_> = (0..samples).map(|sample| (generated(), finished(sample, &[]))).collect();
        let total = total();
        let whole = head.whole(&all, &total);
        let length = serialize::length(&whole);
        let json = String::from_utf8(serialize::write(&whole, length).unwrap()).unwrap();
        assert_eq!(read(&json), read(&expected), "{json}");
        let counted = head.bytes_before() + u64::from(samples) * head.bytes_of(&generated());
        assert!(length <= counted, "{length} of {counted}");
    };
    // A float's own digits, as a double.
    let point_1 = f64::from(-0.1_f32);
    let chat_logprobs = format!(
        r#"{{"content":[{{"token":"a","logprob":{point_1},"bytes":[97],"top_logprobs":[
            {{"token":"\ufffd","logprob":{point_1},"bytes":[200]}},{{"token":"\ufffd","logprob":-9999.0,"bytes":[201]}}]}},
            {{"token":"\"","logprob":-1.0,"bytes":[34],"top_logprobs":[]}}],"refusal":null}}"#
    );
    let logprobs = format!(
        r#"{{"tokens":["a","\""],"token_logprobs":[{point_1},-1.0],"top_logprobs":[{{"\ufffd":-9999.0,"a":{point_1}}},{{"\"":-1.0}}],"text_offset":[0,1]}}"#
    );
    let message = r#""message":{"role":"assistant","content":"a\"","refusal":null}"#;
    let of_chat = |index: u32, more: &str| {
        format!(r#"{{"index":{index},{message},"logprobs":{chat_logprobs},"finish_reason":"stop"{more}}}"#)
    };
    let of_completion = |index: u32, more: &str| {
        format!(r#"{{"index":{index},"text":"a\"","logprobs":{logprobs},"finish_reason":"stop"{more}}}"#)
    };
    let body = |object: &str, choices: &[String], more: &str| {
        let choices = choices.join(",");
        format!(
            r#"{{"id":"id","object":"{object}","created":0,"model":"m","choices":[{choices}],"usage":{USAGE},"seed":1{more}}}"#
        )
    };
    let (ids, prompt) = (r#","token_ids":[97,34]"#, r#","prompt_token_ids":[7,8]"#);
    let timings = format!(r#","timings":{TIMINGS}"#);
    check(Endpoint::Chat, false, 1, body("chat.completion", &[of_chat(0, "")], &timings));
    check(Endpoint::Chat, true, 1, body("chat.completion", &[of_chat(0, ids)], &format!("{prompt}{timings}")));
    let more = format!("{ids}{timings}");
    check(Endpoint::Chat, true, 2, body("chat.completion", &[of_chat(0, &more), of_chat(1, &more)], prompt));
    check(Endpoint::Completions, false, 1, body("text_completion", &[of_completion(0, "")], &timings));
    let more = format!("{ids}{prompt}");
    check(Endpoint::Completions, true, 1, body("text_completion", &[of_completion(0, &more)], &timings));
    let more = format!("{ids}{prompt}{timings}");
    let choices = [of_completion(0, &more), of_completion(1, &more)];
    check(Endpoint::Completions, true, 2, body("text_completion", &choices, ""));
}

#[test]
fn streams_carry_what_whole_answers_do() {
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let options = AnswerOptions { stream: true, return_token_ids: true, include_usage: true, ..Default::default() };
        let head = AnswerHead { options, prompts: vec![shown()], ..head(endpoint) };
        let (mut chunks, delta) = (chunks_of(head), generated());
        let first = &opening(&mut chunks)[0];
        let of_prompt = if endpoint == Endpoint::Chat { first } else { &first["choices"][0] };
        assert_eq!((&of_prompt["prompt_token_ids"], first.get("usage")), (&json!([7, 8]), Some(&Value::Null)));
        let chunk = &written(|to| chunks.delta(&delta, to))[0];
        assert_eq!((&chunk["choices"][0]["token_ids"], chunk.get("usage")), (&json!([97, 34]), Some(&Value::Null)));
        let next = &written(|to| chunks.delta(&delta, to))[0]["choices"][0]["logprobs"];
        let offsets = if endpoint == Endpoint::Chat { None } else { Some(json!([2, 3])) };
        assert_eq!(next.get("text_offset"), offsets.as_ref(), "characters are counted from the beginning");
        let last = crate::output::Finished { total: Some(total()), ..finished(0, &[]) };
        let last = closing(&mut chunks, &last);
        assert_eq!((&last[0]["choices"][0]["finish_reason"], &last[0]["seed"]), (&json!("stop"), &json!(1)));
        assert_eq!(last[0]["timings"], read(TIMINGS));
        assert_eq!(last[1]["usage"], read(USAGE));
    }
}
