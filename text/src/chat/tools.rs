//! Tools for a template that shows none: a message describes them, and where it shows no calls, calls and results are text.

use super::{Content, Message, Role};
use crate::answer::CallFormat;
use serde_json::{Value, json};

/// Where tools are described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the message of the system, which comes first.
    System,
    /// At the beginning of the first message of the user.
    User,
}

/// Adds to the messages what `tools` says, and how they are called.
pub(super) fn describe_tools(
    mut messages: Vec<Message>,
    tools: &Value,
    calls: CallFormat,
    place: Place,
) -> Vec<Message> {
    let list: Vec<String> = tools.as_array().into_iter().flatten().map(Value::to_string).collect();
    let several = if calls.around_calls().1.is_some() { " Several calls follow each other." } else { "" };
    let text = format!(
        "These functions can be called, one JSON description a line:\n{}\n\nTo call one, write nothing but\n{}\n\
         with its name and a JSON object of its arguments.{several} The results come in the next message.",
        list.join("\n"),
        written(calls, &[("NAME", "ARGUMENTS")])
    );
    match place {
        Place::System => match messages.first_mut() {
            Some(Message { role: Role::System | Role::Developer, content: Some(content), .. }) => {
                *content = joined(&content.text(), &text);
            }
            _ => messages.insert(0, Message::text(Role::System, text)),
        },
        Place::User => {
            let of_user = messages.iter_mut().find(|message| message.role == Role::User);
            if let Some(Message { content: Some(content), .. }) = of_user {
                *content = joined(&text, &content.text());
            }
        }
    }
    messages
}

fn joined(first: &str, second: &str) -> Content {
    let gap = if first.is_empty() || second.is_empty() { "" } else { "\n\n" };
    Content::Text(format!("{first}{gap}{second}"))
}

/// Calls, each a name and its arguments, as an answer has them.
fn written(format: CallFormat, calls: &[(&str, &str)]) -> String {
    let (open, between, close) = format.around_calls();
    let call = |(name, arguments): &(&str, &str)| {
        let (open, close) = format.around_arguments(name);
        format!("{open}{arguments}{close}")
    };
    let calls: Vec<String> = calls.iter().map(call).collect();
    format!("{open}{}{close}", calls.join(between.unwrap_or("\n")))
}

/// The messages, without calls and results.
pub(super) fn as_text(messages: &[Message], calls: CallFormat) -> Vec<Message> {
    messages.iter().map(|message| one_as_text(message, calls)).collect()
}

fn one_as_text(message: &Message, format: CallFormat) -> Message {
    let Message { role, content, extra } = message;
    let text = content.as_ref().map(Content::text).unwrap_or_default();
    if *role == Role::Tool {
        return Message::text(Role::User, format!("<tool_response>\n{text}\n</tool_response>"));
    }
    let Some(calls) = extra.get("tool_calls").and_then(Value::as_array) else { return message.clone() };
    let arguments = |call: &Value| call["function"].get("arguments").cloned().unwrap_or_else(|| json!({})).to_string();
    let all: Vec<(&str, String)> =
        calls.iter().map(|call| (call["function"]["name"].as_str().unwrap_or_default(), arguments(call))).collect();
    let all: Vec<(&str, &str)> = all.iter().map(|(name, arguments)| (*name, arguments.as_str())).collect();
    let gap = if text.is_empty() { "" } else { "\n" };
    let text = format!("{text}{gap}{}", written(format, &all));
    let mut message = Message { content: Some(Content::Text(text)), ..message.clone() };
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
        let told = |chat: &[Message], place| {
            describe_tools(as_text(chat, CallFormat::Hermes), &tools, CallFormat::Hermes, place)
        };
        let all = told(&chat, Place::System);
        let text = |message: &Message| match message.content.clone() {
            Some(Content::Text(text)) => (message.role, text),
            other => panic!("{other:?}"),
        };
        let all: Vec<_> = all.iter().map(text).collect();
        assert!(
            all[0].0 == Role::System && all[0].1.starts_with("Be brief.\n\n") && all[0].1.contains(r#"{"name":"get"}"#)
        );
        assert_eq!(all[1], (Role::User, "Hi".into()));
        let called = "So.\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\":1}}\n</tool_call>";
        assert_eq!(all[2], (Role::Assistant, called.into()));
        assert_eq!(all[3], (Role::User, "<tool_response>\n7\n</tool_response>".into()));
        let alone = told(&chat[1..2], Place::System);
        assert!(alone.len() == 2 && alone[0].role == Role::System, "{alone:?}");
        let of_user = told(&chat[1..2], Place::User);
        assert!(of_user.len() == 1 && text(&of_user[0]).1.ends_with("in the next message.\n\nHi"), "{of_user:?}");
    }
}
