//! Content of turns: a text, or blocks.

use crate::request::MESSAGES_MAX;
use crate::wire::tools::CALLS_BYTES_MAX;
use crate::wire::{Chat, Unknown, json};
use baton_text::Role;
use baton_types::{ErrorKind, RequestError};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// Most blocks of one content.
const BLOCKS_MAX: usize = MESSAGES_MAX;

/// What blocks say besides the chat.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// The longest `cache_control` of all, in milliseconds.
    pub(super) cached_ms: Option<u64>,
    /// Fields that the API does not have.
    pub(super) unknown: Unknown,
}

impl Notes {
    /// `{"type": "ephemeral", "ttl": "5m" | "1h"}`.
    pub(super) fn control(&mut self, at: &str, value: &RawValue) -> Result<(), RequestError> {
        let shape = || {
            let message = format!(r#"{at} must be {{"type": "ephemeral"}}, with the ttl "5m" or "1h""#);
            RequestError::invalid(at, message)
        };
        let (mut kind, mut ttl) = (None, None);
        let read = json::members(value.get(), |name, value| {
            match &*name {
                "type" => kind = json::text(value),
                "ttl" if value.get() == "null" => {}
                "ttl" => ttl = Some(json::text(value)),
                _ => {}
            }
            true
        });
        if read.is_err() || kind.as_deref() != Some("ephemeral") {
            return Err(shape());
        }
        let minutes = match ttl {
            None => 5,
            Some(Some(ttl)) if ttl == "5m" => 5,
            Some(Some(ttl)) if ttl == "1h" => 60,
            Some(_) => return Err(shape()),
        };
        self.cached_ms = self.cached_ms.max(Some(minutes * 60_000));
        Ok(())
    }
}

/// One block, not read yet.
#[derive(Default)]
struct Block<'a> {
    kind: String,
    fields: Vec<(&'static str, &'a RawValue)>,
}

/// Fields of blocks that are read.
const FIELDS: [&str; 9] =
    ["text", "thinking", "id", "name", "input", "tool_use_id", "content", "cache_control", "is_error"];
/// Fields that say nothing to a model.
const SILENT: [&str; 4] = ["signature", "data", "citations", "caller"];

impl<'a> Block<'a> {
    fn read(at: &str, value: &'a RawValue, unknown: &mut Unknown) -> Result<Self, RequestError> {
        let mut block = Self::default();
        let read = json::members(value.get(), |name, value| {
            match FIELDS.into_iter().find(|field| *field == name) {
                _ if value.get() == "null" || SILENT.contains(&&*name) => {}
                Some(field) => block.fields.push((field, value)),
                None if name == "type" => block.kind = json::text(value).unwrap_or_default(),
                None => unknown.tell_inside(at, &name),
            }
            true
        });
        read.map_err(|_| RequestError::invalid(at, format!("{at} must be a block, an object with a type")))?;
        Ok(block)
    }

    fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.fields.iter().rev().find(|(field, _)| *field == name).map(|(_, value)| *value)
    }

    fn text(&self, at: &str, name: &str) -> Result<String, RequestError> {
        let shape = || RequestError::invalid(format!("{at}.{name}"), format!("{at}.{name} must be a text"));
        self.get(name).and_then(json::text).ok_or_else(shape)
    }
}

fn unsupported(at: String, why: &str) -> RequestError {
    RequestError::new(ErrorKind::Unsupported, format!("{at} is not supported: {why}")).param(at)
}

/// Blocks of a content that is no text.
fn blocks<'a>(at: &str, value: &'a RawValue, unknown: &mut Unknown) -> Result<Vec<(String, Block<'a>)>, RequestError> {
    let shape = |what: String| RequestError::invalid(at, format!("{at} {what}"));
    let items = json::items(value.get(), BLOCKS_MAX).map_err(|_| shape("must be a text or a list of blocks".into()))?;
    let items = items.ok_or_else(|| shape(format!("takes at most {BLOCKS_MAX} blocks")))?;
    let block = |(i, item)| {
        let at = format!("{at}[{i}]");
        let block = Block::read(&at, item, unknown)?;
        Ok((at, block))
    };
    items.into_iter().enumerate().map(block).collect()
}

