//! What is asked, and what a client reads.

use super::*;
use crate::openai::Common;
use crate::output::{Delta, Finished, Total};
use crate::request::{Prompt, ToolChoice};
use crate::wire::{Form as _, Parts, StreamForm as _, serialize};
use baton_node::intake::{Client, Intake};
use baton_text::answer::{AnswerFormat, AnswerParser, CallFormat};
use baton_text::{Content, Message, Role};
use baton_types::{ErrorKind, FinishReason, Grammar, RequestError, Usage};
use serde_json::{Map, Value, json};

/// Messages, arguments of the template, and the rest.
type Asked = (Vec<Message>, Map<String, Value>, Common);

/// A request with these fields besides what is required.
fn ask(more: Value) -> Result<Asked, RequestError> {
    let mut body = json!({"model": "m", "input": "Hi"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (prompt, common) = parse(body.to_string().as_bytes())?;
    match prompt {
        Prompt::Chat { messages, template_kwargs, .. } => Ok((messages, template_kwargs, common)),
        Prompt::Segments(_) | Prompt::List(_) => panic!("not a chat"),
    }
}

#[test]
fn items_become_messages_as_templates_expect_them() {
    let call = |id: &str, arguments: &str| json!({"type": "function_call", "id": "fc", "call_id": id, "name": "get", "arguments": arguments, "status": "completed"});
    let said = json!([{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]);
    let told = ask(json!({"instructions": "Be brief.", "input": [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
        {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": said},
        call("c1", "{\"b\": 1, \"a\": 2}"),
        call("c2", "{"),
        {"type": "function_call_output", "call_id": "c1", "output": "Yes."},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "No."}]},
    ]}))
    .unwrap()
    .0;
    let text = |text: &str| Some(Content::Text(text.into()));
    let extra = |name: &str, value: Value| Map::from_iter([(name.to_owned(), value)]);
    let of = |role, content, extra| Message { role, content, extra };
    let called = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "get", "arguments": arguments}});
    let mut calling = extra("reasoning_content", json!("Hm."));
    calling.insert("tool_calls".into(), json!([called("c1", json!({"b": 1, "a": 2})), called("c2", json!("{"))]));
    let expected = [
        of(Role::System, text("Be brief."), Map::new()),
        of(Role::Developer, text("Be kind."), Map::new()),
        of(Role::User, text("Rain?"), Map::new()),
        of(Role::Assistant, text("I look."), calling),
        of(Role::Tool, text("Yes."), extra("tool_call_id", json!("c1"))),
        of(Role::Tool, text("No."), extra("tool_call_id", json!("c2"))),
    ];
    assert_eq!(told, expected);
}

