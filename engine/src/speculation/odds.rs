//! How often the token that is proposed next is the one that is sampled: by prompt lookup, by how many tokens match before it; and by the
//! draft model.

/// Where the classes of matches begin, in matching tokens: a text that has been followed for long is likely to be followed further.
const CLASSES: [usize; 3] = [2, 4, 8];
/// Shares to begin with, before anything was sampled. Low: a share that is too low costs a few tokens of speculation, one that is too high
/// costs rows.
const FIRST: [f32; 3] = [0.2, 0.5, 0.8];
/// The same for a draft model.
const FIRST_OF_DRAFT: f32 = 0.6;
/// What is known before counts as so many tokens.
const KNOWN: f32 = 3.0;
/// About as many of the last tokens matter.
const MEMORY: f32 = 32.0;

/// Shares of hits.
#[derive(Clone, Debug)]
pub(super) struct Odds {
    classes: [Share; CLASSES.len()],
    /// Of the draft model.
    draft: Share,
}

#[derive(Clone, Copy, Debug)]
struct Share {
    hits: f32,
    /// Tokens that it was measured with, up to [`MEMORY`].
    tokens: f32,
}

impl Share {
    /// What is known before anything was sampled.
    fn first(hits: f32) -> Self {
        Self { hits, tokens: KNOWN }
    }

    fn add(&mut self, is_hit: bool) {
        let Self { hits, tokens } = self;
        *tokens = (*tokens + 1.0).min(MEMORY);
        *hits += (f32::from(u8::from(is_hit)) - *hits) / *tokens;
    }
}

impl Default for Odds {
    fn default() -> Self {
        Self { classes: FIRST.map(Share::first), draft: Share::first(FIRST_OF_DRAFT) }
    }
}

fn class(matched: usize) -> usize {
    CLASSES.iter().rposition(|first| *first <= matched).unwrap_or(0)
}

impl Odds {
    /// The same shares, as known before.
    pub(super) fn of_another(&self) -> Self {
        let of_another = |share: Share| Share::first(share.hits);
        Self { classes: self.classes.map(of_another), draft: of_another(self.draft) }
    }

    /// Whether the proposal after `matched` matching tokens was sampled.
    pub(super) fn add(&mut self, matched: usize, is_hit: bool) {
        self.classes[class(matched)].add(is_hit);
    }

    /// Of `proposed` tokens of the draft model, the first `accepted` were sampled. Nothing is known of those behind the first that was not.
    pub(super) fn add_drafted(&mut self, proposed: usize, accepted: usize) {
        (0..accepted).for_each(|_| self.draft.add(true));
        if accepted < proposed {
            self.draft.add(false);
        }
    }

    /// The share of hits after `matched` matching tokens.
    pub(super) fn share(&self, matched: usize) -> f32 {
        self.classes[class(matched)].hits
    }

    /// The share of hits of the draft model, where all its tokens before were hits.
    pub(super) fn share_of_draft(&self) -> f32 {
        self.draft.hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_what_is_sampled_by_class() {
        let mut odds = Odds::default();
        let first = odds.share(2);
        (0..200).for_each(|i| odds.add(9, i % 10 > 0));
        (0..200).for_each(|i| odds.add(5, i % 4 == 0));
        assert!((odds.share(8) - 0.9).abs() < 0.06 && odds.share(8) == odds.share(16), "{odds:?}");
        assert!((odds.share(4) - 0.25).abs() < 0.06, "{odds:?}");
        assert_eq!(odds.share(3), first, "nothing was sampled after so short a match");
    }

    #[test]
    fn the_draft_model_is_known_by_its_first_miss() {
        let mut odds = Odds::default();
        // Of five proposals each time, two are right: 2 hits and a miss, whatever the others would have been.
        (0..100).for_each(|_| odds.add_drafted(5, 2));
        assert!((odds.share_of_draft() - 2.0 / 3.0).abs() < 0.05, "{odds:?}");
        (0..100).for_each(|_| odds.add_drafted(4, 4));
        assert!(odds.share_of_draft() > 0.95, "{odds:?}");
        assert_eq!(odds.share(4), FIRST[1]);
    }

    #[test]
    fn a_new_sequence_learns_faster_than_all() {
        let mut all = Odds::default();
        (0..100).for_each(|_| all.add(4, true));
        let mut one = all.of_another();
        assert_eq!(one.share(4), all.share(4));
        for odds in [&mut all, &mut one] {
            (0..3).for_each(|_| odds.add(4, false));
        }
        assert!(one.share(4) < 0.55 && all.share(4) > 0.85, "{one:?}, {all:?}");
    }
}
