//! What a request asks of the logits beyond its parameters: a bias of some tokens, and the tokens that it allows.

use super::SampleError;
use baton_types::TokenId;

/// Tokens of a word of a set.
pub(crate) const WORD: usize = u64::BITS as usize;

/// A set of tokens, one bit each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u64>,
}

impl FromIterator<TokenId> for TokenSet {
    fn from_iter<I: IntoIterator<Item = TokenId>>(tokens: I) -> Self {
        let mut words = Vec::new();
        for token in tokens {
            let word = token as usize / WORD;
            if words.len() <= word {
                words.resize(word + 1, 0);
            }
            words[word] |= 1 << (token % 64);
        }
        Self { words }
    }
}

impl TokenSet {
    /// Tokens as bits, 32 a word, the first in the lowest.
    pub fn from_words(words: &[u32]) -> Self {
        let word = |pair: &[u32]| u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32;
        Self { words: words.chunks(2).map(word).collect() }
    }

    /// Tokens of both sets.
    pub fn and(&self, other: &Self) -> Self {
        Self { words: self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect() }
    }

    /// Whether it has no token.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// All tokens of a vocabulary but these.
    pub fn all_but(vocab: usize, tokens: impl IntoIterator<Item = TokenId>) -> Self {
        let mut words = vec![u64::MAX; vocab.div_ceil(WORD)];
        if let (Some(last), rest @ 1..) = (words.last_mut(), vocab % WORD) {
            *last = (1 << rest) - 1;
        }
        for token in tokens {
            if let Some(word) = words.get_mut(token as usize / WORD) {
                *word &= !(1 << (token % 64));
            }
        }
        Self { words }
    }

    /// Whether it has this token.
    pub fn contains(&self, token: TokenId) -> bool {
        self.words.get(token as usize / 64).is_some_and(|word| word >> (token % 64) & 1 == 1)
    }

    /// Its largest token; `None` if it is empty.
    pub fn last(&self) -> Option<TokenId> {
        let at = self.words.iter().rposition(|word| *word != 0)?;
        Some((at * 64) as TokenId + 63 - self.words[at].leading_zeros())
    }
}

/// Bias, allowed and barred tokens of one draw.
#[derive(Clone, Copy, Debug, Default)]
pub struct Constraints<'a> {
    /// Added to the logits of these tokens, before the penalties; each token at most once.
    pub bias: &'a [(TokenId, f32)],
    /// Only tokens in both sets may be drawn; `None` is every token.
    pub allowed: [Option<&'a TokenSet>; 2],
    /// These tokens may not be drawn.
    pub barred: &'a [TokenId],
}

impl Constraints<'_> {
    /// Adds the bias. Results that overflow are clamped to the largest finite f32.
    pub(super) fn add_bias(&self, logits: &mut [f32]) {
        for &(token, bias) in self.bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = (*logit + bias).clamp(f32::MIN, f32::MAX);
            }
        }
    }

    /// Gives every other token the logit `-inf`, so the weight 0. `mask` does so to the logits whose bits are not set, as [`mask`] does.
    pub(super) fn keep_allowed(
        &self,
        logits: &mut [f32],
        mask: impl FnOnce(&mut [f32], AllowedWords<'_>),
    ) -> Result<(), SampleError> {
        let mut kept = logits.len();
        if self.allowed != [None, None] {
            let words = AllowedWords { sets: self.allowed, vocab: logits.len(), at: 0 };
            kept = words.clone().map(|word| word.count_ones() as usize).sum();
            mask(logits, words);
        }
        for token in self.barred {
            if let Some(logit) = logits.get_mut(*token as usize).filter(|logit| logit.is_finite()) {
                *logit = f32::NEG_INFINITY;
                kept -= 1;
            }
        }
        if kept == 0 { Err(SampleError::NothingAllowed) } else { Ok(()) }
    }
}

/// The tokens of a vocabulary that are in both sets, as bits, [`WORD`] at a time.
#[derive(Clone, Debug)]
pub(crate) struct AllowedWords<'a> {
    sets: [Option<&'a TokenSet>; 2],
    vocab: usize,
    at: usize,
}

impl Iterator for AllowedWords<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        let rest = self.vocab.checked_sub(self.at * WORD).filter(|rest| *rest > 0)?;
        // Bits behind the vocabulary count for nothing.
        let there = u64::MAX >> (WORD - rest.min(WORD));
        let word = |set: &&TokenSet| set.words.get(self.at).copied().unwrap_or(0);
        let allowed = self.sets.iter().flatten().map(word).fold(there, |all, word| all & word);
        self.at += 1;
        Some(allowed)
    }
}

/// Gives the logit `-inf` to tokens whose bits are not set.
pub(super) fn mask(logits: &mut [f32], words: AllowedWords<'_>) {
    for (logits, word) in logits.chunks_mut(WORD).zip(words) {
        mask_word(logits, word);
    }
}

/// As [`mask`], for the tokens of one word.
pub(crate) fn mask_word(logits: &mut [f32], word: u64) {
    for (bit, logit) in logits.iter_mut().enumerate() {
        if word >> bit & 1 == 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_32_bits_and_common_tokens() {
        for tokens in [&[][..], &[0], &[31, 32, 63], &[64, 95, 96, 200]] {
            let mut words = vec![0; 7];
            tokens.iter().for_each(|token| words[*token as usize / 32] |= 1_u32 << (token % 32));
            let set = TokenSet::from_words(&words);
            assert!((0..300).all(|token| set.contains(token) == tokens.contains(&token)));
            assert_eq!(set.is_empty(), tokens.is_empty());
            let both = set.and(&TokenSet::from_iter([32, 96, 250]));
            assert!((0..300).all(|t| both.contains(t) == (set.contains(t) && [32, 96, 250].contains(&t))));
        }
    }

    #[test]
    fn all_but_some_are_the_others() {
        for vocab in [1, 63, 64, 65, 130] {
            for without in [&[][..], &[0], &[62, 63, 64], &[129, 130, 5_000]] {
                let others: TokenSet = (0..vocab as TokenId).filter(|token| !without.contains(token)).collect();
                let set = TokenSet::all_but(vocab, without.iter().copied());
                assert!((0..6_000).all(|token| set.contains(token) == others.contains(token)), "{vocab} {without:?}");
                assert_eq!(set.last(), others.last());
            }
        }
    }
}