#[test]
fn each_field_has_its_effect() {
    let (messages, kwargs, common) = ask(json!({
        "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stream": true, "user": "u",
        "store": true, "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "truncation": "disabled",
        "reasoning": {"effort": "none", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "background": false, "previous_response_id": null, "top_logprobs": 0, "unheard": 1,
    }))
    .unwrap();
    let sampling = &common.parameters.sampling;
    assert_eq!(messages, [Message::text(Role::User, "Hi")]);
    assert_eq!((sampling.temperature, sampling.top_p), (Some(0.5), Some(0.9)));
    assert_eq!((sampling.max_tokens, sampling.seed, &sampling.grammar), (Some(9), Some(3), &None));
    let asked = [("enable_thinking", json!(false)), ("reasoning_effort", json!("none"))];
    assert_eq!(kwargs, Map::from_iter(asked.map(|(name, value)| (name.to_owned(), value))));
    assert!(common.options.stream && common.unknown.into_names() == ["unheard"]);
    let effort =
        |effort: Value| ask(json!({"reasoning": {"effort": effort}})).unwrap().1.get("enable_thinking").cloned();
    assert_eq!((effort(json!("low")), effort(json!(null))), (Some(json!(true)), None));
    let other = ask(json!({"reasoning": {"effort": "as it likes"}})).unwrap().1;
    assert_eq!(other.get("reasoning_effort"), None, "no effort of OpenAI's");
    let schema = json!({"type": "object"});
    let form = |format: Value| {
        let grammar = ask(json!({"text": {"format": format}})).unwrap().2.parameters.sampling.grammar.unwrap();
        assert_eq!(grammar.param, "text.format");
        (*grammar.grammar).clone()
    };
    let strict = json!({"type": "json_schema", "name": "x", "schema": schema, "strict": true});
    assert_eq!(form(strict), Grammar::JsonSchema(schema.to_string()));
    let lenient = json!({"type": "json_schema", "name": "x", "schema": schema});
    assert!(matches!(form(lenient), Grammar::JsonSchema(text) if text.contains("lenient")));
    assert!(matches!(form(json!({"type": "json_object"})), Grammar::JsonSchema(_)));
}

#[test]
fn unknown_fields_of_items_are_told() {
    let part = json!({"type": "input_text", "text": "Hi", "annotations": [], "colour": 1});
    let item = json!({"type": "message", "role": "user", "content": [part], "weight": 1, "status": "completed"});
    let (messages, _, common) = ask(json!({"input": [item]})).unwrap();
    let content = Some(Content::Text("Hi".into()));
    assert_eq!(messages, [Message { role: Role::User, content, extra: Map::new() }]);
    assert_eq!(common.unknown.into_names(), ["input[].weight", "input[].content[].colour"]);
}

#[test]
fn tools_are_flat() {
    let get = json!({"type": "function", "name": "get", "description": "Gets.", "parameters": {"type": "object"}});
    let put = json!({"type": "function", "name": "put", "strict": true});
    for (choice, expected) in [
        (json!(null), ToolChoice::Auto),
        (json!("required"), ToolChoice::Required),
        (json!({"type": "function", "name": "put"}), ToolChoice::Named("put".into())),
    ] {
        let body = json!({"tools": [get, put], "tool_choice": choice, "parallel_tool_calls": false});
        let tools = ask(body).unwrap().2.parameters.tools.unwrap();
        assert_eq!((tools.choice, tools.is_parallel), (expected, false));
        let function = json!({"name": "get", "description": "Gets.", "parameters": {"type": "object"}});
        assert_eq!(tools.list[0].spec, json!({"type": "function", "function": function}));
        assert!(tools.list[1].is_strict);
    }
    assert!(ask(json!({"tools": [get], "tool_choice": "none"})).unwrap().2.parameters.tools.is_none());
}

#[test]
fn what_is_not_supported_is_told_by_its_place() {
    let items = |item: Value| json!({"input": [item]});
    let (invalid, unsupported) = (ErrorKind::InvalidRequest, ErrorKind::Unsupported);
    let image = json!({"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]});
    for (more, kind, param) in [
        (json!({"input": null}), invalid, "input"),
        (json!({"input": []}), invalid, "input"),
        (json!({"input": 1}), invalid, "input"),
        (items(json!(1)), invalid, "input[0]"),
        (items(json!({"role": "tool", "content": "x"})), invalid, "input[0].role"),
        (items(json!({"role": "user"})), invalid, "input[0].content"),
        (items(json!({"role": "user", "content": []})), invalid, "input[0].content"),
        (items(image), unsupported, "input[0].content[0]"),
        (items(json!({"type": "item_reference", "id": "x"})), unsupported, "input[0]"),
        (items(json!({"type": "computer_call"})), unsupported, "input[0]"),
        (items(json!({"type": "function_call", "call_id": "c", "name": "n"})), invalid, "input[0].arguments"),
        (items(json!({"type": "function_call_output", "call_id": "c"})), invalid, "input[0].output"),
        (json!({"instructions": 1}), invalid, "instructions"),
        (json!({"previous_response_id": "resp_1"}), unsupported, "previous_response_id"),
        (json!({"conversation": "conv_1"}), unsupported, "conversation"),
        (json!({"background": true}), unsupported, "background"),
        (json!({"include": ["file_search_call.results"]}), unsupported, "include"),
        (json!({"truncation": "auto"}), unsupported, "truncation"),
        (json!({"top_logprobs": 2}), unsupported, "top_logprobs"),
        (json!({"prompt": {"id": "x"}}), unsupported, "prompt"),
        (json!({"max_tool_calls": 1}), unsupported, "max_tool_calls"),
        (json!({"context_management": [{}]}), unsupported, "context_management"),
        (json!({"tools": [{"type": "web_search"}]}), unsupported, "tools[0].type"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), invalid, "tools[0].name"),
        (json!({"tool_choice": "required"}), invalid, "tool_choice"),
        (json!({"tool_choice": {"type": "allowed_tools"}}), invalid, "tool_choice"),
        (json!({"text": {"format": {"type": "grammar"}}}), unsupported, "text.format"),
        (json!({"text": {"format": {"type": "json_schema"}}}), invalid, "text.format"),
        (json!({"text": 1}), invalid, "text"),
        (json!({"reasoning": {"effort": 1}}), invalid, "reasoning"),
        (json!({"max_output_tokens": "9"}), invalid, "max_output_tokens"),
    ] {
        let error = ask(more.clone()).unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{more}: {error}");
    }
}

fn form(calls: CallFormat) -> ResponseForm {
    let format = AnswerFormat { calls, shows_tools: true, reasons: true };
    let parser = AnswerParser::new(format, ["get".to_owned()].into(), "");
    ResponseForm {
        id: "resp_1".into(),
        model: "m".into(),
        created: 7,
        is_stream: true,
        prompt_tokens: 10,
        max_tokens: Some(99),
        temperature: 0.5,
        top_p: 1.0,
        tool_choice: ToolChoice::Named("get".into()),
        is_parallel: false,
        seed: 1,
        parts: Some(Parts { parser, format: calls }),
        token_text: std::sync::Arc::new(|token| Some(vec![token as u8])),
    }
}

fn finished(reason: FinishReason) -> Finished {
    let usage = Usage {
        prompt_tokens: 10,
        completion_tokens: 4,
        cached_tokens: 5,
        cache_write_tokens: 3,
        recomputed_tokens: 0,
    };
    let total = Some(Total { usage, cost: None });
    Finished { sample: 0, reason, stop: None, timings: Default::default(), crossed_classes: Vec::new(), total }
}

/// A text of which each byte is a token.
fn delta(text: &str) -> Delta {
    Delta { text: text.into(), token_ids: text.bytes().map(u32::from).collect(), ..Delta::default() }
}

fn whole(form: &ResponseForm, text: &str, finished: &Finished) -> Value {
    let answer = [(delta(text), finished.clone())];
    let total = finished.total.clone().unwrap();
    let body = form.whole(&answer, &total);
    assert!(serialize::length(&body) <= form.bytes_before() + form.bytes_of(&answer[0].0), "{text}");
    serde_json::to_value(&body).unwrap()
}

fn read(events: Vec<u8>) -> Vec<Value> {
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"].as_str(), name.strip_prefix("event: "));
        data
    };
    String::from_utf8(events).unwrap().split_terminator("\n\n").map(event).collect()
}

const MIB: u64 = 1 << 20;

/// Events of an answer that comes a character at a time; the memory that they took is within what was counted.
fn streamed(form: &ResponseForm, text: &str, finished: &Finished) -> Vec<Value> {
    let intake = Intake::new(16 * MIB, 16 * MIB);
    let (mut stream, mut to) = (form.clone().stream(None, intake.hold(Client::Tenant("a".into()))), Vec::new());
    stream.opening(0, &mut to).unwrap();
    text.split_inclusive(|_| true).for_each(|piece| stream.delta(&delta(piece), &mut to).unwrap());
    let before = to.len();
    stream.finished(finished, &mut to).unwrap();
    let written = (to.len() - before) as u64;
    assert!(written <= intake.used(), "{written} bytes at the end, {} counted", intake.used());
    read(to)
}

/// The output as a client puts it together from events.
fn accumulated(events: &[Value]) -> Vec<Value> {
    let (mut output, mut open): (Vec<Value>, Option<Value>) = (Vec::new(), None);
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], json!(number));
        let kind = event["type"].as_str().unwrap().strip_prefix("response.").unwrap();
        if let (Some(item), Some(id)) = (&open, event["item_id"].as_str()) {
            assert_eq!((item["id"].as_str(), event["output_index"].as_u64()), (Some(id), Some(output.len() as u64)));
        }
        match (kind, &mut open) {
            ("created" | "in_progress", None) => assert_eq!(event["response"]["status"], "in_progress"),
            ("output_item.added", None) => {
                assert_eq!(
                    (&event["item"]["status"], &event["output_index"]),
                    (&json!("in_progress"), &json!(output.len()))
                );
                open = Some(event["item"].clone());
            }
            ("content_part.added", Some(item)) => item["content"].as_array_mut().unwrap().push(event["part"].clone()),
            ("output_text.delta" | "reasoning_text.delta", Some(item)) => {
                let text = &mut item["content"][0]["text"];
                *text = json!(text.as_str().unwrap().to_owned() + event["delta"].as_str().unwrap());
            }
            ("output_text.done" | "reasoning_text.done", Some(item)) => {
                assert_eq!(event["text"], item["content"][0]["text"])
            }
            ("content_part.done", Some(item)) => assert_eq!(event["part"], item["content"][0]),
            ("function_call_arguments.delta", Some(item)) => item["arguments"] = event["delta"].clone(),
            ("function_call_arguments.done", Some(item)) => {
                assert_eq!((&event["arguments"], &event["name"]), (&item["arguments"], &item["name"]));
            }
            ("output_item.done", Some(item)) => {
                item["status"] = event["item"]["status"].clone();
                assert_eq!(*item, event["item"]);
                output.extend(open.take());
            }
            ("completed" | "incomplete", None) => assert_eq!(number + 1, events.len()),
            (other, _) => panic!("{other}"),
        }
    }
    output
}

