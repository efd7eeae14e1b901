//! Answers in chunks, written as server-sent events.
//!
//! Most chunks say a text and nothing else. The first of them is written as all others are; then only index and text change.

use super::answer::{AnswerHead, Endpoint};
use super::shapes::{Body, Choice, Ended, Said, UsageField};
use super::written::not_written;
use crate::output::{Delta, Finished};
use baton_types::RequestError;
use serde::Serialize;
use std::io::Write as _;

/// What a client has seen of one choice.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    tokens: usize,
    /// Characters of text, where they are counted.
    chars: usize,
}

/// A chunk that says a text alone: what stands before its index, before its text, and behind that.
struct Plain {
    before_index: String,
    before_text: String,
    after: String,
}

/// Writes the chunks of one answer.
pub(crate) struct Chunks {
    head: AnswerHead,
    shown: Vec<Shown>,
    /// `None` where every chunk says more than its text.
    plain: Option<Plain>,
}

impl Chunks {
    /// Nothing is shown yet.
    pub(crate) fn new(head: AnswerHead) -> Self {
        let options = &head.options;
        let says_more = options.return_token_ids || options.continuous_usage;
        let plain = if says_more { None } else { Plain::of(&head) };
        Self { shown: vec![Shown::default(); head.samples as usize], plain, head }
    }

    /// How many choices there are.
    pub(crate) fn samples(&self) -> u32 {
        self.head.samples
    }

    /// The chunk that opens a choice, where the shape has any.
    ///
    /// # Errors
    /// If it cannot be written; `to` is as it was then. The same holds for the others.
    pub(crate) fn opening(&self, sample: u32, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let ids = self.head.options.return_token_ids;
        let said = match self.head.endpoint {
            Endpoint::Chat => Said::opening(),
            Endpoint::Completions if ids => Said::Text(""),
            Endpoint::Completions => return Ok(()),
        };
        let mut chunk = chunk(&self.head, self.head.choice(sample, said), Shown::default());
        if ids {
            self.head.add_prompt_tokens(&mut chunk);
        }
        event(&chunk, to)
    }

    /// The chunk of a delta; nothing where the client would see nothing new.
    pub(crate) fn delta(&mut self, delta: &Delta, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let Some(shown) = self.shown.get_mut(delta.sample as usize) else { return Ok(()) };
        shown.tokens += delta.token_ids.len();
        let (head, has_logprobs) = (&self.head, !delta.logprobs.is_empty());
        if delta.text.is_empty() && !has_logprobs && !head.options.return_token_ids {
            return Ok(());
        }
        if let Some(plain) = self.plain.as_ref().filter(|_| !has_logprobs) {
            return plain.write(delta, to);
        }
        let logprobs = head.logprobs(delta, shown.chars);
        shown.chars += logprobs.map_or(0, |logprobs| logprobs.chars());
        let choice =
            Choice { logprobs, token_ids: head.token_ids(delta), ..head.choice(delta.sample, text(head, &delta.text)) };
        event(&chunk(head, choice, *shown), to)
    }

    /// The chunks that close a choice: finish reason, and with the last one the usage where asked for, and the end of the stream.
    pub(crate) fn finished(&self, finished: &Finished, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let head = &self.head;
        let said = match head.endpoint {
            Endpoint::Chat => Said::nothing(),
            Endpoint::Completions => Said::Text(""),
        };
        let choice = Choice { finish_reason: Some(finished.reason_name()), ..head.choice(finished.sample, said) };
        let shown = self.shown.get(finished.sample as usize).copied().unwrap_or_default();
        let end = Body { ended: Some(Ended::new(finished)), seed: Some(head.seed), ..chunk(head, choice, shown) };
        event(&end, to)?;
        let Some(total) = &finished.total else { return Ok(()) };
        if head.options.include_usage {
            event(&Body { usage: Some(UsageField::of(total)), ..head.body(true, Vec::new()) }, to)?;
        }
        to.extend_from_slice(b"data: [DONE]\n\n");
        Ok(())
    }
}

