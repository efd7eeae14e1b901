//! What is asked, and what a client reads.

use super::*;
use crate::openai::Common;
use crate::output::{Delta, Finished, Total};
use crate::request::{Prompt, ToolChoice};
use crate::wire::{Form as _, Parts, StreamForm as _, serialize};
use baton_node::intake::{Client, Intake};
use baton_text::answer::{AnswerFormat, AnswerParser, CallFormat};
use baton_text::{Content, Ending, Message, Role};
use baton_types::{ErrorKind, FinishReason, Grammar, RequestError, Usage};
use serde_json::{Map, Value, json};

/// Messages, arguments of the template, and the rest.
type Asked = (Vec<Message>, Map<String, Value>, Common);

/// A request with these fields besides what is required.
fn ask(more: Value) -> Result<Asked, RequestError> {
    let mut body = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (prompt, common) = parse(body.to_string().as_bytes())?;
    match prompt {
        Prompt::Chat { messages, template_kwargs, .. } => Ok((messages, template_kwargs, common)),
        Prompt::Segments(_) | Prompt::List(_) => panic!("not a chat"),
    }
}

fn messages(turns: Value) -> Result<Vec<Message>, RequestError> {
    ask(json!({"messages": turns})).map(|(messages, ..)| messages)
}

#[test]
fn turns_become_messages_as_templates_expect_them() {
    let told = messages(json!([
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Rain?"},
        {"role": "user", "content": [{"type": "text", "text": "In Rome.", "citations": null}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "get", "input": {"b": 1, "a": 2}},
            {"type": "tool_use", "id": "t2", "name": "get", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "Yes."},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "No."}], "is_error": true},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "So?"},
        ]},
    ]))
    .unwrap();
    let text = |text: &str| Some(Content::Text(text.into()));
    let extra = |name: &str, value: Value| Map::from_iter([(name.to_owned(), value)]);
    let of = |role, content, extra| Message { role, content, extra };
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "get", "arguments": arguments}});
    let mut calling = extra("reasoning_content", json!("Hm."));
    calling.insert("tool_calls".into(), json!([call("t1", json!({"b": 1, "a": 2})), call("t2", json!({}))]));
    let asked = Some(Content::Parts(vec!["Rain?".into(), "In Rome.".into()]));
    let expected = [
        of(Role::System, text("Be kind."), Map::new()),
        of(Role::User, asked, Map::new()),
        of(Role::Assistant, text("I look."), calling),
        of(Role::Tool, text("Yes."), extra("tool_call_id", json!("t1"))),
        of(Role::Tool, text("No."), extra("tool_call_id", json!("t2"))),
        of(Role::Tool, text(""), extra("tool_call_id", json!("t3"))),
        of(Role::User, text("So?"), Map::new()),
    ];
    assert_eq!(told, expected);
    let system = json!([{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]);
    for (system, expected) in [
        (json!("Be brief."), Content::Text("Be brief.".into())),
        (system, Content::Parts(vec!["Be brief.".into(), "Be kind.".into()])),
    ] {
        let told = ask(json!({"system": system})).unwrap().0;
        assert_eq!(told[0], of(Role::System, Some(expected), Map::new()));
    }
}