#[test]
fn streams_add_up_to_whole_answers() {
    let hermes = "<think>Hm.</think>\nI look.\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"q\": \"\\\"é\\\"\"}}\n</tool_call>\n\
                  <tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call>";
    let llama = "{\"name\":\"get\",\"parameters\":{}};".repeat(99) + "{\"name\":\"get\",\"parameters\":{}}";
    let (stop, length) = (finished(FinishReason::Stop), finished(FinishReason::Length));
    let all = ["reasoning Hm.", "message I look.\n", r#"function_call {"q": "\"é\""}"#, "function_call {}"];
    let calls = ["function_call {}"; 100];
    let long = "\u{1}".repeat(20_000);
    for (calls, written, finished, expected) in [
        (CallFormat::Hermes, hermes, &stop, &all[..]),
        (CallFormat::Hermes, "Plain \u{1}\"\n<tool", &stop, &["message Plain \u{1}\"\n<tool"]),
        (CallFormat::Hermes, "<think>No end", &length, &["reasoning No end"]),
        (CallFormat::Hermes, &long, &length, &[&*format!("message {long}")]),
        (CallFormat::Llama, &llama, &stop, &calls),
        (CallFormat::Mistral, "", &stop, &[]),
    ] {
        let form = form(calls);
        let (told, events) = (whole(&form, written, finished), streamed(&form, written, finished));
        let output = told["output"].as_array().unwrap();
        assert_eq!(accumulated(&events), *output, "{written}");
        let last = events.last().unwrap();
        assert_eq!(last["response"], told, "{written}");
        let shown = |item: &Value| {
            let text = item["content"][0]["text"].as_str().or(item["arguments"].as_str()).unwrap();
            format!("{} {text}", item["type"].as_str().unwrap())
        };
        assert_eq!(output.iter().map(shown).collect::<Vec<_>>(), expected, "{written}");
        let ids: std::collections::BTreeSet<_> = output.iter().map(|item| item["id"].to_string()).collect();
        assert_eq!(ids.len(), output.len());
        let (status, details) = match finished.reason {
            FinishReason::Length => ("incomplete", json!({"reason": "max_output_tokens"})),
            _ => ("completed", Value::Null),
        };
        assert_eq!((&told["status"], &told["incomplete_details"]), (&json!(status), &details));
        if let Some(message) = output.last().filter(|item| item["type"] != "function_call") {
            assert_eq!(message["status"], status);
        }
    }
}

#[test]
fn a_response_has_its_shape() {
    let mut told = whole(&form(CallFormat::Hermes), "<think>ab</think>c", &finished(FinishReason::Stop));
    for item in told["output"].as_array_mut().unwrap() {
        item["id"].take();
    }
    told["timings"].take();
    expect_test::expect![[r#"{"id":"resp_1","object":"response","created_at":7,"status":"completed","background":false,"error":null,"incomplete_details":null,"instructions":null,"max_output_tokens":99,"metadata":{},"model":"m","output":[{"type":"reasoning","id":null,"status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"ab"}]},{"type":"message","id":null,"status":"completed","role":"assistant","content":[{"type":"output_text","text":"c","annotations":[],"logprobs":[]}]}],"parallel_tool_calls":false,"previous_response_id":null,"store":false,"temperature":0.5,"tool_choice":{"type":"function","name":"get"},"tools":[],"top_p":1.0,"truncation":"disabled","usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":5,"cache_write_tokens":3},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":10},"total_tokens":14},"timings":null,"seed":1}"#]]
    .assert_eq(&told.to_string());
}

#[test]
fn a_stream_keeps_no_more_than_there_is_room_for() {
    let intake = Intake::new(MIB, MIB);
    let mut stream = form(CallFormat::Hermes).stream(None, intake.hold(Client::Tenant("a".into())));
    let (mut to, text) = (Vec::new(), "x".repeat(1000));
    stream.opening(0, &mut to).unwrap();
    let refused = (0..1000).find_map(|n| stream.delta(&delta(&text), &mut to).err().map(|error| (n, error)));
    let (kept, error) = refused.expect("there is an end of the room");
    assert!((80..100).contains(&kept), "{kept}");
    assert_eq!((error.kind, error.retry_after), (ErrorKind::Overloaded, Some(std::time::Duration::from_secs(1))));
    let mut last = Vec::new();
    stream.error(&error, &mut last);
    let told = read(last);
    assert_eq!((&told[0]["type"], &told[0]["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(told[0]["response"]["error"], json!({"code": "overloaded", "message": error.message}));
    drop(stream);
    assert_eq!(intake.used(), 0);
}
