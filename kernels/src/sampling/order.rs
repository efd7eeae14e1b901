//! The order of tokens: higher logit first, equal logits by lower id.

use baton_types::TokenId;

/// The most likely token; ties go to the lowest id. `logits` must not be empty.
pub(super) fn most_likely(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as TokenId
}

/// An integer that orders like a number: negative ones have all bits flipped, others only the sign.
pub(crate) fn ordered(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits(); // -0.0 + 0.0 is 0.0: both zeros tie
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// A number that orders like (logit, then lower id). No two keys are equal.
pub(crate) fn key(logit: f32, token: TokenId) -> u64 {
    u64::from(ordered(logit)) << 32 | u64::from(!token)
}

/// Keys of a vocabulary, by token.
pub(super) fn keys(logits: &[f32]) -> Vec<u64> {
    logits.iter().enumerate().map(|(token, &logit)| key(logit, token as TokenId)).collect()
}

/// Bits of a radix digit, from the top of a key.
const DIGIT: u32 = 8;

/// The smallest of the largest keys whose shares together reach `enough`, at least 1; 0 if all do not. A radix selection: each pass sums the shares of
/// each digit, and goes on with the keys of the digit at which they reach it. As keys differ, one is left after the last pass.
pub(super) fn least_of_largest(keys: &[u64], share: impl Fn(usize) -> u64, enough: u64) -> u64 {
    let (mut reached, mut candidates) = (0, Vec::new());
    for pass in 0..u64::BITS / DIGIT {
        let digit = |key: u64| (key >> (u64::BITS - DIGIT * (pass + 1))) as usize & ((1 << DIGIT) - 1);
        let mut sums = [0; 1 << DIGIT];
        if pass == 0 {
            keys.iter().enumerate().for_each(|(token, &key)| sums[digit(key)] += share(token));
        } else {
            candidates.iter().for_each(|&token: &usize| sums[digit(keys[token])] += share(token));
        }
        let mut next = sums.len();
        while next > 0 && reached < enough {
            next -= 1;
            reached += sums[next];
        }
        if reached < enough {
            return 0;
        }
        // The sum without this digit; its keys are looked at more closely.
        reached -= sums[next];
        if pass == 0 {
            candidates = (0..keys.len()).filter(|&token| digit(keys[token]) == next).collect();
        } else {
            candidates.retain(|&token| digit(keys[token]) == next);
        }
        if let [last] = candidates[..] {
            return keys[last];
        }
    }
    unreachable!("keys differ")
}

/// The `n` most likely tokens, most likely first.
pub(crate) fn top(logits: &[f32], n: usize) -> Vec<TokenId> {
    if n == 0 {
        return Vec::new();
    }
    let keys = keys(logits);
    let least = if n < keys.len() { least_of_largest(&keys, |_| 1, n as u64) } else { 0 };
    let mut top: Vec<u64> = keys.into_iter().filter(|key| *key >= least).collect();
    top.sort_unstable_by(|a, b| b.cmp(a));
    top.into_iter().map(|key| !(key as u32)).collect()
}
