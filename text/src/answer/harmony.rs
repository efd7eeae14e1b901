//! Answers in the notation of gpt-oss: messages, each with a header that names its channel and whom it is for.
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
//! <|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>
//! ```
//!
//! The channel `analysis` is reasoning, a message for a function is a call of it, and all others are content. What is for nobody that is
//! known, or is no call, is content with its header.

use super::calls::arguments;
use super::marked::{reasoning, split_before_mark};
use super::{Call, Part};
use std::sync::Arc;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
const MESSAGE: &str = "<|message|>";
/// What ends a message. The last two also end the answer, and are mostly no part of its text.
const ENDS: [&str; 4] = ["<|end|>", START, "<|call|>", "<|return|>"];
/// Control tokens that tell its templates from others. Not all templates have the others.
pub(super) const IN_TEMPLATES: [&str; 3] = [START, CHANNEL, MESSAGE];
/// Control tokens that its text must show.
pub(super) const MARKS: [&str; 7] = [START, CHANNEL, CONSTRAIN, MESSAGE, ENDS[0], ENDS[2], ENDS[3]];
/// What the name of a function is behind, where a message is for it.
const FUNCTIONS: &str = "functions.";
/// Most of a header that is held back: beyond it the text is content.
const HEADER_BYTES_MAX: usize = 1 << 10;

/// A message that goes to a function.
pub(super) fn around_arguments(name: &str) -> (String, String) {
    (format!("{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"), String::new())
}

/// Opens a message for the user, behind the beginning of an answer.
pub(super) const FINAL: &str = "<|channel|>final<|message|>";

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// In a header, or before one.
    Header,
    Reasoning,
    Content,
    /// In a message for a function; with the header as it was written.
    Call {
        name: String,
        header: String,
    },
}

/// Parses one answer.
#[derive(Clone, Debug)]
pub(super) struct HarmonyParser {
    tools: Arc<[String]>,
    state: State,
    held: String,
    /// Bytes of `held` in which no end of a message is.
    searched: usize,
    has_calls: bool,
}

impl HarmonyParser {
    pub(super) fn new(tools: Arc<[String]>, prompt: &str) -> Self {
        let mut parser = Self { tools, state: State::Header, held: String::new(), searched: 0, has_calls: false };
        // The prompt may end within a message.
        let last = prompt.rsplit(START).next().unwrap_or_default();
        if let Some((header, _)) = last.split_once(MESSAGE).filter(|_| !ENDS.iter().any(|end| last.contains(end))) {
            parser.state = parser.kind(header);
        }
        parser
    }

    pub(super) fn may_call(&self) -> bool {
        !self.tools.is_empty()
    }

    pub(super) fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    pub(super) fn has_calls(&self) -> bool {
        self.has_calls
    }

    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    pub(super) fn finish(&mut self) -> Vec<Part> {
        let (mut parts, held) = (Vec::new(), std::mem::take(&mut self.held));
        match std::mem::replace(&mut self.state, State::Header) {
            // A header without its message says nothing; a word that could begin one is what the model said.
            State::Header if is_header(&held) && (held.contains(START) || held.contains(CHANNEL)) => {}
            State::Header | State::Content => content(held, &mut parts),
            State::Reasoning => reasoning(held, &mut parts),
            State::Call { name, header } => self.call(name, &header, &held, &mut parts),
        }
        parts
    }

    /// Consumes what can be decided; `false` if more text is needed.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.state == State::Header {
            let beginning = &self.held[..self.held.floor_char_boundary(HEADER_BYTES_MAX + MESSAGE.len())];
            let end = beginning.find(MESSAGE);
            if !is_header(beginning) || end.unwrap_or(self.held.len()) > HEADER_BYTES_MAX {
                self.state = State::Content;
                if self.held.starts_with(START) {
                    content(self.held.drain(..START.len()).collect(), parts);
                }
                return !self.held.is_empty();
            }
            let Some(at) = end else { return false };
            let rest = self.held.split_off(at + MESSAGE.len());
            self.held.truncate(at);
            let header = std::mem::replace(&mut self.held, rest);
            self.state = self.kind(&header);
            // Nothing of what is not understood is lost.
            if self.state == State::Content && recipient(&header).is_some() {
                content(format!("{header}{MESSAGE}"), parts);
            }
            return true;
        }
        if let Some((at, end)) = self.first_end() {
            self.searched = 0;
            let rest = self.held.split_off(at);
            let body = std::mem::replace(&mut self.held, rest);
            if end != START {
                self.held.drain(..end.len());
            }
            match std::mem::replace(&mut self.state, State::Header) {
                State::Reasoning => reasoning(body, parts),
                State::Call { name, header } => self.call(name, &header, &body, parts),
                State::Header | State::Content => content(body, parts),
            }
            return !self.held.is_empty();
        }
        if matches!(self.state, State::Call { .. }) {
            let longest = ENDS.iter().map(|end| end.len()).max().unwrap_or(0);
            self.searched = self.held.floor_char_boundary((self.held.len() + 1).saturating_sub(longest));
            return false;
        }
        let text = std::mem::take(&mut self.held);
        let longest = ENDS.iter().map(|end| split_before_mark(text.clone(), end).1.len()).max().unwrap_or(0);
        let mut ready = text;
        self.held = ready.split_off(ready.len() - longest);
        if self.state == State::Reasoning {
            reasoning(ready, parts)
        } else {
            content(ready, parts)
        }
        false
    }

    /// Where the message ends, and with what.
    fn first_end(&self) -> Option<(usize, &'static str)> {
        let ends_at = |at: usize| ENDS.iter().find(|end| self.held[at..].starts_with(**end));
        let mut marks = self.held[self.searched..].match_indices("<|").map(|(at, _)| self.searched + at);
        marks.find_map(|at| Some((at, *ends_at(at)?)))
    }

    /// What the message behind this header is.
    fn kind(&self, header: &str) -> State {
        let function = recipient(header).and_then(|whom| whom.strip_prefix(FUNCTIONS));
        match function {
            Some(name) if self.tools.iter().any(|tool| tool == name) => {
                State::Call { name: name.to_owned(), header: header.to_owned() }
            }
            _ if recipient(header).is_none() && channel(header) == "analysis" => State::Reasoning,
            _ => State::Content,
        }
    }

    fn call(&mut self, name: String, header: &str, body: &str, parts: &mut Vec<Part>) {
        match arguments(body.trim()) {
            Some(arguments) => {
                self.has_calls = true;
                parts.push(Part::Call(Call { name, arguments }));
            }
            None => content(format!("{header}{MESSAGE}{body}"), parts),
        }
    }
}

/// Whether this text is, or begins, a header.
fn is_header(text: &str) -> bool {
    let text = text.trim_start();
    let after = text.strip_prefix(START).unwrap_or(text).trim_start();
    let after = after.strip_prefix("assistant").unwrap_or(after).trim_start();
    [START, "assistant", "to=", CHANNEL]
        .iter()
        .any(|begin| begin.starts_with(after) || after.starts_with(begin) && *begin != START && *begin != "assistant")
}

/// The word behind `mark`.
fn word<'a>(header: &'a str, mark: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(mark)?;
    let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
    Some(&rest[..end])
}

fn recipient(header: &str) -> Option<&str> {
    word(header, " to=").or_else(|| word(header, "to=").filter(|_| header.trim_start().starts_with("to=")))
}

fn channel(header: &str) -> &str {
    word(header, CHANNEL).unwrap_or_default()
}

fn content(text: String, parts: &mut Vec<Part>) {
    if !text.is_empty() {
        parts.push(Part::Content(text));
    }
}
