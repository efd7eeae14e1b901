//! Messages as templates expect them, from turns that come in pieces: what an assistant thought, said and called is one
//! message, and so are neighbours of one role. Results of tools stay apart.

use crate::request::MESSAGES_MAX;
use baton_text::{Content, Message, Role};
use baton_types::{ErrorKind, RequestError};
use serde_json::{Map, Value, json};

/// Messages, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Chat(Vec<Message>);

impl Chat {
    pub(crate) fn messages(self) -> Vec<Message> {
        self.0
    }

    /// The last message, if it is of this role; else a new one.
    fn of(&mut self, role: Role) -> Result<&mut Message, RequestError> {
        if self.0.last().is_none_or(|last| last.role != role) {
            self.push(Message { role, content: None, extra: Map::new() })?;
        }
        // It is there: found or pushed.
        Ok(self.0.last_mut().expect("a message"))
    }

    fn push(&mut self, message: Message) -> Result<(), RequestError> {
        if self.0.len() == MESSAGES_MAX {
            let message = format!("a request takes at most {MESSAGES_MAX} messages and results of tools");
            return Err(RequestError::new(ErrorKind::InvalidRequest, message));
        }
        self.0.push(message);
        Ok(())
    }

    pub(crate) fn text(&mut self, role: Role, text: String) -> Result<(), RequestError> {
        let content = &mut self.of(role)?.content;
        *content = Some(match content.take() {
            None => Content::Text(text),
            Some(Content::Text(before)) => Content::Parts(vec![before, text]),
            Some(Content::Parts(mut parts)) => {
                parts.push(text);
                Content::Parts(parts)
            }
        });
        Ok(())
    }

    /// What an assistant thought.
    pub(crate) fn reasoning(&mut self, text: &str) -> Result<(), RequestError> {
        match self.of(Role::Assistant)?.extra.entry("reasoning_content").or_insert_with(|| json!("")) {
            Value::String(before) => before.push_str(text),
            other => *other = Value::from(text),
        }
        Ok(())
    }

    /// A call of an assistant.
    pub(crate) fn call(&mut self, id: String, name: String, arguments: Value) -> Result<(), RequestError> {
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        match self.of(Role::Assistant)?.extra.entry("tool_calls").or_insert_with(|| json!([])) {
            Value::Array(calls) => calls.push(call),
            other => *other = Value::Array(vec![call]),
        }
        Ok(())
    }

    /// What a call gave.
    pub(crate) fn result(&mut self, id: String, mut texts: Vec<String>) -> Result<(), RequestError> {
        let content = match texts.len() {
            0 | 1 => Content::Text(texts.pop().unwrap_or_default()),
            _ => Content::Parts(texts),
        };
        let extra = Map::from_iter([("tool_call_id".to_owned(), Value::String(id))]);
        self.push(Message { role: Role::Tool, content: Some(content), extra })
    }
}
