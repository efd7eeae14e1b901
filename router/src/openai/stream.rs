//! Answers in chunks, written as server-sent events.
//!
//! Most chunks hold a text and nothing else. The first of them is serialized in full; for later ones only index and
//! text are replaced.

use super::answer::{AnswerHead, Endpoint};
use super::echo::Echoes;
use super::error::error_body;
use super::logprobs::Echoed;
use super::parts::{reason_name, tool_call};
use super::shapes::{Body, Choice, ChoiceContent, UsageField};
use crate::output::{Delta, Finished};
use crate::wire::serialize::not_written;
use crate::wire::{Ended, Form as _, StreamForm, event};
use baton_node::intake::Hold;
use baton_text::answer::{AnswerParser, Part};
use baton_types::RequestError;
use std::io::Write as _;

/// What a client has seen of one choice.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    tokens: usize,
    /// Characters of text, where they are counted.
    chars: usize,
    calls: u32,
    /// Whether its prompt was shown.
    echoed: bool,
}

/// A chunk with text only: the bytes before its index, before its text, and after the text.
struct Plain {
    before_index: String,
    before_text: String,
    after: String,
}

/// Writes the chunks of one answer.
pub(crate) struct Chunks {
    head: AnswerHead,
    shown: Vec<Shown>,
    /// Of each choice, where its text has parts.
    parsers: Vec<AnswerParser>,
    /// `None` if every chunk holds more than its text.
    plain: Option<Plain>,
    /// `None` if no chunk shows log-probabilities of a prompt.
    echoes: Option<Echoes>,
}

impl Chunks {
    /// Nothing was sent yet. What must be kept is counted in `kept`.
    pub(crate) fn new(head: AnswerHead, kept: Hold) -> Self {
        let (options, choices) = (&head.options, head.choices().count() as usize);
        let says_more = options.return_token_ids || options.continuous_usage || head.parts.is_some();
        let parser = head.parts.as_ref().map(|parts| parts.parser.clone());
        let parsers = parser.map_or(Vec::new(), |parser| vec![parser; choices]);
        let plain = if says_more { None } else { Plain::of(&head) };
        let echoes = head.options.echo_logprobs.map(|_| Echoes::new(head.choices(), kept));
        Self { shown: vec![Shown::default(); choices], parsers, plain, echoes, head }
    }

    /// A chunk for each part. Log-probabilities and token ids of `delta` are in the first, which may have nothing else.
    fn parts(
        &mut self,
        sample: u32,
        parts: Vec<Part>,
        delta: Option<&Delta>,
        to: &mut Vec<u8>,
    ) -> Result<(), RequestError> {
        let head = &self.head;
        let Some(shown) = self.shown.get_mut(sample as usize) else { return Ok(()) };
        let mut first = delta.filter(|delta| !delta.logprobs.is_empty() || head.options.return_token_ids);
        let is_empty = parts.is_empty() && first.is_some();
        let mut write = |content: ChoiceContent<'_>, shown: Shown| {
            let delta = first.take();
            let logprobs = delta.and_then(|delta| head.logprobs(delta, Echoed::default(), 0));
            let token_ids = delta.and_then(|delta| head.token_ids(delta));
            event(&chunk(head, Choice { logprobs, token_ids, ..head.choice(sample, content) }, shown), to)
        };
        for part in parts {
            match part {
                Part::Content(text) => write(ChoiceContent::more(&text), *shown)?,
                Part::Reasoning(text) => write(ChoiceContent::reasoning(&text), *shown)?,
                Part::Call(call) => {
                    let Some(parts) = &head.parts else { continue };
                    let mut call = tool_call(parts, call, &head.id, sample, shown.calls);
                    call.index = Some(shown.calls);
                    shown.calls += 1;
                    write(ChoiceContent::call(&call), *shown)?;
                }
            }
        }
        if is_empty { write(ChoiceContent::nothing(), *shown) } else { Ok(()) }
    }
}

impl StreamForm for Chunks {
    const KEEPALIVE: &'static [u8] = b": keepalive\n\n";

    fn samples(&self) -> u32 {
        self.head.choices().count()
    }

    /// The chunk that opens a choice, if the format has one.
    fn opening(&mut self, sample: u32, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let ids = self.head.options.return_token_ids;
        // With its log-probabilities, the prompt is shown once these are known.
        let prompt = if self.echoes.is_some() { "" } else { &self.head.prompt_of(sample).text[..] };
        let content = match self.head.endpoint {
            Endpoint::Chat => ChoiceContent::opening(),
            Endpoint::Completions if ids || !prompt.is_empty() => ChoiceContent::text(prompt),
            Endpoint::Completions => return Ok(()),
        };
        let mut chunk = chunk(&self.head, self.head.choice(sample, content), Shown::default());
        if ids {
            self.head.add_prompt_tokens(&mut chunk);
        }
        event(&chunk, to)
    }

