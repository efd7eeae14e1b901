//! What is proposed for one sequence.

use super::ngrams::{Match, Ngrams};
use super::odds::Odds;
use baton_types::TokenId;

/// Proposals with a smaller chance get no row, however little rows cost: they gain little, and odds and costs have errors.
const CHANCE_MIN: f32 = 0.25;

/// The past of one sequence, where it repeats, and how often its proposals were right.
#[derive(Debug)]
pub(crate) struct Drafter {
    ngrams: Ngrams,
    odds: Odds,
    /// An earlier occurrence of the last tokens.
    source: Option<Match>,
    /// When the draft model proposed for it last, in the order of such events.
    drafted_at: u64,
}

impl Drafter {
    pub(super) fn new(len_max: usize, odds: Odds) -> Self {
        Self { ngrams: Ngrams::new(len_max), odds: odds.of_another(), source: None, drafted_at: 0 }
    }

    /// Compares the last of `tokens`, which was just sampled, with the proposal for it. `all` are the odds over all sequences.
    pub(super) fn sampled(&mut self, tokens: &[TokenId], all: &mut Odds) {
        let proposed = self.source.take().and_then(|source| Some((source, *tokens.get(source.next)?)));
        if let Some((source, proposed)) = proposed {
            let is_hit = tokens.last() == Some(&proposed);
            self.odds.add(source.matched, is_hit);
            all.add(source.matched, is_hit);
            self.source = is_hit.then(|| source.further());
        }
        let is_complete = self.ngrams.extend(tokens);
        if self.source.is_none() && is_complete {
            self.source = self.ngrams.find(tokens);
        }
    }

    /// The chances that the first 1, 2 … proposals are all accepted, at most `max`, after `unknown` tokens that are being sampled.
    pub(crate) fn chances(&self, unknown: usize, max: usize) -> Vec<f32> {
        let mut next = self.source;
        let mut chance = 1.0;
        let chances = std::iter::from_fn(|| {
            let source = next?;
            next = Some(source.further());
            chance *= self.odds.share(source.matched);
            Some(chance)
        });
        chances.skip(unknown).take(max).take_while(|chance| *chance >= CHANCE_MIN).collect()
    }

    /// The same for the first proposals of the draft model.
    pub(crate) fn chances_of_draft(&self, max: usize) -> Vec<f32> {
        let share = self.odds.share_of_draft();
        let chances = std::iter::successors(Some(share), |chance| Some(chance * share));
        chances.take(max).take_while(|chance| *chance >= CHANCE_MIN).collect()
    }

    /// See [`Odds::add_drafted`]. `at` is larger with each event of the engine.
    pub(super) fn drafted(&mut self, proposed: usize, accepted: usize, at: u64, all: &mut Odds) {
        self.odds.add_drafted(proposed, accepted);
        all.add_drafted(proposed, accepted);
        self.drafted_at = at;
    }

    /// When the draft model proposed for it last.
    pub(crate) fn drafted_at(&self) -> u64 {
        self.drafted_at
    }

    /// The next `count` tokens of `tokens`, the sequence, if it goes on as it did before. What has not been sampled yet repeats the
    /// proposals themselves: a loop goes on.
    pub(crate) fn draft(&self, tokens: &[TokenId], count: usize) -> Vec<TokenId> {
        let Some(source) = self.source else { return Vec::new() };
        let mut drafts = Vec::with_capacity(count);
        for at in source.next..source.next + count {
            drafts.push(if at < tokens.len() { tokens[at] } else { drafts[at - tokens.len()] });
        }
        drafts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A drafter that saw `prompt`, then `answer` token by token.
    fn after(prompt: &[TokenId], answer: &[TokenId]) -> (Drafter, Vec<TokenId>) {
        let (mut all, mut tokens) = (Odds::default(), prompt.to_vec());
        let mut drafter = Drafter::new(10_000, all.clone());
        for token in answer {
            tokens.push(*token);
            drafter.sampled(&tokens, &mut all);
        }
        (drafter, tokens)
    }

    #[test]
    fn what_followed_is_proposed() {
        let (drafter, tokens) = after(&[1, 2, 3, 4, 5, 6, 7], &[9, 2, 3]);
        assert_eq!(drafter.draft(&tokens, 4), [4, 5, 6, 7]);
        let (drafter, tokens) = after(&[1, 2, 3, 4, 5, 6, 7], &[9, 2, 3, 4, 5]);
        assert_eq!(drafter.draft(&tokens, 3), [6, 7, 9]);
        let (drafter, tokens) = after(&[1, 2, 3, 4, 5, 6, 7], &[9, 2, 3, 8]);
        assert_eq!(drafter.draft(&tokens, 3), [0; 0]);
        assert_eq!(drafter.chances(0, 3), [0.0; 0]);
    }

    #[test]
    fn a_loop_goes_on() {
        let (drafter, tokens) = after(&[7], &[1, 2, 3, 1, 2]);
        assert_eq!(drafter.draft(&tokens, 8), [3, 1, 2, 3, 1, 2, 3, 1]);
        let (drafter, tokens) = after(&[7], &[1, 1, 1]);
        assert_eq!(drafter.draft(&tokens, 4), [1, 1, 1, 1]);
    }

    #[test]
    fn chances_grow_with_what_is_followed_and_fall_with_misses() {
        let prompt: Vec<TokenId> = (0..40).collect();
        let (fresh, _) = after(&prompt, &[5, 6]);
        let (followed, _) = after(&prompt, &(5..25).collect::<Vec<_>>());
        assert!(followed.chances(0, 8)[7] > 0.3 && fresh.chances(0, 8).is_empty(), "{followed:?}");
        assert!(followed.chances(0, 8).is_sorted_by(|a, b| a >= b));
        assert_eq!(followed.chances(2, 3), followed.chances(0, 5)[2..]);
        // Pairs that are never followed further.
        let (missed, _) = after(&prompt, &[5, 6, 1, 9, 10, 1, 15, 16, 1, 20, 21, 1, 25, 26, 1, 30, 31]);
        assert!(missed.chances(0, 1).is_empty(), "{missed:?}");
    }
}
