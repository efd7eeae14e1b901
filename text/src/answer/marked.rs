//! Answers of plain text with marks: reasoning at the beginning, and calls.

use super::{AnswerFormat, CallFormat, Part};
use std::sync::Arc;

/// What ends the reasoning of models that mark it.
pub(super) const THOUGHT: &str = "</think>";
pub(super) const THINKS: &str = "<think>";

/// Most marks of its end in the texts of one call; at each, all of it is read again.
const MARKS_IN_CALL_MAX: u32 = 64;

/// Parses one answer, piece by piece. Text is held back only while it may be the beginning of a mark, and in a call.
#[derive(Clone, Debug)]
pub(super) struct MarkedParser {
    /// Only if the request has tools.
    calls: Option<CallFormat>,
    tools: Arc<[String]>,
    state: State,
    held: String,
    /// Bytes of `held` in which the end of a call was looked for.
    searched: usize,
    /// How often the mark of its end stood in the call's texts.
    marks_in_call: u32,
    /// Whether content was given since the start or the last call: whitespace before the first is dropped beside calls.
    has_content: bool,
    has_calls: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but whitespace came.
    Start {
        /// It may begin with its reasoning.
        reasons: bool,
    },
    Reasoning,
    /// Reasoning or a call has ended, and only whitespace came since.
    Between,
    Content,
    Call,
}

impl MarkedParser {
    /// For an answer to a prompt with these tools. `prompt` is the end of the prompt: a template may have opened the reasoning.
    pub(super) fn new(format: AnswerFormat, tools: Arc<[String]>, prompt: &str) -> Self {
        let calls = (!tools.is_empty()).then_some(format.calls);
        let is_open = format.reasons && prompt.trim_end().ends_with(THINKS);
        let state = if is_open { State::Reasoning } else { State::Start { reasons: format.reasons } };
        Self {
            calls,
            tools,
            state,
            held: String::new(),
            searched: 0,
            marks_in_call: 0,
            has_content: false,
            has_calls: false,
        }
    }

    /// Whether it does nothing: all of the answer is content.
    pub(super) fn is_plain(&self) -> bool {
        self.calls.is_none() && self.state == State::Start { reasons: false }
    }

    /// Whether a call may be among the parts.
    pub(super) fn may_call(&self) -> bool {
        self.calls.is_some()
    }

    /// Whether the answer is in its reasoning.
    pub(super) fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Whether a call was among the parts.
    pub(super) fn has_calls(&self) -> bool {
        self.has_calls
    }

    /// The parts that this text completes.
    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// The parts that the end of the answer completes.
    pub(super) fn finish(&mut self) -> Vec<Part> {
        let (mut parts, held) = (Vec::new(), std::mem::take(&mut self.held));
        match self.state {
            State::Reasoning => reasoning(held, &mut parts),
            State::Call if self.calls.is_some_and(|calls| calls.closes().is_none()) => self.call(&held, &mut parts),
            State::Call => {
                let opens = self.calls.and_then(CallFormat::opens).unwrap_or_default();
                self.content(format!("{opens}{held}"), &mut parts);
            }
            State::Start { .. } | State::Between | State::Content => {
                if self.calls.is_none() || self.has_content || !held.trim().is_empty() {
                    self.content(held, &mut parts);
                }
            }
        }
        parts
    }