#[test]
fn each_field_has_its_effect() {
    let (_, kwargs, common) = ask(json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "stop_sequences": ["END"], "stream": true, "seed": 3,
        "metadata": {"user_id": "u"}, "service_tier": "auto", "inference_geo": "eu", "context_management": {"edits": []}, "priority": -3,
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "unheard": 1,
        "messages": [{"role": "user", "weight": 1, "content": [{"type": "text", "text": "Hi", "colour": "red"}]}],
    }))
    .unwrap();
    let (sampling, parameters) = (&common.parameters.sampling, &common.parameters);
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (Some(0.5), Some(0.9), Some(40)));
    assert_eq!((sampling.max_tokens, sampling.seed, parameters.priority), (Some(9), Some(3), -3));
    assert_eq!(kwargs, Map::from_iter([("enable_thinking".to_owned(), json!(true))]));
    let mut stops = parameters.stops.clone();
    assert_eq!((stops.push("the END").0, stops.found_string()), ("the ".into(), Some("END")));
    assert!(common.options.stream && parameters.samples == 1);
    assert_eq!(common.unknown.into_names(), ["unheard", "messages[].weight", "messages[].content[].colour"]);
    let thinking = |kind: &str, more: Value| {
        ask(json!({"thinking": {"type": kind}, "chat_template_kwargs": more})).unwrap().1["enable_thinking"].clone()
    };
    assert_eq!(thinking("disabled", json!({})), json!(false));
    assert_eq!(thinking("adaptive", json!({"enable_thinking": false})), json!(false), "the template's own name wins");
    assert!(ask(json!({})).unwrap().1.is_empty(), "as the template has it");
    let schema = json!({"type": "object"});
    let formed = ask(json!({"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}}}));
    let asked = formed.unwrap().2.parameters.sampling.grammar.unwrap();
    assert_eq!((&*asked.grammar, asked.param), (&Grammar::JsonSchema(schema.to_string()), "output_config.format"));
    assert!(ask(json!({"output_config": {"effort": "low"}})).unwrap().2.parameters.sampling.grammar.is_none());
    let counted = parse_counted(br#"{"messages": [{"role": "user", "content": "Hi"}]}"#);
    assert!(counted.is_ok(), "an answer's length is no part of what is counted");
}

#[test]
fn tools_are_functions_of_openais_form() {
    let get = json!({"name": "get", "description": "Gets.", "input_schema": {"type": "object"}, "type": "custom"});
    let put = json!({"name": "put", "input_schema": {"type": "object"}, "strict": true, "cache_control": null});
    let ask_with = |choice: Value| ask(json!({"tools": [get, put], "tool_choice": choice}));
    for (choice, expected, is_parallel) in [
        (json!(null), ToolChoice::Auto, true),
        (json!({"type": "auto", "disable_parallel_tool_use": true}), ToolChoice::Auto, false),
        (json!({"type": "any"}), ToolChoice::Required, true),
        (json!({"type": "tool", "name": "put"}), ToolChoice::Named("put".into()), true),
    ] {
        let tools = ask_with(choice).unwrap().2.parameters.tools.unwrap();
        assert_eq!((tools.choice, tools.is_parallel), (expected, is_parallel));
        let function = json!({"name": "get", "description": "Gets.", "parameters": {"type": "object"}});
        assert_eq!(tools.list[0].spec, json!({"type": "function", "function": function}));
        assert_eq!((&*tools.list[1].name, tools.list[1].is_strict), ("put", true));
    }
    assert!(ask_with(json!({"type": "none"})).unwrap().2.parameters.tools.is_none());
}

#[test]
fn what_is_to_be_cached_is_a_wish_to_pin() {
    let control = |ttl: &str| json!({"type": "ephemeral", "ttl": ttl});
    let text = |control: Value| json!([{"type": "text", "text": "x", "cache_control": control}]);
    let result = |control: Value| json!([{"type": "tool_result", "tool_use_id": "t", "content": text(control)}]);
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let tool = |control: Value| json!({"tools": [{"name": "get", "cache_control": control}]});
    for (more, minutes) in [
        (json!({}), None),
        (json!({"system": text(json!({"type": "ephemeral"}))}), Some(5)),
        (json!({"system": text(control("5m")), "cache_control": control("1h")}), Some(60)),
        (json!({"system": text(control("1h")), "cache_control": control("5m")}), Some(60)),
        (user(text(control("1h"))), Some(60)),
        (user(result(control("1h"))), Some(60)),
        (tool(control("5m")), Some(5)),
        (tool(json!(null)), None),
    ] {
        let cache = ask(more.clone()).unwrap().2.parameters.cache;
        assert_eq!((cache.pin_wish_ms, cache.pin_ms), (minutes.map(|m| m * 60_000), None), "{more}");
    }
}

#[test]
fn an_answer_continues_what_the_assistant_has_begun() {
    let ending = |turns: Value| {
        let body = json!({"max_tokens": 1, "messages": turns});
        match parse(body.to_string().as_bytes()).unwrap().0 {
            Prompt::Chat { messages, ending, .. } => (messages.len(), ending),
            Prompt::Segments(_) | Prompt::List(_) => panic!("not a chat"),
        }
    };
    let (asked, begun) = (json!({"role": "user", "content": "Hi"}), json!({"role": "assistant", "content": "The"}));
    assert_eq!(ending(json!([asked])), (1, Ending::Answer));
    assert_eq!(ending(json!([asked, begun])), (2, Ending::Continued));
    let more = json!({"role": "assistant", "content": [{"type": "text", "text": " sky"}]});
    assert_eq!(ending(json!([asked, begun, more])), (2, Ending::Continued), "one message");
    assert_eq!(ending(json!([asked, begun, asked])), (3, Ending::Answer));
}

#[test]
fn what_is_not_supported_is_told_by_its_place() {
    let block = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let said = |role: &str, content: Value| json!({"messages": [{"role": role, "content": content}]});
    let format = |format: Value| json!({"output_config": {"format": format}});
    let wide = json!({"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "2h"}});
    let (invalid, unsupported) = (ErrorKind::InvalidRequest, ErrorKind::Unsupported);
    let image = json!({"type": "image", "source": {"type": "url", "url": "http://x"}});
    for (more, kind, param) in [
        (json!({"max_tokens": null}), invalid, "max_tokens"),
        (json!({"messages": null}), invalid, "messages"),
        (json!({"messages": []}), invalid, "messages"),
        (json!({"messages": [1]}), invalid, "messages[0]"),
        (said("tool", json!("x")), invalid, "messages[0].role"),
        (said("user", json!([])), invalid, "messages[0].content"),
        (said("user", json!(1)), invalid, "messages[0].content"),
        (said("assistant", json!([{"type": "thinking", "thinking": "x"}])), invalid, "messages"),
        (said("assistant", json!([{"type": "tool_use", "id": "t", "name": "n", "input": {}}])), invalid, "messages"),
        (block(image.clone()), unsupported, "messages[0].content[0]"),
        (block(json!({"type": "image"})), unsupported, "messages[0].content[0]"),
        (block(json!({"type": "document"})), unsupported, "messages[0].content[0]"),
        (block(json!({"type": "text"})), invalid, "messages[0].content[0].text"),
        (block(json!({"type": "tool_use", "id": "t", "name": "n", "input": {}})), invalid, "messages[0].content[0]"),
        (
            block(json!({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]})),
            unsupported,
            "messages[0].content[0].content[0]",
        ),
        (block(wide), invalid, "messages[0].content[0].cache_control"),
        (
            said("assistant", json!([{"type": "tool_use", "id": "t", "name": "n", "input": []}])),
            invalid,
            "messages[0].content[0].input",
        ),
        (json!({"system": [image]}), unsupported, "system[0]"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), unsupported, "tools[0].type"),
        (json!({"tools": [{"name": "a b"}]}), invalid, "tools[0].name"),
        (json!({"tools": [{"name": "a", "input_schema": []}]}), invalid, "tools[0].input_schema"),
        (json!({"tool_choice": {"type": "any"}}), invalid, "tool_choice"),
        (json!({"tool_choice": "any"}), invalid, "tool_choice"),
        (json!({"stop_sequences": "x"}), invalid, "stop_sequences"),
        (json!({"stop_sequences": [""]}), invalid, "stop_sequences"),
        (json!({"thinking": {"type": "maybe"}}), invalid, "thinking"),
        (format(json!({"type": "json_object"})), invalid, "output_config.format"),
        (json!({"mcp_servers": [{}]}), unsupported, "mcp_servers"),
        (json!({"container": "c"}), unsupported, "container"),
    ] {
        let error = ask(more.clone()).unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{more}: {error}");
    }
    let tools = json!([{"name": "get"}]);
    let two = json!({"tools": tools, "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}}});
    assert_eq!(ask(two).unwrap_err().param.as_deref(), Some("tool_choice"), "an answer has one form");
}

fn form(calls: CallFormat, reasons: bool) -> MessageForm {
    let format = AnswerFormat { calls, shows_tools: true, reasons };
    let parser = AnswerParser::new(format, ["get".to_owned()].into(), "");
    let (id, model) = ("msg_1".to_owned(), "m".to_owned());
    MessageForm { id, model, is_stream: true, prompt_tokens: 10, seed: 1, parts: Some(Parts { parser, format: calls }) }
}

fn finished(reason: FinishReason, stop: Option<&str>) -> Finished {
    let usage = Usage {
        prompt_tokens: 10,
        completion_tokens: 4,
        cached_tokens: 5,
        cache_write_tokens: 3,
        recomputed_tokens: 0,
    };
    let (stop, total) = (stop.map(str::to_owned), Some(Total { usage, cost: None }));
    Finished { sample: 0, reason, stop, timings: Default::default(), crossed_classes: Vec::new(), total }
}

fn delta(text: &str) -> Delta {
    Delta { text: text.into(), token_ids: vec![5], ..Delta::default() }
}

fn whole(form: &MessageForm, text: &str, finished: &Finished) -> Value {
    let answer = [(delta(text), finished.clone())];
    let total = finished.total.clone().unwrap();
    let body = form.whole(&answer, &total);
    assert!(serialize::length(&body) <= form.bytes_before() + form.bytes_of(&answer[0].0), "{text}");
    serde_json::to_value(&body).unwrap()
}

/// Events of an answer that comes a character at a time: their names and data.
fn streamed(form: &MessageForm, text: &str, finished: &Finished) -> Vec<(String, Value)> {
    let hold = Intake::new(1 << 20, 1 << 20).hold(Client::Tenant("a".into()));
    let (mut stream, mut to) = (form.clone().stream(Some(5), hold), Vec::new());
    stream.opening(0, &mut to).unwrap();
    text.split_inclusive(|_| true).for_each(|piece| stream.delta(&delta(piece), &mut to).unwrap());
    stream.finished(finished, &mut to).unwrap();
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        let name = name.strip_prefix("event: ").unwrap().to_owned();
        assert_eq!(data["type"], json!(name));
        (name, data)
    };
    String::from_utf8(to).unwrap().split_terminator("\n\n").map(event).collect()
}

/// The message as a client puts it together from events.
fn accumulated(events: &[(String, Value)]) -> Value {
    let mut message = Value::Null;
    let (mut open, mut written) = (None, String::new());
    for (name, event) in events {
        let at = event["index"].as_u64().map(|at| at as usize);
        match &**name {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!((open.replace(at), at), (None, message["content"].as_array().map(Vec::len)));
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                written.clear();
            }
            "content_block_delta" => {
                assert_eq!(open, Some(at));
                let block = &mut message["content"][at.unwrap()];
                let delta = &event["delta"];
                for field in ["text", "thinking"] {
                    if let Some(text) = delta[field].as_str() {
                        assert_eq!(delta["type"], json!(format!("{field}_delta")));
                        block[field] = json!(block[field].as_str().unwrap().to_owned() + text);
                    }
                }
                written += delta["partial_json"].as_str().unwrap_or_default();
                if delta["type"] == "input_json_delta" {
                    block["input"] = serde_json::from_str(&written).unwrap();
                }
            }
            "content_block_stop" => assert_eq!(open.take(), Some(at)),
            "message_delta" => {
                assert_eq!(open, None);
                let fields =
                    event.as_object().unwrap().iter().filter(|(name, _)| !["type", "delta"].contains(&&***name));
                message.as_object_mut().unwrap().extend(fields.map(|(name, value)| (name.clone(), value.clone())));
                message.as_object_mut().unwrap().extend(event["delta"].as_object().unwrap().clone());
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    assert_eq!(events.last().map(|(name, _)| &**name), Some("message_stop"));
    message
}

#[test]
fn streams_add_up_to_whole_answers() {
    let text = |text: &str| json!({"type": "text", "text": text});
    let call = |input: Value| json!({"type": "tool_use", "name": "get", "input": input});
    let thinks = |text: &str| json!({"type": "thinking", "thinking": text, "signature": ""});
    let hermes = "<think>Hm.</think>\nI look.\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"q\": \"\\\"é\\\"\"}}\n</tool_call>\n\
                  <tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call>";
    let llama = "{\"name\":\"get\",\"parameters\":{}};".repeat(9) + "{\"name\":\"get\",\"parameters\":{}}";
    let both = vec![thinks("Hm."), text("I look.\n"), call(json!({"q": "\"é\""})), call(json!({}))];
    let (stop, length) = (finished(FinishReason::Stop, None), finished(FinishReason::Length, None));
    let named = finished(FinishReason::Stop, Some("END"));
    for (calls, written, finished, content, reason) in [
        (CallFormat::Hermes, hermes, &stop, both.clone(), "tool_use"),
        (CallFormat::Hermes, hermes, &length, both, "max_tokens"),
        (CallFormat::Hermes, "Plain \u{1}\"\n<tool", &stop, vec![text("Plain \u{1}\"\n<tool")], "end_turn"),
        (CallFormat::Hermes, "Up to ", &named, vec![text("Up to ")], "stop_sequence"),
        (CallFormat::Hermes, "<think>No end", &length, vec![thinks("No end")], "max_tokens"),
        (CallFormat::Llama, &llama, &stop, vec![call(json!({})); 10], "tool_use"),
        (CallFormat::Mistral, "", &stop, vec![], "end_turn"),
    ] {
        let form = form(calls, true);
        let mut told = whole(&form, written, finished);
        assert_eq!(accumulated(&streamed(&form, written, finished)), told, "{written}");
        assert_eq!(
            (&told["stop_reason"], &told["stop_sequence"]),
            (&json!(reason), &json!(finished.stop)),
            "{written}"
        );
        let mut ids = std::collections::BTreeSet::new();
        for block in told["content"].as_array_mut().unwrap() {
            if let Some(id) = block.as_object_mut().unwrap().remove("id") {
                assert!(id.as_str().unwrap().starts_with("toolu_") && ids.insert(id.to_string()), "{id}");
            }
        }
        assert_eq!(told["content"], json!(content), "{written}");
        let usage = json!({"input_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 5, "output_tokens": 4});
        assert_eq!((&told["usage"], &told["type"], &told["id"]), (&usage, &json!("message"), &json!("msg_1")));
    }
}

#[test]
fn a_stream_says_at_its_start_what_is_known() {
    let form = MessageForm { parts: None, ..form(CallFormat::Hermes, false) };
    let events = streamed(&form, "<think>", &finished(FinishReason::Stop, None));
    let names: Vec<_> = events.iter().map(|(name, _)| &**name).collect();
    assert_eq!(
        (names[..3].join(" "), names.len()),
        ("message_start content_block_start content_block_delta".into(), 12)
    );
    let usage = &events[0].1["message"]["usage"];
    let known = json!({"input_tokens": 5, "cache_creation_input_tokens": null, "cache_read_input_tokens": 5, "output_tokens": 0});
    assert_eq!(usage, &known);
    let hold = Intake::new(1 << 20, 1 << 20).hold(Client::Tenant("a".into()));
    let (mut stream, mut to) = (form.stream(None, hold), Vec::new());
    stream.error(&RequestError::new(ErrorKind::Unavailable, "gone"), &mut to);
    let told =
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"gone\"}}\n\n";
    assert_eq!(String::from_utf8(to).unwrap(), told);
}
