//! Log-probabilities in OpenAI's two formats, serialized directly from what the workers sent: only the text of one
//! token at a time is built.

use super::Endpoint;
use crate::output::Delta;
use baton_types::{PromptLogprob, TokenId};
use serde::ser::{Serialize, SerializeMap as _, SerializeSeq as _, SerializeStruct as _, Serializer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Bytes of a token; `None` where the model has no text.
pub(crate) type TextOfToken = Arc<dyn Fn(TokenId) -> Option<Vec<u8>> + Send + Sync>;

/// The lowest number that all JSON clients can parse, as OpenAI writes it; the true value may be minus infinity.
const LOGPROB_MIN: f32 = -9999.0;

/// All bits of a number: JSON readers use doubles.
fn number(logprob: f32) -> f64 {
    logprob.max(LOGPROB_MIN).into()
}

fn text(bytes: Option<&[u8]>, token: TokenId) -> String {
    bytes.map_or_else(|| format!("token_id:{token}"), |b| String::from_utf8_lossy(b).into_owned())
}

/// Tokens of a prompt before those of a choice.
#[derive(Clone, Copy, Default)]
pub(super) struct Echoed<'a> {
    /// The first token of the prompt, which has no log-probabilities.
    pub(super) first: Option<TokenId>,
    /// The tokens after it.
    pub(super) scored: &'a [PromptLogprob],
    /// How many alternatives are shown.
    pub(super) top: usize,
}

/// Log-probabilities of some tokens of one choice.
#[derive(Clone, Copy)]
pub(super) struct Logprobs<'a> {
    /// Which of the shapes.
    pub(super) endpoint: Endpoint,
    pub(super) delta: &'a Delta,
    /// Only completions have them.
    pub(super) echoed: Echoed<'a>,
    /// Gives the text of each token.
    pub(super) token_text: &'a TextOfToken,
    /// Characters of the choice before them.
    pub(super) offset: usize,
}

impl<'a> Logprobs<'a> {
    /// Tokens with their log-probabilities and those of their alternatives. The first token of a prompt has none.
    fn tokens(&self) -> impl Iterator<Item = (TokenId, Option<Of<'a>>)> {
        let Echoed { first, scored, top } = self.echoed;
        let scored = scored.iter().map(move |token| (token.token, Some(of(token, top))));
        let generated = self.delta.token_ids.iter().copied().zip(&self.delta.logprobs);
        let generated = generated.map(|(token, logprobs)| (token, Some((logprobs.chosen, &logprobs.top[..]))));
        first.into_iter().map(|token| (token, None)).chain(scored).chain(generated)
    }

    /// How many they are.
    pub(super) fn count(&self) -> usize {
        self.tokens().count()
    }

    fn text(&self, token: TokenId) -> String {
        text((self.token_text)(token).as_deref(), token)
    }

    /// Characters of all of them. Only completions report offsets.
    pub(super) fn chars(&self) -> usize {
        match self.endpoint {
            Endpoint::Chat => 0,
            Endpoint::Completions => self.tokens().map(|(token, _)| self.text(token).chars().count()).sum(),
        }
    }

