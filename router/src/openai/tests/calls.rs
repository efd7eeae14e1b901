//! Calls of tools and the other parts of answers: what is asked, and what a client reads.

use super::*;
use baton_text::answer::{AnswerFormat, AnswerParser, CallFormat};

/// An answer's message as a client puts it together from the chunks of its stream.
fn accumulated(chunks: &[Value]) -> (Value, Value) {
    let (mut message, mut reason) = (json!({"content": null, "calls": []}), Value::Null);
    for chunk in chunks {
        let choice = &chunk["choices"][0];
        for (from, to) in [("content", "content"), ("reasoning_content", "reasoning")] {
            if let Some(text) = choice["delta"][from].as_str() {
                message[to] = json!(message[to].as_str().unwrap_or_default().to_owned() + text);
            }
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let calls = message["calls"].as_array_mut().unwrap();
            assert_eq!(call["index"], json!(calls.len()));
            calls.push(json!({"id": call["id"], "type": call["type"], "function": call["function"]}));
        }
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
    }
    (message, reason)
}

#[test]
fn parts_of_an_answer_are_told_apart_streamed_or_not() {
    let format = |calls| AnswerFormat { calls, shows_tools: true, reasons: true };
    let call =
        |name: &str, arguments: &str| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    let hermes = "<think>Hm.</think>\nI look.\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"q\": \"\\\"é\\\"\"}}\n</tool_call>\n\
                  <tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call>";
    let both = vec![call("get", "{\"q\": \"\\\"é\\\"\"}"), call("get", "{}")];
    let llama = "{\"name\":\"get\",\"parameters\":{}};".repeat(9) + "{\"name\":\"get\",\"parameters\":{}}";
    let mistral = "[TOOL_CALLS][{\"name\":\"get\",\"arguments\":{}}]";
    let empty = || json!("");
    for (calls, text, content, reasoning, expected) in [
        (CallFormat::Hermes, hermes, json!("I look.\n"), json!("Hm."), both),
        (CallFormat::Hermes, "Plain <tool", json!("Plain <tool"), Value::Null, vec![]),
        (CallFormat::Hermes, "<think>No end", empty(), json!("No end"), vec![]),
        (CallFormat::Llama, &llama, Value::Null, Value::Null, vec![call("get", "{}"); 10]),
        (CallFormat::Mistral, mistral, Value::Null, Value::Null, vec![call("get", "{}")]),
        (CallFormat::Mistral, "", empty(), Value::Null, vec![]),
    ] {
        let parser = AnswerParser::new(format(calls), ["get".to_owned()].into(), "");
        let head = AnswerHead { parts: Some(Parts { parser, format: calls }), ..head(Endpoint::Chat) };
        let delta = |text: &str| crate::output::Delta { text: text.into(), token_ids: vec![5], ..Default::default() };
        let answer = [(delta(text), finished(0, &[]))];
        let total = Default::default();
        let whole = head.whole(&answer, &total);
        let bytes = serialize::length(&whole);
        assert!(bytes <= head.bytes_before() + head.bytes_of(&answer[0].0), "{text}");
        let whole: Value = serde_json::to_value(&whole).unwrap();
        let (message, reason) = (&whole["choices"][0]["message"], &whole["choices"][0]["finish_reason"]);
        assert_eq!((&message["content"], &message["reasoning_content"]), (&content, &reasoning), "{text}");
        let mut told = message["tool_calls"].as_array().cloned().unwrap_or_default();
        let ids: std::collections::BTreeSet<_> =
            told.iter_mut().map(|call| call.as_object_mut().unwrap().remove("id").map(|id| id.to_string())).collect();
        assert_eq!((&told, ids.len()), (&expected, expected.len()), "{text}");
        assert_eq!(*reason, json!(if expected.is_empty() { "stop" } else { "tool_calls" }));

        let mut chunks = chunks_of(head.clone());
        let mut events = opening(&mut chunks);
        for piece in text.split_inclusive(|_| true) {
            events.extend(written(|to| chunks.delta(&delta(piece), to)));
        }
        events.extend(closing(&mut chunks, &answer[0].1));
        let (streamed, streamed_reason) = accumulated(&events);
        // A stream opens with an empty text.
        let content = content.as_str().unwrap_or_default();
        assert_eq!((streamed["content"].as_str(), &streamed["reasoning"]), (Some(content), &reasoning), "{text}");
        assert_eq!(streamed["calls"], message.get("tool_calls").cloned().unwrap_or_else(|| json!([])), "{text}");
        assert_eq!(streamed_reason, *reason);
    }
}

#[test]
fn calls_and_results_in_messages_are_read() {
    let parse = |message: Value| {
        let messages = json!([{"role": "user", "content": "Hi"}, message]);
        chat::parse(json!({"messages": messages}).to_string().as_bytes()).map(|(prompt, _)| match prompt {
            Prompt::Chat { mut messages, .. } => messages.remove(1),
            Prompt::Segments(_) | Prompt::List(_) => panic!("not a chat"),
        })
    };
    let call = json!({"id": "1", "type": "function", "function": {"name": "get", "arguments": "{\"a\": 1}"}});
    let message = parse(json!({"role": "assistant", "content": null, "tool_calls": [call], "refusal": null})).unwrap();
    assert_eq!((message.content, &message.extra["tool_calls"][0]["function"]["arguments"]), (None, &json!({"a": 1})));
    let message = parse(json!({"role": "tool", "content": "7", "tool_call_id": "1"})).unwrap();
    assert_eq!((message.role, &message.extra["tool_call_id"]), (Role::Tool, &json!("1")));
    assert!(parse(json!({"role": "assistant", "content": "x", "tool_calls": []})).is_ok());
    for (message, param) in [
        (json!({"role": "assistant", "content": null}), "messages[1].content"),
        (json!({"role": "user", "content": null, "tool_calls": [call]}), "messages[1].content"),
        (json!({"role": "assistant", "tool_calls": [1]}), "messages[1].tool_calls"),
        (json!({"role": "tool", "content": "7", "tool_call_id": 1}), "messages[1].tool_call_id"),
        (json!({"role": "user", "content": "x", "audio": {}}), "messages[1].audio"),
    ] {
        assert_eq!(parse(message.clone()).unwrap_err().param.as_deref(), Some(param), "{message}");
    }
}

#[test]
fn required_calls_are_the_only_form() {
    let tool = json!({"type": "function", "function": {"name": "get"}});
    let parse = |choice: &str, form: Value| {
        let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": choice, "response_format": form});
        chat::parse(body.to_string().as_bytes()).map(drop).map_err(|error| error.param)
    };
    assert!(parse("auto", json!({"type": "json_object"})).is_ok());
    assert!(parse("required", json!({"type": "text"})).is_ok());
    assert_eq!(parse("required", json!({"type": "json_object"})), Err(Some("tool_choice".into())));
}