    /// Consumes what can be decided; `false` if more text is needed.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::Start { reasons } => {
                let text = self.held.trim_start();
                if reasons && THINKS.starts_with(text) && text.len() < THINKS.len() || text.is_empty() {
                    return false;
                }
                if let Some(rest) = text.strip_prefix(THINKS).filter(|_| reasons) {
                    (self.held, self.state) = (rest.to_owned(), State::Reasoning);
                } else if self.calls == Some(CallFormat::Llama) && text.starts_with('{') {
                    self.state = State::Call;
                } else {
                    self.state = State::Content;
                }
                true
            }
            State::Reasoning => match self.held.find(THOUGHT) {
                Some(at) => {
                    let rest = self.held.split_off(at + THOUGHT.len());
                    self.held.truncate(at);
                    reasoning(std::mem::replace(&mut self.held, rest), parts);
                    self.state = State::Between;
                    true
                }
                None => {
                    let ready = std::mem::take(&mut self.held);
                    let (ready, held) = split_before_mark(ready, THOUGHT);
                    self.held = held;
                    reasoning(ready, parts);
                    false
                }
            },
            State::Between => {
                let text = self.held.trim_start();
                if text.is_empty() {
                    self.held.clear();
                    return false;
                }
                let next = if self.has_calls { State::Content } else { State::Start { reasons: false } };
                (self.held, self.state) = (text.to_owned(), next);
                true
            }
            State::Content => {
                let Some(opens) = self.calls.and_then(CallFormat::opens) else {
                    let held = std::mem::take(&mut self.held);
                    self.content(held, parts);
                    return false;
                };
                match self.held.find(opens) {
                    Some(at) => {
                        let rest = self.held.split_off(at + opens.len());
                        self.held.truncate(at);
                        let before = std::mem::replace(&mut self.held, rest);
                        if self.has_content || !before.trim().is_empty() {
                            self.content(before, parts);
                        }
                        self.state = State::Call;
                        true
                    }
                    None => {
                        let text = std::mem::take(&mut self.held);
                        let (ready, held) = split_before_mark(text, opens);
                        if !self.has_content && ready.trim().is_empty() {
                            self.held = ready + &held;
                        } else {
                            self.held = held;
                            self.content(ready, parts);
                        }
                        false
                    }
                }
            }
            State::Call => {
                let Some(closes) = self.calls.and_then(CallFormat::closes) else { return false };
                let Some(at) = self.held[self.searched..].find(closes).map(|at| self.searched + at) else {
                    let searched = self.held.len().saturating_sub(closes.len());
                    self.searched = self.searched.max(self.held.floor_char_boundary(searched));
                    return false;
                };
                let may_go_on = self.marks_in_call < MARKS_IN_CALL_MAX;
                if may_go_on && self.calls.is_some_and(|calls| calls.goes_on(&self.held[..at])) {
                    self.searched = at + closes.len();
                    self.marks_in_call += 1;
                    return true;
                }
                (self.searched, self.marks_in_call) = (0, 0);
                let rest = self.held.split_off(at + closes.len());
                self.held.truncate(at);
                let call = std::mem::replace(&mut self.held, rest);
                self.state = State::Content;
                self.call(&call, parts);
                true
            }
        }
    }

    /// The text of a call, or content that looks like one.
    fn call(&mut self, text: &str, parts: &mut Vec<Part>) {
        let Some(format) = self.calls else { return };
        match format.read(text, |name| self.tools.iter().any(|tool| tool == name)) {
            Some(calls) => {
                (self.has_calls, self.has_content, self.state) = (true, false, State::Between);
                parts.extend(calls.into_iter().map(Part::Call));
            }
            None => {
                let (opens, closes) = (format.opens().unwrap_or_default(), format.closes().unwrap_or_default());
                self.content(format!("{opens}{text}{closes}"), parts);
            }
        }
    }

    fn content(&mut self, text: String, parts: &mut Vec<Part>) {
        if !text.is_empty() {
            self.has_content = true;
            parts.push(Part::Content(text));
        }
    }
}

pub(super) fn reasoning(text: String, parts: &mut Vec<Part>) {
    if !text.is_empty() {
        parts.push(Part::Reasoning(text));
    }
}

/// The text, and the end of it that may be the beginning of `mark`.
pub(super) fn split_before_mark(mut text: String, mark: &str) -> (String, String) {
    let begins = |len: &usize| text.as_bytes().ends_with(&mark.as_bytes()[..*len]);
    let held = (1..mark.len()).rev().find(begins).unwrap_or(0);
    let held = text.split_off(text.len() - held);
    (text, held)
}