    /// The chunk of a delta; nothing if it holds nothing new for the client.
    fn delta(&mut self, delta: &Delta, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let Some(shown) = self.shown.get_mut(delta.sample as usize) else { return Ok(()) };
        if let Some(echoes) = &mut self.echoes {
            let (head, prompt) = (&self.head, self.head.choices().prompt_of(delta.sample));
            if !delta.prompt.is_empty() {
                return echoes.keep(prompt, delta, head.scored_bytes(&delta.prompt));
            }
            if !std::mem::replace(&mut shown.echoed, true) {
                let (prompt_shown, nothing) = (&head.prompts[prompt], Delta::default());
                let logprobs = head.logprobs(&nothing, head.echoed(prompt_shown, echoes.of(prompt)), 0);
                shown.chars = logprobs.map_or(0, |logprobs| logprobs.chars());
                let content = ChoiceContent::text(&prompt_shown.text);
                let choice = Choice { logprobs, ..head.choice(delta.sample, content) };
                event(&chunk(head, choice, *shown), to)?;
                echoes.shown(prompt);
            }
        }
        shown.tokens += delta.token_ids.len();
        let (head, has_logprobs) = (&self.head, !delta.logprobs.is_empty());
        if delta.text.is_empty() && !has_logprobs && !head.options.return_token_ids {
            return Ok(());
        }
        if let Some(plain) = self.plain.as_ref().filter(|_| !has_logprobs) {
            return plain.write(delta, to);
        }
        if let Some(parser) = self.parsers.get_mut(delta.sample as usize) {
            let parts = parser.push(&delta.text);
            return self.parts(delta.sample, parts, Some(delta), to);
        }
        let logprobs = head.logprobs(delta, Echoed::default(), shown.chars);
        shown.chars += logprobs.map_or(0, |logprobs| logprobs.chars());
        let choice =
            Choice { logprobs, token_ids: head.token_ids(delta), ..head.choice(delta.sample, text(head, &delta.text)) };
        event(&chunk(head, choice, *shown), to)
    }

    /// The chunks that end a choice: the rest of its parts, the finish reason, and with the last choice the usage if
    /// requested, and the end of the stream.
    fn finished(&mut self, finished: &Finished, to: &mut Vec<u8>) -> Result<(), RequestError> {
        if let Some(parser) = self.parsers.get_mut(finished.sample as usize) {
            let rest = parser.finish();
            self.parts(finished.sample, rest, None, to)?;
        }
        let head = &self.head;
        let content = match head.endpoint {
            Endpoint::Chat => ChoiceContent::nothing(),
            Endpoint::Completions => ChoiceContent::text(""),
        };
        let shown = self.shown.get(finished.sample as usize).copied().unwrap_or_default();
        let reason = reason_name(finished.reason, finished.reason_name(), shown.calls > 0);
        let choice = Choice { finish_reason: Some(reason), ..head.choice(finished.sample, content) };
        let end = Body { ended: Some(Ended::new(finished)), seed: Some(head.seed), ..chunk(head, choice, shown) };
        event(&end, to)?;
        let Some(total) = &finished.total else { return Ok(()) };
        if head.options.include_usage {
            event(&Body { usage: Some(UsageField::of(total)), ..head.body(true, Vec::new()) }, to)?;
        }
        to.extend_from_slice(b"data: [DONE]\n\n");
        Ok(())
    }

    fn error(&mut self, error: &RequestError, to: &mut Vec<u8>) {
        // A body of strings can always be serialized.
        let _ = event(&error_body(error), to);
    }
}

fn text<'a>(head: &AnswerHead, text: &'a str) -> ChoiceContent<'a> {
    match head.endpoint {
        Endpoint::Chat => ChoiceContent::more(text),
        Endpoint::Completions => ChoiceContent::text(text),
    }
}

/// A chunk of a choice after what `shown` counts.
fn chunk<'a>(head: &'a AnswerHead, choice: Choice<'a>, shown: Shown) -> Body<'a> {
    let usage = if head.options.continuous_usage {
        Some(UsageField::so_far(head.prompt_of(choice.index).tokens, shown.tokens))
    } else {
        // Every chunk but the last has the field, as in OpenAI's API.
        head.options.include_usage.then_some(UsageField::None)
    };
    Body { usage, ..head.body(true, vec![choice]) }
}

