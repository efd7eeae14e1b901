//! Words that an answer does not have, as sequences of tokens: a word is barred at its last token, where the answer ends in the others.

use baton_types::TokenId;

/// The end of an answer, as far as words look at it. It can be rebuilt from the answer at any time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words {
    tail: Vec<TokenId>,
    /// Tokens of the longest word, but for its last one.
    tail_max: usize,
}

impl Words {
    /// For these words, behind the tokens that were generated.
    pub fn rebuild(words: &[Vec<TokenId>], generated: &[TokenId]) -> Self {
        let tail_max = words.iter().map(Vec::len).max().unwrap_or(0).saturating_sub(1);
        let mut tail = Vec::with_capacity(tail_max);
        tail.extend_from_slice(&generated[generated.len().saturating_sub(tail_max)..]);
        Self { tail, tail_max }
    }

    /// Adds a generated token.
    pub fn push(&mut self, token: TokenId) {
        if self.tail_max == 0 {
            return;
        }
        if self.tail.len() == self.tail_max {
            self.tail.remove(0);
        }
        self.tail.push(token);
    }

    /// The last tokens of the words that the next token would complete. `words` are those that it was made for.
    pub fn barred<'a>(&'a self, words: &'a [Vec<TokenId>]) -> impl Iterator<Item = TokenId> + 'a {
        let ends = |word: &'a Vec<TokenId>| word.split_last().filter(|(_, others)| self.tail.ends_with(others));
        words.iter().filter_map(ends).map(|(last, _)| *last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_barred_at_its_last_token() {
        let words = [vec![5], vec![1, 2], vec![1, 1, 3], vec![7, 8, 9, 4]];
        let answer = [9, 1, 1, 1, 2, 7, 8, 9, 9, 7, 8, 9];
        let brute = |answer: &[TokenId]| -> Vec<TokenId> {
            let completes = |word: &&Vec<TokenId>| [answer, &word[word.len() - 1..]].concat().ends_with(word);
            words.iter().filter(completes).map(|word| word[word.len() - 1]).collect()
        };
        let mut pushed = Words::rebuild(&words, &[]);
        let mut seen = Vec::new();
        for len in 0..=answer.len() {
            let barred: Vec<TokenId> = pushed.barred(&words).collect();
            assert_eq!(barred, brute(&answer[..len]), "after {len}");
            assert_eq!(pushed, Words::rebuild(&words, &answer[..len]), "what was pushed is what is rebuilt");
            seen.extend(barred);
            answer.get(len).into_iter().for_each(|token| pushed.push(*token));
        }
        assert!([5, 2, 3, 4].iter().all(|token| seen.contains(token)));
        assert_eq!(Words::rebuild(&[], &answer).barred(&[]).count(), 0);
    }
}