    /// `{content: [{token, logprob, bytes, top_logprobs}], refusal}`.
    fn chat<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let entry = |(token, logprobs): (TokenId, Option<Of<'a>>)| {
            let (logprob, top) = logprobs?;
            Some(Entry { token, logprob, top: Some(top), token_text: self.token_text })
        };
        let mut fields = to.serialize_struct("logprobs", 2)?;
        fields.serialize_field("content", &List(|| self.tokens().filter_map(entry)))?;
        fields.serialize_field("refusal", &())?;
        fields.end()
    }

    /// `{tokens, token_logprobs, top_logprobs, text_offset}`; offsets count characters of the tokens' own texts.
    fn completion<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        // The token itself is among its alternatives, even if it is none of the best. Several tokens may have the
        // same text: the token itself counts, or else the last of them.
        let top = |(token, logprobs): (TokenId, Option<Of<'a>>)| -> Option<Map<String, Value>> {
            let (logprob, top) = logprobs?;
            let all = top.iter().copied().chain([(token, logprob)]);
            Some(all.map(|(t, p)| (self.text(t), json!(number(p)))).collect())
        };
        let chosen = |(_, logprobs): (TokenId, Option<Of<'a>>)| logprobs.map(|(logprob, _)| number(logprob));
        let offsets = || {
            self.tokens().scan(self.offset, |offset, (token, _)| {
                let chars = self.text(token).chars().count();
                Some(std::mem::replace(offset, *offset + chars))
            })
        };
        let mut fields = to.serialize_struct("logprobs", 4)?;
        fields.serialize_field("tokens", &List(|| self.tokens().map(|(token, _)| self.text(token))))?;
        fields.serialize_field("token_logprobs", &List(|| self.tokens().map(chosen)))?;
        fields.serialize_field("top_logprobs", &List(|| self.tokens().map(top)))?;
        fields.serialize_field("text_offset", &List(offsets))?;
        fields.end()
    }
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.endpoint {
            Endpoint::Chat => self.chat(to),
            Endpoint::Completions => self.completion(to),
        }
    }
}

/// The log-probability of a token, and its alternatives.
type Of<'a> = (f32, &'a [(TokenId, f32)]);

fn of(token: &PromptLogprob, top: usize) -> Of<'_> {
    let all = &token.logprobs.top;
    (token.logprobs.chosen, &all[..top.min(all.len())])
}

/// Log-probabilities of a prompt in vLLM's format: a list of its tokens, null for the first, then
/// `{token_id: {logprob, rank, decoded_token}}` of the token itself and of the most likely ones.
#[derive(Clone, Copy)]
pub(super) struct PromptScores<'a> {
    /// From the second token on.
    pub(super) scored: &'a [PromptLogprob],
    /// How many alternatives are shown.
    pub(super) top: usize,
    pub(super) token_text: &'a TextOfToken,
}

impl Serialize for PromptScores<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut list = to.serialize_seq(Some(1 + self.scored.len()))?;
        list.serialize_element(&())?;
        for token in self.scored {
            list.serialize_element(&Scored { token, top: self.top, token_text: self.token_text })?;
        }
        list.end()
    }
}

struct Scored<'a> {
    token: &'a PromptLogprob,
    top: usize,
    token_text: &'a TextOfToken,
}

impl Serialize for Scored<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(serde::Serialize)]
        struct Logprob {
            logprob: f64,
            rank: u32,
            decoded_token: String,
        }
        let entry = |token, logprob, rank| Logprob {
            logprob: number(logprob),
            rank,
            decoded_token: text((self.token_text)(token).as_deref(), token),
        };
        let (own, top) = of(self.token, self.top);
        let mut map = to.serialize_map(None)?;
        map.serialize_entry(&self.token.token, &entry(self.token.token, own, self.token.rank))?;
        for (rank, &(token, logprob)) in (1..).zip(top) {
            if token != self.token.token {
                map.serialize_entry(&token, &entry(token, logprob, rank))?;
            }
        }
        map.end()
    }
}

/// A list that is serialized without being built.
struct List<F>(F);

impl<I: Iterator<Item: Serialize>, F: Fn() -> I> Serialize for List<F> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq((self.0)())
    }
}

/// A token of a chat, chosen or one of the most likely.
struct Entry<'a> {
    token: TokenId,
    logprob: f32,
    /// The most likely alternatives of a chosen token.
    top: Option<&'a [(TokenId, f32)]>,
    token_text: &'a TextOfToken,
}

impl Serialize for Entry<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self { token, logprob, top, token_text } = *self;
        let bytes = token_text(token);
        let mut fields = to.serialize_struct("token", 3 + usize::from(top.is_some()))?;
        fields.serialize_field("token", &text(bytes.as_deref(), token))?;
        fields.serialize_field("logprob", &number(logprob))?;
        fields.serialize_field("bytes", &bytes)?;
        if let Some(top) = top {
            let entry = |&(token, logprob): &(TokenId, f32)| Entry { token, logprob, top: None, token_text };
            fields.serialize_field("top_logprobs", &List(|| top.iter().map(entry)))?;
        }
        fields.end()
    }
}