impl Plain {
    fn of(head: &AnswerHead) -> Option<Self> {
        const INDEX: &str = r#""choices":[{"index":"#;
        let mut bytes = Vec::new();
        event(&chunk(head, head.choice(0, text(head, "")), Shown::default()), &mut bytes).ok()?;
        let chunk = String::from_utf8(bytes).ok()?;
        // Quotes within names are escaped, so the split cannot match inside a name.
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
    use baton_types::TokenLogprobs;
    use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
    use serde_json::{Value, json};

    /// Every character that JSON may treat in its own way, any other, and what chunks are cut at.
    fn any_text(random: &mut StdRng) -> String {
        const PARTS: [&str; 7] =
            [r#""choices":[{"index":0"#, "\"\"", "\\\"", "\\u0000", "</s>", "\u{2028}\u{2029}", "\n\ndata: "];
        let mut text = String::new();
        for _ in 0..random.random_range(0..12) {
            match random.random_range(0..4) {
                0 => text.push(random.random_range('\0'..' ')),
                1 => text.push(random.random_range(' '..='\u{ff}')),
                2 => text.push(random.random()),
                _ => text += PARTS[random.random_range(0..PARTS.len())],
            }
        }
        text
    }

    fn any_logprobs(random: &mut StdRng) -> TokenLogprobs {
        const ALL: [f32; 6] = [0.0, -0.5, -1e-9, -9999.0, -123_456.0, f32::NEG_INFINITY];
        let mut one = || ALL[random.random_range(0..ALL.len())];
        let chosen = one();
        TokenLogprobs { chosen, top: vec![(0, one()), (34, one()), (300, one())] }
    }

    fn any_delta(samples: u32, random: &mut StdRng) -> Delta {
        let tokens = random.random_range(0..3);
        let has_logprobs = random.random_bool(0.3);
        Delta {
            sample: random.random_range(0..samples),
            text: any_text(random),
            token_ids: (0..tokens).map(|_| random.random_range(0..400)).collect(),
            logprobs: (0..tokens).filter(|_| has_logprobs).map(|_| any_logprobs(random)).collect(),
            ..Delta::default()
        }
    }

    /// What serde makes of one chunk.
    fn serialized(chunk: &Body<'_>) -> String {
        format!("data: {}\n\n", serde_json::to_string(chunk).unwrap())
    }

    /// The chunk of a delta as serde writes it; nothing if it would be empty.
    fn expected(head: &AnswerHead, delta: &Delta, shown: &mut Shown) -> String {
        shown.tokens += delta.token_ids.len();
        let token_ids = head.options.return_token_ids.then_some(&*delta.token_ids);
        if delta.text.is_empty() && delta.logprobs.is_empty() && token_ids.is_none() {
            return String::new();
        }
        let content = match head.endpoint {
            Endpoint::Chat => ChoiceContent::more(&delta.text),
            Endpoint::Completions => ChoiceContent::text(&delta.text),
        };
        let logprobs = head.logprobs(delta, Echoed::default(), shown.chars);
        shown.chars += logprobs.map_or(0, |logprobs| logprobs.chars());
        let usage = match (head.options.continuous_usage, head.options.include_usage) {
            (true, _) => Some(UsageField::so_far(head.prompt_tokens(), shown.tokens)),
            (_, true) => Some(UsageField::None),
            _ => None,
        };
        let choice = Choice { logprobs, token_ids, ..head.choice(delta.sample, content) };
        serialized(&Body { usage, ..head.body(true, vec![choice]) })
    }

    #[test]
    fn random_chunks_are_what_serde_writes() {
        let mut random = StdRng::seed_from_u64(1);
        let (mut plain, mut with_logprobs) = (0, 0);
        for round in 0..4_000 {
            let endpoint = [Endpoint::Chat, Endpoint::Completions][round % 2];
            let options = AnswerOptions {
                stream: true,
                include_usage: random.random(),
                continuous_usage: random.random_bool(0.2),
                return_token_ids: random.random_bool(0.2),
                ..AnswerOptions::default()
            };
            let head = AnswerHead {
                id: any_text(&mut random),
                model: any_text(&mut random),
                created: random.random(),
                samples: [1, 2, 128][random.random_range(0..3)],
                options,
                ..crate::openai::tests::head(endpoint)
            };
            let (mut chunks, mut shown) =
                (crate::openai::tests::chunks_of(head.clone()), vec![Shown::default(); head.samples as usize]);
            for _ in 0..6 {
                let delta = any_delta(head.samples, &mut random);
                let mut written = Vec::new();
                chunks.delta(&delta, &mut written).unwrap();
                let written = String::from_utf8(written).unwrap();
                assert_eq!(written, expected(&head, &delta, &mut shown[delta.sample as usize]), "{delta:?}");
                let Some(chunk) = written.strip_prefix("data: ") else { continue };
                // Not only as serde writes it: a client reads what was said.
                let choice = &serde_json::from_str::<Value>(chunk).unwrap()["choices"][0];
                let content = if endpoint == Endpoint::Chat { &choice["delta"]["content"] } else { &choice["text"] };
                assert_eq!((content, &choice["index"]), (&json!(delta.text), &json!(delta.sample)));
                plain += usize::from(chunks.plain.is_some() && delta.logprobs.is_empty());
                with_logprobs += usize::from(!delta.logprobs.is_empty());
            }
        }
        assert!(plain > 5_000 && with_logprobs > 2_000, "{plain} plain ones, {with_logprobs} with log-probabilities");
    }
}
