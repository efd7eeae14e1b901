//! JSON parsed in place: lists and objects as slices of their text, one level at a time, so that nothing is built
//! unless it is needed.

use serde::Deserializer as _;
use serde::de::{DeserializeOwned, DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt;

/// Most bytes of the arguments of a chat template: flags and short texts. With the parser's nesting limit (128) this
/// bounds their memory.
pub(crate) const KWARGS_BYTES_MAX: usize = 16 << 10;

/// Most bytes of a field that is neither prompt nor stop string. If it has the wrong type, the error message repeats
/// it, with up to eight bytes per byte.
const FIELD_BYTES_MAX: usize = 64 << 10;
/// Bytes of such a message that the client receives.
const MESSAGE_BYTES_MAX: usize = 512;

/// Parses a value as a type. The position in the error message is removed: it would be relative to the field.
pub(crate) fn read<T: DeserializeOwned>(value: &RawValue) -> Result<T, String> {
    let text = value.get();
    if text.len() > FIELD_BYTES_MAX {
        return Err(format!("takes at most {FIELD_BYTES_MAX} bytes, got {}", text.len()));
    }
    serde_json::from_str(text).map_err(|e| {
        let message = e.to_string();
        let what = message.rsplit_once(" at line ").map_or(&*message, |(what, _)| what);
        short(what).to_owned()
    })
}

/// The part of a message that the client receives.
fn short(message: &str) -> &str {
    &message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)]
}

/// A value as text, of any length; `None` if it is not a string.
pub(crate) fn text(value: &RawValue) -> Option<String> {
    // The error message for another type would repeat the value.
    value.get().starts_with('"').then(|| serde_json::from_str(value.get()).ok())?
}

/// An error that repeats nothing of the input.
fn is_no(what: &str) -> serde_json::Error {
    serde_json::Error::custom(format_args!("it is no {what}"))
}

/// The arguments of a chat template.
pub(crate) fn kwargs(text: &str) -> Result<Map<String, Value>, String> {
    if text.len() > KWARGS_BYTES_MAX {
        return Err(format!("chat_template_kwargs takes at most {KWARGS_BYTES_MAX} bytes, got {}", text.len()));
    }
    serde_json::from_str(text)
        .map_err(|e| format!("chat_template_kwargs must be a JSON object: {}", short(&e.to_string())))
}

/// Passes each member of an object to `with`, until it returns `false`; the rest is not parsed then.
pub(crate) fn members<'a>(
    text: &'a str,
    with: impl FnMut(Cow<'a, str>, &'a RawValue) -> bool,
) -> Result<(), serde_json::Error> {
    struct Members<F>(F);
    impl<'a, F: FnMut(Cow<'a, str>, &'a RawValue) -> bool> Visitor<'a> for Members<F> {
        type Value = ();
        fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
            to.write_str("an object")
        }
        fn visit_map<A: MapAccess<'a>>(mut self, mut map: A) -> Result<(), A::Error> {
            while let Some(name) = map.next_key_seed(Name)? {
                if !(self.0)(name, map.next_value()?) {
                    return Err(A::Error::custom("refused"));
                }
            }
            Ok(())
        }
    }
    if !text.trim_ascii_start().starts_with('{') {
        return Err(is_no("object"));
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    reader.deserialize_map(Members(with))?;
    reader.end()
}

/// The items of a list of at most `max`; `None` if there are more.
pub(crate) fn items(text: &str, max: usize) -> Result<Option<Vec<&RawValue>>, serde_json::Error> {
    struct Items(usize);
    impl<'a> Visitor<'a> for Items {
        type Value = Option<Vec<&'a RawValue>>;
        fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
            to.write_str("a list")
        }
        fn visit_seq<A: SeqAccess<'a>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = list.next_element::<&RawValue>()? {
                if items.len() == self.0 {
                    while list.next_element::<IgnoredAny>()?.is_some() {}
                    return Ok(None);
                }
                items.push(item);
            }
            Ok(Some(items))
        }
    }
    if !text.starts_with('[') {
        return Err(is_no("list"));
    }
    serde_json::Deserializer::from_str(text).deserialize_seq(Items(max))
}

/// A name, borrowed from the text if it contains no escapes.
struct Name;

impl<'a> DeserializeSeed<'a> for Name {
    type Value = Cow<'a, str>;
    fn deserialize<D: serde::Deserializer<'a>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_str(self)
    }
}

impl<'a> Visitor<'a> for Name {
    type Value = Cow<'a, str>;
    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a name")
    }
    fn visit_borrowed_str<E>(self, name: &'a str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(name))
    }
    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}
