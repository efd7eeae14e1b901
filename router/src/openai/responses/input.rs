//! Items of the input, to messages as templates expect them.

use crate::request::MESSAGES_MAX;
use crate::wire::tools::CALLS_BYTES_MAX;
use crate::wire::{Chat, Unknown, json};
use baton_text::Role;
use baton_types::{ErrorKind, RequestError};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// Most parts of one content.
const PARTS_MAX: usize = MESSAGES_MAX;

/// A text of the user, or items, added to the chat.
pub(super) fn read(value: &RawValue, chat: &mut Chat, unknown: &mut Unknown) -> Result<(), RequestError> {
    if let Some(text) = json::text(value) {
        return chat.text(Role::User, text);
    }
    let refuse = |message: String| RequestError::invalid("input", message);
    let items = json::items(value.get(), MESSAGES_MAX).map_err(|_| refuse("input must be a text or a list".into()))?;
    let items = items.filter(|items| !items.is_empty());
    let items = items.ok_or_else(|| refuse(format!("input takes 1 to {MESSAGES_MAX} items")))?;
    items.into_iter().enumerate().try_for_each(|(i, value)| item(&format!("input[{i}]"), value, chat, unknown))
}

/// One item, not read yet.
#[derive(Default)]
struct Item<'a> {
    kind: Option<String>,
    fields: Vec<(&'static str, &'a RawValue)>,
}

/// Kinds of parts that are text.
const TEXTS: [&str; 3] = ["input_text", "output_text", "text"];
/// Fields of items that are read.
const FIELDS: [&str; 6] = ["role", "content", "call_id", "name", "arguments", "output"];
/// Fields that say nothing to a model.
const SILENT: [&str; 6] = ["id", "status", "summary", "encrypted_content", "phase", "created_by"];

impl<'a> Item<'a> {
    fn read(at: &str, value: &'a RawValue, unknown: &mut Unknown) -> Result<Self, RequestError> {
        let mut item = Self::default();
        let read = json::members(value.get(), |name, value| {
            match FIELDS.into_iter().find(|field| *field == name) {
                _ if value.get() == "null" || SILENT.contains(&&*name) => {}
                Some(field) => item.fields.push((field, value)),
                None if name == "type" => item.kind = Some(json::text(value).unwrap_or_default()),
                None => unknown.tell_inside(at, &name),
            }
            true
        });
        read.map_err(|_| RequestError::invalid(at, format!("{at} must be an item, an object")))?;
        Ok(item)
    }

    fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.fields.iter().rev().find(|(field, _)| *field == name).map(|(_, value)| *value)
    }

    fn text(&self, at: &str, name: &str) -> Result<String, RequestError> {
        let shape = || RequestError::invalid(format!("{at}.{name}"), format!("{at}.{name} must be a text"));
        self.get(name).and_then(json::text).ok_or_else(shape)
    }

    /// The texts of a content, of parts of these kinds.
    fn texts(&self, at: &str, name: &str, kinds: &[&str], unknown: &mut Unknown) -> Result<Vec<String>, RequestError> {
        let at = format!("{at}.{name}");
        let content = self.get(name).ok_or_else(|| RequestError::invalid(&*at, format!("{at} is required")))?;
        match json::text(content) {
            Some(text) => Ok(vec![text]),
            None => parts(&at, content, kinds, unknown),
        }
    }
}

fn unsupported(at: String, why: &str) -> RequestError {
    RequestError::new(ErrorKind::Unsupported, format!("{at} is not supported: {why}")).param(at)
}

fn item(at: &str, value: &RawValue, chat: &mut Chat, unknown: &mut Unknown) -> Result<(), RequestError> {
    let item = Item::read(at, value, unknown)?;
    match item.kind.as_deref() {
        None | Some("message") => {
            let role = item.text(at, "role")?;
            let role = Role::from_name(&role).filter(|role| *role != Role::Tool).ok_or_else(|| {
                let at = format!("{at}.role");
                let message = format!("{at} must be user, assistant, system or developer");
                RequestError::invalid(at, message)
            })?;
            let texts = item.texts(at, "content", &TEXTS, unknown)?;
            if texts.is_empty() {
                return Err(RequestError::invalid(format!("{at}.content"), format!("{at}.content has no part")));
            }
            texts.into_iter().try_for_each(|text| chat.text(role, text))
        }
        Some("function_call") => {
            let (id, name) = (item.text(at, "call_id")?, item.text(at, "name")?);
            let text = item.text(at, "arguments")?;
            if text.len() > CALLS_BYTES_MAX {
                let message = format!("{at}.arguments takes at most {CALLS_BYTES_MAX} bytes, got {}", text.len());
                return Err(RequestError::invalid(format!("{at}.arguments"), message));
            }
            // Templates expect an object; what is none stays what it is.
            let arguments = serde_json::from_str::<Map<String, Value>>(&text).map(Value::Object);
            chat.call(id, name, arguments.unwrap_or(Value::String(text)))
        }
        Some("function_call_output") => {
            let texts = item.texts(at, "output", &TEXTS, unknown)?;
            chat.result(item.text(at, "call_id")?, texts)
        }
        Some("reasoning") => match item.get("content") {
            Some(content) => {
                let texts = parts(&format!("{at}.content"), content, &["reasoning_text"], unknown)?;
                texts.iter().try_for_each(|text| chat.reasoning(text))
            }
            // Another service encrypted it: no model here can read it.
            None => Ok(()),
        },
        Some("item_reference") => Err(unsupported(at.into(), "nothing is stored, so send the item itself")),
        Some(_) => {
            Err(unsupported(at.into(), "items are of type message, function_call, function_call_output and reasoning"))
        }
    }
}

fn parts(at: &str, value: &RawValue, kinds: &[&str], unknown: &mut Unknown) -> Result<Vec<String>, RequestError> {
    let shape = |what: String| RequestError::invalid(at, format!("{at} {what}"));
    let items = json::items(value.get(), PARTS_MAX).map_err(|_| shape("must be a text or a list of parts".into()))?;
    let items = items.ok_or_else(|| shape(format!("takes at most {PARTS_MAX} parts")))?;
    let part = |(i, part): (usize, &RawValue)| {
        let (mut kind, mut text) = (None, None);
        let read = json::members(part.get(), |name, value| {
            match &*name {
                "type" => kind = json::text(value),
                "text" => text = json::text(value),
                "annotations" | "logprobs" => {}
                _ => unknown.tell_inside(&format!("{at}[]"), &name),
            }
            true
        });
        let is_text = read.is_ok() && kind.is_some_and(|kind| kinds.contains(&&*kind));
        text.filter(|_| is_text).ok_or_else(|| unsupported(format!("{at}[{i}]"), "parts are text only"))
    };
    items.into_iter().enumerate().map(part).collect()
}
