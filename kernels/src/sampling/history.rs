//! Token counts for the penalties; they can be rebuilt from a sequence's tokens at any time.

use super::Adjusted;
use baton_types::{SamplingParams, TokenId};
use std::borrow::Cow;
use std::collections::HashMap;

/// Counts per token of one sequence. A step costs O(distinct tokens), not O(context), and nothing if no penalty is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    seen: HashMap<TokenId, u32>,
}

impl History {
    /// The history of a sequence whose first `prompt_len` tokens are prompt and whose others were generated.
    /// Equals [`History::default`] followed by [`History::push`] of the output when the prompt is empty.
    ///
    /// # Panics
    /// If `prompt_len` exceeds the number of tokens.
    pub fn rebuild(tokens: &[TokenId], prompt_len: usize) -> Self {
        let (prompt, output) = tokens.split_at(prompt_len);
        let mut history = Self { seen: prompt.iter().map(|&token| (token, 0)).collect() };
        output.iter().for_each(|&token| history.push(token));
        history
    }

    /// Adds a generated token.
    pub fn push(&mut self, token: TokenId) {
        *self.seen.entry(token).or_insert(0) += 1;
    }

    /// How often `token` was generated.
    pub fn generated(&self, token: TokenId) -> u32 {
        self.seen.get(&token).copied().unwrap_or(0)
    }

    /// Whether `token` occurs in prompt or output.
    pub fn contains(&self, token: TokenId) -> bool {
        self.seen.contains_key(&token)
    }

    /// Logits after penalties: first the repetition penalty on every token seen (positive logits divided, others multiplied;
    /// Keskar et al., CTRL, arXiv:1909.05858), then `frequency * count + presence` subtracted from every token generated
    /// (OpenAI's formula). Results that overflow are clamped to the largest finite f32.
    pub(super) fn adjust<'a>(&self, params: &SamplingParams, logits: &'a [f32]) -> Adjusted<'a> {
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = *params;
        if repetition_penalty == 1.0 && presence_penalty == 0.0 && frequency_penalty == 0.0 {
            return Cow::Borrowed(logits);
        }
        let mut adjusted = logits.to_vec();
        // Each token is adjusted independently, so the map's order does not matter.
        for (&token, &count) in &self.seen {
            let Some(logit) = adjusted.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            if count > 0 {
                *logit -= frequency_penalty * count as f32 + presence_penalty;
            }
            *logit = logit.clamp(f32::MIN, f32::MAX);
        }
        Cow::Owned(adjusted)
    }
}
