//! Tools for a template that shows none: a message describes them, and calls and results are text.

use super::{Content, Message, Role};
use crate::answer::CallFormat;
use serde_json::{Value, json};

/// Messages that say what `tools` and the calls in `messages` say, for a template that shows no tools: see
/// [`shows_tools`](crate::answer::AnswerFormat::shows_tools).
pub fn describe_tools(messages: &[Message], tools: &Value) -> Vec<Message> {
    let (open, close) = CallFormat::Hermes.around_arguments("NAME");
    let list: Vec<String> = tools.as_array().into_iter().flatten().map(Value::to_string).collect();
    let text = format!(
        "These functions can be called, one JSON description a line:\n{}\n\nTo call one, write nothing but\n{open}ARGUMENTS{close}\n\
         with its name and a JSON object of its arguments. Several calls follow each other. The results come in the next message.",
        list.join("\n")
    );
    let mut described: Vec<Message> = messages.iter().map(as_text).collect();
    match described.first_mut() {
        Some(Message { role: Role::System | Role::Developer, content: Some(content), .. }) => {
            let before = content.text();
            let gap = if before.is_empty() { "" } else { "\n\n" };
            *content = Content::Text(format!("{before}{gap}{text}"));
        }
        _ => described.insert(0, Message::text(Role::System, text)),
    }
    described
}

/// A message without calls and results.
fn as_text(message: &Message) -> Message {
    let Message { role, content, extra } = message;
    let text = content.as_ref().map(Content::text).unwrap_or_default();
    if *role == Role::Tool {
        return Message::text(Role::User, format!("<tool_response>\n{text}\n</tool_response>"));
    }
    let Some(calls) = extra.get("tool_calls").and_then(Value::as_array) else { return message.clone() };
    let call = |call: &Value| {
        let (open, close) = CallFormat::Hermes.around_arguments(call["function"]["name"].as_str().unwrap_or_default());
        let arguments = call["function"].get("arguments").cloned().unwrap_or_else(|| json!({}));
        format!("{open}{arguments}{close}")
    };
    let words = (!text.is_empty()).then_some(text);
    let lines: Vec<String> = words.into_iter().chain(calls.iter().map(call)).collect();
    let mut message = Message { content: Some(Content::Text(lines.join("\n"))), ..message.clone() };
    message.extra.remove("tool_calls");
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_calls_and_results_become_text() {
        let tools = json!([{"type": "function", "function": {"name": "get"}}]);
        let call = json!([{"id": "1", "type": "function", "function": {"name": "get", "arguments": {"a": 1}}}]);
        let calling = Message {
            extra: [("tool_calls".to_owned(), call)].into_iter().collect(),
            ..Message::text(Role::Assistant, "So.")
        };
        let result = Message {
            extra: [("tool_call_id".to_owned(), json!("1"))].into_iter().collect(),
            ..Message::text(Role::Tool, "7")
        };
        let chat = [Message::text(Role::System, "Be brief."), Message::text(Role::User, "Hi"), calling, result];
        let told = describe_tools(&chat, &tools);
        let text = |message: &Message| match message.content.clone() {
            Some(Content::Text(text)) => (message.role, text),
            other => panic!("{other:?}"),
        };
        let told: Vec<_> = told.iter().map(text).collect();
        assert!(
            told[0].0 == Role::System
                && told[0].1.starts_with("Be brief.\n\n")
                && told[0].1.contains(r#"{"name":"get"}"#)
        );
        assert_eq!(told[1], (Role::User, "Hi".into()));
        let called = "So.\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\":1}}\n</tool_call>";
        assert_eq!(told[2], (Role::Assistant, called.into()));
        assert_eq!(told[3], (Role::User, "<tool_response>\n7\n</tool_response>".into()));
        let told = describe_tools(&chat[1..2], &tools);
        assert!(told.len() == 2 && told[0].role == Role::System, "{told:?}");
    }
}
