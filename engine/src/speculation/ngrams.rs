//! Where the last tokens of a sequence occurred before.

use baton_types::TokenId;

/// Suffixes of so many tokens are looked up, the longest first.
const LENGTHS: std::ops::RangeInclusive<usize> = 2..=4;
/// Longer matches are counted as this long.
const MATCHED_MAX: usize = 16;
/// Most places of an index, 512 KiB. Where a sequence has more n-grams, later ones replace earlier ones.
const PLACES_MAX: usize = 1 << 17;
/// Places for each n-gram: few are lost to another one with the same place.
const PLACES: usize = 2;
/// Tokens that are indexed at once: a prompt is taken in over several steps, each of which it delays by less than 0.1 ms.
const INDEXED_AT_ONCE: usize = 2048;

/// An earlier occurrence of the last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Match {
    /// Index of the token that followed there.
    pub(super) next: usize,
    /// How many of the last tokens are the same, up to [`MATCHED_MAX`].
    pub(super) matched: usize,
}

impl Match {
    /// The same occurrence, if the next token is the one that followed.
    pub(super) fn further(self) -> Self {
        Self { next: self.next + 1, matched: (self.matched + 1).min(MATCHED_MAX) }
    }
}

/// An index of the n-grams of one sequence.
#[derive(Debug)]
pub(super) struct Ngrams {
    /// By the hash of an n-gram: the index of the token that followed its last occurrence; 0 is none. Other n-grams may have the place.
    followers: Vec<u32>,
    /// Tokens below this index are in the index as followers.
    indexed: usize,
}

impl Ngrams {
    /// For a sequence that may become so many tokens long.
    pub(super) fn new(len_max: usize) -> Self {
        let places = len_max.saturating_mul(PLACES * LENGTHS.count()).min(PLACES_MAX);
        Self { followers: vec![0; places.next_power_of_two()], indexed: 0 }
    }

    /// Takes in more of the sequence's tokens; returns whether all of them are known now.
    pub(super) fn extend(&mut self, tokens: &[TokenId]) -> bool {
        let end = tokens.len().min(self.indexed + INDEXED_AT_ONCE);
        for follower in self.indexed..end {
            for n in LENGTHS.take_while(|n| *n <= follower) {
                let place = self.place(&tokens[follower - n..follower]);
                self.followers[place] = follower as u32;
            }
        }
        self.indexed = end;
        end == tokens.len()
    }

    /// The last earlier occurrence of the longest known suffix.
    pub(super) fn find(&self, tokens: &[TokenId]) -> Option<Match> {
        LENGTHS.rev().filter(|n| *n < tokens.len()).find_map(|n| {
            let suffix = &tokens[tokens.len() - n..];
            let next = self.followers[self.place(suffix)] as usize;
            // Another n-gram may have its place.
            let is_same = next >= n && next < tokens.len() && tokens[next - n..next] == *suffix;
            is_same.then(|| {
                let before = tokens[..next].iter().rev().zip(tokens.iter().rev());
                Match { next, matched: before.take(MATCHED_MAX).take_while(|(a, b)| a == b).count() }
            })
        })
    }

    fn place(&self, ngram: &[TokenId]) -> usize {
        // The upper bits of a multiplicative hash (Fibonacci hashing, Knuth, TAOCP vol. 3, 6.4).
        let hash = ngram.iter().fold(ngram.len() as u64, |hash, token| {
            (hash.rotate_left(23) ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        (hash >> 32) as usize & (self.followers.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(tokens: &[TokenId]) -> Option<Match> {
        let mut ngrams = Ngrams::new(10_000);
        while !ngrams.extend(tokens) {}
        ngrams.find(tokens)
    }

    #[test]
    fn the_longest_suffix_is_found_where_it_was_last() {
        let found = |next, matched| Some(Match { next, matched });
        assert_eq!(find(&[]), None);
        assert_eq!(find(&[5, 5]), None, "one token is not enough");
        assert_eq!(find(&[5, 5, 5]), found(2, 2));
        assert_eq!(find(&[1, 2, 3, 4, 9, 1, 2]), found(2, 2));
        // The last of two occurrences.
        assert_eq!(find(&[1, 2, 3, 1, 2, 4, 1, 2]), found(5, 2));
        // An earlier occurrence of a longer suffix is preferred to a later one of a shorter.
        assert_eq!(find(&[7, 8, 1, 2, 3, 6, 1, 2, 4, 8, 1, 2]), found(4, 3));
        // What matches before the n-gram counts too.
        assert_eq!(find(&[1, 2, 3, 4, 5, 6, 9, 0, 1, 2, 3, 4, 5, 6]), found(6, 6));
        assert_eq!(find(&[1, 2, 3, 4, 5]), None);
    }

    #[test]
    fn an_index_that_grows_by_one_token_is_that_of_the_whole() {
        let tokens: Vec<TokenId> = (0..3_000u32).map(|i| (i * i + i / 7) % 23).collect();
        let mut grown = Ngrams::new(tokens.len());
        for len in 1..=tokens.len() {
            assert!(grown.extend(&tokens[..len]));
            if len % 97 == 0 {
                assert_eq!(grown.find(&tokens[..len]), {
                    let mut whole = Ngrams::new(tokens.len());
                    while !whole.extend(&tokens[..len]) {}
                    whole.find(&tokens[..len])
                });
            }
        }
    }

    /// Every match is one, however many n-grams share a place.
    #[test]
    fn a_full_index_forgets_and_does_not_err() {
        let tokens: Vec<TokenId> = (0..400u32).map(|i| (i * 7919) % 61 % 13).collect();
        let mut small = Ngrams { followers: vec![0; 8], indexed: 0 };
        let mut matches = 0;
        for len in 1..=tokens.len() {
            small.extend(&tokens[..len]);
            if let Some(Match { next, matched }) = small.find(&tokens[..len]) {
                assert!(next < len && matched >= 2);
                assert_eq!(tokens[next - matched..next], tokens[len - matched..len]);
                matches += 1;
            }
        }
        assert!(matches > 20);
    }

    #[test]
    fn memory_is_bounded_and_a_long_prompt_is_taken_in_step_by_step() {
        assert_eq!(Ngrams::new(usize::MAX).followers.len(), PLACES_MAX);
        let tokens = vec![1; 2 * INDEXED_AT_ONCE + 1];
        let mut ngrams = Ngrams::new(tokens.len());
        assert_eq!([(); 4].map(|()| ngrams.extend(&tokens)), [false, false, true, true]);
    }
}