fn text<'a>(head: &AnswerHead, text: &'a str) -> Said<'a> {
    match head.endpoint {
        Endpoint::Chat => Said::more(text),
        Endpoint::Completions => Said::Text(text),
    }
}

/// A chunk of a choice that has shown what `shown` says.
fn chunk<'a>(head: &'a AnswerHead, choice: Choice<'a>, shown: Shown) -> Body<'a> {
    let usage = if head.options.continuous_usage {
        Some(UsageField::so_far(head.prompt_tokens, shown.tokens))
    } else {
        // Every chunk but the last carries the field, as OpenAI has it.
        head.options.include_usage.then_some(UsageField::None)
    };
    Body { usage, ..head.body(true, vec![choice]) }
}

/// A value as one event. JSON has no line breaks of its own.
pub(crate) fn event(value: &impl Serialize, to: &mut Vec<u8>) -> Result<(), RequestError> {
    let before = to.len();
    to.extend_from_slice(b"data: ");
    if let Err(error) = serde_json::to_writer(&mut *to, value) {
        to.truncate(before);
        return Err(not_written(&error));
    }
    to.extend_from_slice(b"\n\n");
    Ok(())
}

impl Plain {
    fn of(head: &AnswerHead) -> Option<Self> {
        const INDEX: &str = r#""choices":[{"index":"#;
        let mut bytes = Vec::new();
        event(&chunk(head, head.choice(0, text(head, "")), Shown::default()), &mut bytes).ok()?;
        let chunk = String::from_utf8(bytes).ok()?;
        // Quotes within names are escaped, so neither is found in one.
        let (names, choice) = chunk.split_once(INDEX)?;
        let (before_text, after) = choice.strip_prefix('0')?.split_once(r#""""#)?;
        Some(Self { before_index: names.to_owned() + INDEX, before_text: before_text.into(), after: after.into() })
    }

    fn write(&self, delta: &Delta, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let before = to.len();
        to.reserve(self.before_index.len() + self.before_text.len() + delta.text.len() + self.after.len() + 16);
        to.extend_from_slice(self.before_index.as_bytes());
        let written = write!(to, "{}{}", delta.sample, self.before_text).map_err(serde_json::Error::io);
        if let Err(error) = written.and_then(|()| serde_json::to_writer(&mut *to, &delta.text)) {
            to.truncate(before);
            return Err(not_written(&error));
        }
        to.extend_from_slice(self.after.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::AnswerOptions;
    use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

    /// Letters, what JSON escapes, and names of its fields.
    fn text(random: &mut StdRng) -> String {
        const PARTS: [&str; 12] =
            ["a", "\"", "\\", "\n", "\u{1}", "é", "🦀", "\u{2028}", r#""choices":[{"index":0"#, "\"\"", "</s>", " "];
        (0..random.random_range(1..9)).map(|_| PARTS[random.random_range(0..PARTS.len())]).collect()
    }

    #[test]
    fn plain_chunks_are_what_serde_writes() {
        let mut random = StdRng::seed_from_u64(1);
        for round in 0..2_000 {
            let endpoint = if round % 2 == 0 { Endpoint::Chat } else { Endpoint::Completions };
            let options = AnswerOptions { stream: true, include_usage: round % 3 == 0, ..AnswerOptions::default() };
            let (id, model) = (text(&mut random), text(&mut random));
            let head = AnswerHead {
                id,
                model,
                options,
                samples: 128,
                created: random.random(),
                ..crate::openai::tests::head(endpoint)
            };
            let (mut fast, mut slow) = (Chunks::new(head.clone()), Chunks { plain: None, ..Chunks::new(head) });
            assert!(fast.plain.is_some());
            for _ in 0..3 {
                let sample = random.random_range(0..128);
                let delta = Delta { sample, text: text(&mut random), token_ids: vec![1], ..Delta::default() };
                let (mut one, mut other) = (Vec::new(), Vec::new());
                fast.delta(&delta, &mut one).unwrap();
                slow.delta(&delta, &mut other).unwrap();
                assert_eq!(String::from_utf8(one), String::from_utf8(other));
            }
        }
    }
}
