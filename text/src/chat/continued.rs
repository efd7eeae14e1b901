//! A prompt that ends within its last message, which the answer continues.
//!
//! A mark and a space are added to the message's text. Where the mark is in the rendering, the message ends, whatever
//! the template writes behind it. If the template has dropped the space, it trims messages, so it would have trimmed
//! the end of this one: the same text comes out as in Hugging Face's `continue_final_message`.

use super::marks::Marks;
use super::{Content, Message};
use crate::TextError;

/// The text of a message that can be continued; of parts, the last.
pub(super) fn text(message: &Message) -> Option<&str> {
    match &message.content {
        Some(Content::Text(text)) => Some(text),
        Some(Content::Parts(parts)) => parts.last().map(String::as_str),
        None => None,
    }
}

/// The message with a mark behind its text.
pub(super) fn marked(message: &Message, marks: &Marks) -> Message {
    let mut message = message.clone();
    match &mut message.content {
        Some(Content::Text(text)) => text.extend([marks.end(), ' ']),
        Some(Content::Parts(parts)) => {
            parts.iter_mut().last().into_iter().for_each(|part| part.extend([marks.end(), ' ']))
        }
        None => {}
    }
    message
}

/// A rendering up to the last mark.
pub(super) fn cut(mut output: String, marks: &Marks) -> Result<String, TextError> {
    let shown = || TextError::NotContinued("the model's chat template does not show its text");
    let (before, behind) = output.rsplit_once(marks.end()).ok_or_else(shown)?;
    let is_space = |c: char| marks.original(c).is_whitespace();
    let is_trimmed = behind.chars().next().is_none_or(|c| marks.original(c) != ' ');
    let end = if is_trimmed { before.trim_end_matches(is_space).len() } else { before.len() };
    output.truncate(end);
    Ok(output)
}
