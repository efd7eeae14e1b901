//! Token counts for the penalties; they can be rebuilt from a sequence's tokens at any time.

use baton_types::{SamplingParams, TokenId};
use std::collections::HashMap;

/// Most generated tokens for which [`History::reserve`] takes memory.
const RESERVED_MAX: usize = 4096;

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

    /// Takes memory for so many more tokens, up to a limit, so that adding them takes none.
    pub fn reserve(&mut self, tokens: usize) {
        self.seen.reserve(tokens.min(RESERVED_MAX));
    }

    /// Whether any penalty is set: without, a draw needs no history.
    pub fn is_needed(params: &SamplingParams) -> bool {
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = *params;
        repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0
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

    /// Applies the penalties: first the repetition penalty on every token seen (positive logits divided, others multiplied;
    /// Keskar et al., CTRL, arXiv:1909.05858), then `frequency * count + presence` subtracted from every token generated
    /// (OpenAI's formula). Results that overflow are clamped to the largest finite f32. Touches only the tokens seen.
    pub(super) fn penalize(&self, params: &SamplingParams, logits: &mut [f32]) {
        if !Self::is_needed(params) {
            return;
        }
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = *params;
        // Each token is adjusted independently, so the map's order does not matter.
        for (&token, &count) in &self.seen {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            if count > 0 {
                *logit -= frequency_penalty * count as f32 + presence_penalty;
            }
            *logit = logit.clamp(f32::MIN, f32::MAX);
        }
    }
}
