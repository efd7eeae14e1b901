//! Proposed tokens: which sequences have some, from where, and how many rows a step spends on them.

use super::Runner;
use super::sequence::Sequence;
use crate::draft_model::DraftRunner;
use crate::scheduler::{Decisions, Segment};
use crate::speculation::{Choice, DraftOption, Options, Proposer, Speculation};
use crate::step_model::StepModel;

/// What the draft model has to catch up pays off over so many tokens of an answer.
const CATCH_UP_OVER: usize = 64;

impl Sequence {
    /// The last of its tokens was just sampled, and it goes on.
    pub(super) fn note(&mut self, speculation: &mut Speculation, len_max: usize) {
        if !self.may_speculate() {
            return;
        }
        let len_max = len_max.min(self.request.prompt_len + self.request.sampling.max_tokens as usize);
        let drafter = self.drafter.get_or_insert_with(|| speculation.drafter(len_max));
        speculation.sampled(drafter, &self.request.tokens);
    }

    /// The masks of a grammar follow from the tokens before, which proposals are not; an observed sequence ends with its first token.
    fn may_speculate(&self) -> bool {
        self.request.sampling.grammar.is_none() && self.observer.is_none()
    }

    /// Tokens that it may still have here.
    fn tokens_left(&self, len_max: usize) -> usize {
        let len = self.request.tokens.len() + self.launched_tokens;
        let answer = len - self.request.prompt_len;
        (self.request.sampling.max_tokens as usize).saturating_sub(answer).min(len_max.saturating_sub(len))
    }

    /// Most proposals that it may have: the tokens that they and the row before them sample fit into its length and its sink, and either all
    /// or none come before its `min_tokens`, as only all or no rows of a step have masks.
    fn proposals_max(&self, drafts_max: usize, len_max: usize) -> usize {
        let mut tokens = self.tokens_left(len_max);
        let answer = self.request.tokens.len() + self.launched_tokens - self.request.prompt_len;
        let min_tokens = self.request.sampling.min_tokens as usize;
        if answer < min_tokens {
            tokens = tokens.min(min_tokens - answer);
        }
        let mut proposals = drafts_max.min(tokens.saturating_sub(1));
        // A sink that is not read fills up; the end needs room too.
        while proposals > 0 && !self.sink.has_room(2 + self.launched_tokens + proposals) {
            proposals -= 1;
        }
        proposals
    }

    /// What may be proposed for it.
    fn options(&self, segment: &Segment, draft: Option<&DraftRunner>, drafts_max: usize, len_max: usize) -> Options {
        let Some(drafter) = &self.drafter else { return Options::default() };
        let max = self.proposals_max(drafts_max, len_max);
        let len = self.request.tokens.len() + self.launched_tokens;
        // The draft model's last proposal has no row there.
        let draft = draft.filter(|draft| max > 0 && draft.has_room(segment.key, len + max - 1)).map(|draft| {
            let behind = draft.behind(segment.key, &self.request.tokens) + self.launched_tokens;
            let over = self.tokens_left(len_max).clamp(1, CATCH_UP_OVER);
            DraftOption {
                chances: drafter.chances_of_draft(max),
                rows: 1.0 + behind.saturating_sub(1) as f64 / over as f64,
                at: drafter.drafted_at(),
            }
        });
        Options { ngrams: drafter.chances(self.launched_tokens, max), draft }
    }

    /// Proposes so many tokens by prompt lookup.
    fn look_up(&mut self, count: usize) {
        self.proposer = Proposer::Ngrams;
        self.drafts = match &self.drafter {
            Some(drafter) if count > 0 => drafter.draft(&self.request.tokens, count),
            _ => Vec::new(),
        };
    }
}

impl<M: StepModel> Runner<M> {
    /// Whether the next step is not launched yet, although the device could take it: proposals of a launched step decide what it computes,
    /// or it will have proposals, for which the tokens of the launched one must be known.
    pub(super) fn awaits_tokens(&self) -> bool {
        let Some(launched) = self.steps.back() else { return false };
        let proposes = || {
            let batch = launched.decoding().unwrap_or_default();
            self.choose(batch).is_some_and(|choice| choice.shares.iter().any(|share| share.count > 0))
        };
        launched.has_drafts() || proposes()
    }

    /// Adds proposals to a plan. A step with prefill has none: its rows are those that others wait for. Likewise one in which a state takes
    /// in tokens again.
    pub(super) fn propose(&mut self, decisions: &mut Decisions) {
        let only_single_rows =
            decisions.batch.iter().all(|segment| segment.decode && segment.samples && segment.rows == 1);
        if !only_single_rows || decisions.starved || !self.steps.is_empty() {
            return;
        }
        let Some(choice) = self.choose(&decisions.batch) else { return };
        let proposed = decisions.batch.iter_mut().zip(&choice.shares).filter(|(_, share)| share.count > 0);
        for (segment, share) in proposed.filter(|(_, share)| share.proposer == Proposer::Ngrams) {
            self.scheduler.propose(segment, share.count);
            if let Some(sequence) = self.sequences.get_mut(&segment.key) {
                sequence.look_up(segment.drafts);
            }
        }
        self.draft(&mut decisions.batch, &choice);
    }

    /// What to propose for each sequence of a batch; `None` if there is no speculation.
    fn choose(&self, batch: &[Segment]) -> Option<Choice> {
        let speculation = self.speculation.as_ref()?;
        let (len_max, drafts_max) = (self.shared.len_max(), speculation.drafts_max());
        let options = |segment: &Segment| {
            let sequence = self.sequences.get(&segment.key);
            sequence.map(|of| of.options(segment, self.draft.as_ref(), drafts_max, len_max)).unwrap_or_default()
        };
        let options: Vec<_> = batch.iter().map(options).collect();
        Some(speculation.choose(&options))
    }
}