/// A content of text alone: that of `system`, and of results.
pub(super) fn texts(at: &str, value: &RawValue, notes: &mut Notes) -> Result<Vec<String>, RequestError> {
    if let Some(text) = json::text(value) {
        return Ok(vec![text]);
    }
    let mut texts = Vec::new();
    for (at, block) in blocks(at, value, &mut notes.unknown)? {
        if block.kind != "text" {
            return Err(unsupported(at, "this content is text only"));
        }
        texts.push(block.text(&at, "text")?);
        if let Some(control) = block.get("cache_control") {
            notes.control(&format!("{at}.cache_control"), control)?;
        }
    }
    Ok(texts)
}

/// One of `messages`, added to the chat.
pub(super) fn turn(at: &str, value: &RawValue, notes: &mut Notes, chat: &mut Chat) -> Result<(), RequestError> {
    let (mut role, mut content) = (None, None);
    let read = json::members(value.get(), |name, value| {
        match &*name {
            "role" => role = json::text(value),
            "content" => content = Some(value),
            _ if value.get() == "null" => {}
            _ => notes.unknown.tell_inside(at, &name),
        }
        true
    });
    read.map_err(|_| RequestError::invalid(at, format!("{at} must be {{role, content}}")))?;
    let role = match role.as_deref() {
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("system") => Role::System,
        _ => {
            let at = format!("{at}.role");
            let message = format!("{at} must be user, assistant or system");
            return Err(RequestError::invalid(at, message));
        }
    };
    let at = format!("{at}.content");
    let content = content.ok_or_else(|| RequestError::invalid(&*at, format!("{at} is required")))?;
    if let Some(text) = json::text(content) {
        return chat.text(role, text);
    }
    let blocks = blocks(&at, content, &mut notes.unknown)?;
    if blocks.is_empty() {
        return Err(RequestError::invalid(&*at, format!("{at} has no block")));
    }
    for (at, block) in blocks {
        match (&*block.kind, role) {
            ("text", _) => chat.text(role, block.text(&at, "text")?)?,
            ("thinking", Role::Assistant) => chat.reasoning(&block.text(&at, "thinking")?)?,
            // Another service encrypted it: no model here can read it.
            ("redacted_thinking", Role::Assistant) => {}
            ("tool_use", Role::Assistant) => {
                let input = Value::Object(input(&format!("{at}.input"), block.get("input"))?);
                chat.call(block.text(&at, "id")?, block.text(&at, "name")?, input)?;
            }
            ("tool_result", Role::User) => {
                let content = block.get("content").map(|content| texts(&format!("{at}.content"), content, notes));
                chat.result(block.text(&at, "tool_use_id")?, content.transpose()?.unwrap_or_default())?;
            }
            ("thinking" | "redacted_thinking" | "tool_use" | "tool_result", _) => {
                let message = format!("{at}: a {} is not a block of the role {}", block.kind, role.as_str());
                return Err(RequestError::invalid(at, message));
            }
            _ => return Err(unsupported(at, "blocks are of type text, tool_use, tool_result and thinking")),
        }
        if let Some(control) = block.get("cache_control") {
            notes.control(&format!("{at}.cache_control"), control)?;
        }
    }
    Ok(())
}

/// The arguments of a call.
fn input(at: &str, value: Option<&RawValue>) -> Result<Map<String, Value>, RequestError> {
    let shape = |what: String| RequestError::invalid(at, format!("{at} {what}"));
    let value = value.ok_or_else(|| shape("is required".into()))?;
    if value.get().len() > CALLS_BYTES_MAX {
        return Err(shape(format!("takes at most {CALLS_BYTES_MAX} bytes, got {}", value.get().len())));
    }
    serde_json::from_str(value.get()).map_err(|_| shape("must be an object".into()))
}
