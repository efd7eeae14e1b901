//! The order of tokens: higher logit first, equal logits by lower id.

use baton_types::TokenId;

/// The most likely token; ties go to the lowest id. `logits` must be finite and not empty.
pub(super) fn most_likely(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as TokenId
}

/// Tokens in descending order, sorted only as far as needed: a top-p of ten tokens does not sort a vocabulary of a hundred thousand.
pub(super) struct Descending {
    /// Keys; the first `sorted` are the largest, in descending order.
    keys: Vec<u64>,
    sorted: usize,
}

impl Descending {
    /// All tokens of a vocabulary.
    pub(super) fn new(logits: &[f32]) -> Self {
        Self {
            keys: logits.iter().enumerate().map(|(token, &logit)| key(logit, token as TokenId)).collect(),
            sorted: 0,
        }
    }

    /// The `rank`-th most likely token, counted from 0; `None` past the end.
    pub(super) fn get(&mut self, rank: usize) -> Option<TokenId> {
        if rank >= self.sorted {
            self.sort_to(rank + 1);
        }
        self.keys.get(rank).map(|&key| !(key as u32))
    }

    /// The `n` most likely tokens, most likely first.
    pub(super) fn top(mut self, n: usize) -> Vec<TokenId> {
        self.sort_to(n);
        self.keys.iter().take(n).map(|&key| !(key as u32)).collect()
    }

    /// Sorts at least the first `n`. Grows at least fourfold, so that reading the whole order stays O(n log n).
    fn sort_to(&mut self, n: usize) {
        let end = n.max(4 * self.sorted).max(32).min(self.keys.len());
        if end <= self.sorted {
            return;
        }
        let rest = &mut self.keys[self.sorted..];
        let chunk = end - self.sorted;
        if chunk < rest.len() {
            rest.select_nth_unstable_by(chunk - 1, |a, b| b.cmp(a));
        }
        rest[..chunk].sort_unstable_by(|a, b| b.cmp(a));
        self.sorted = end;
    }
}

/// A number that orders like (logit, then lower id). The upper half maps the bits of a finite f32 to an order-preserving
/// integer: negative numbers have all bits flipped, others only the sign. No two keys are equal, so any sort gives the same result.
fn key(logit: f32, token: TokenId) -> u64 {
    let bits = (logit + 0.0).to_bits(); // -0.0 + 0.0 is 0.0: both zeros tie
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!token)
}
