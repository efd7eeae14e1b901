//! Speculation: tokens that a sequence will probably sample are computed as further rows of its next step. The device samples each row
//! with the sampler's randomness of its position and accepts a proposal only if it equals what was sampled, so the answer is the same bit
//! for bit ([`baton_kernels::step::SlotRows::samples`]).
//!
//! - `Ngrams` finds where the last tokens of a sequence occurred before: what followed there is proposed.
//! - Each sampled token is compared with the proposal for it, whether or not a row was spent on it. So the odds of a sequence
//!   (`odds`) are known before any row is spent.
//! - A draft model ([`crate::DraftModel`]) proposes what it samples greedily itself. Its odds are known from the rows that it got.
//! - `StepCost` is the measured time of a step by its rows, of the model and of the draft model.
//! - `choice` spends rows where odds and costs make the batch faster, and no sequence slower.
//! - `probes` has the draft model propose now and then where that does not pay, so that a change is seen.
//!
//! Pure: durations and tokens in, numbers of rows out.

mod choice;
mod cost;
mod drafter;
mod ngrams;
mod odds;
mod probes;

pub(crate) use choice::{DraftOption, Options, Proposer, Share};
pub(crate) use drafter::Drafter;

use choice::Costs;
use cost::StepCost;
use odds::Odds;
use probes::Probes;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How tokens are proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpeculationMethod {
    /// They are not.
    Off,
    /// What followed the last tokens where they occurred before, in prompt or answer (prompt lookup); and by the draft model, where there is
    /// one.
    Ngram,
}

/// Bounds of speculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpeculationConfig {
    /// How tokens are proposed.
    pub method: SpeculationMethod,
    /// Most proposed tokens of one sequence in one step.
    pub tokens_max: usize,
    /// Times of steps in place of those measured, so that proposals do not depend on the machine: for tests.
    pub step_time: Option<StepTime>,
    /// The same of the draft model.
    pub draft_step_time: Option<StepTime>,
}

/// How long steps take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTime {
    /// One of a single row.
    pub first: Duration,
    /// Each further row.
    pub row: Duration,
}

impl StepTime {
    fn of(self, rows: usize) -> Duration {
        self.first + self.row * u32::try_from(rows.saturating_sub(1)).unwrap_or(u32::MAX)
    }
}

impl SpeculationConfig {
    /// Without proposals.
    pub const OFF: Self =
        Self { method: SpeculationMethod::Off, tokens_max: 1, step_time: None, draft_step_time: None };

    /// Most that [`SpeculationConfig::tokens_max`] may be: further proposals are hardly ever accepted, and a step's blocks grow with them.
    pub const TOKENS_MAX: usize = 16;

    /// Most proposed tokens of one sequence in one step; 0 where it is off.
    pub fn drafts_max(&self) -> usize {
        if self.method == SpeculationMethod::Off { 0 } else { self.tokens_max }
    }
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        Self { method: SpeculationMethod::Ngram, tokens_max: 8, step_time: None, draft_step_time: None }
    }
}

/// What an engine knows of the use of speculation.
#[derive(Debug)]
pub(crate) struct Speculation {
    drafts_max: usize,
    /// Most rows of a step, all of which sample.
    rows_max: usize,
    cost: StepCost,
    step_time: Option<StepTime>,
    /// Of steps of the draft model.
    draft_cost: StepCost,
    draft_step_time: Option<StepTime>,
    probes: Probes,
    /// Over all sequences: what a new one begins with.
    odds: Odds,
    /// How often the draft model proposed for a sequence.
    drafted: u64,
    counts: ProposalCounts,
    draft_counts: ProposalCounts,
}

/// The proposals of a step.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// For each sequence of the batch.
    pub(crate) shares: Vec<Share>,
    /// Whether the one of the draft model does not pay, as far as is known.
    pub(crate) is_probe: bool,
}

impl Speculation {
    /// `None` if it is off. Steps have at most `rows_max` rows that sample.
    pub(crate) fn new(config: &SpeculationConfig, rows_max: usize) -> Option<Self> {
        let drafts_max = config.drafts_max();
        let SpeculationConfig { step_time, draft_step_time, .. } = *config;
        (drafts_max > 0).then(|| Self {
            drafts_max,
            rows_max,
            cost: StepCost::default(),
            step_time,
            draft_cost: StepCost::default(),
            draft_step_time,
            probes: Probes::default(),
            odds: Odds::default(),
            drafted: 0,
            counts: ProposalCounts::default(),
            draft_counts: ProposalCounts::default(),
        })
    }

    /// The drafter of a new sequence that may become so many tokens long.
    pub(crate) fn drafter(&self, len_max: usize) -> Drafter {
        Drafter::new(len_max, self.odds.clone())
    }

    /// The last of a sequence's tokens was just sampled.
    pub(crate) fn sampled(&mut self, drafter: &mut Drafter, tokens: &[baton_types::TokenId]) {
        drafter.sampled(tokens, &mut self.odds);
    }

    /// Of a sequence's proposals by the draft model, the first `accepted` were sampled.
    pub(crate) fn drafted(&mut self, drafter: &mut Drafter, proposed: usize, accepted: usize) {
        self.drafted += 1;
        drafter.drafted(proposed, accepted, self.drafted, &mut self.odds);
    }

    /// Most proposals of one sequence.
    pub(crate) fn drafts_max(&self) -> usize {
        self.drafts_max
    }

    /// A step of so many decode rows, proposals included, and no other rows, took this long.
    pub(crate) fn took(&mut self, rows: usize, elapsed: Duration) {
        let elapsed = self.step_time.map_or(elapsed, |time| time.of(rows));
        self.cost.add(rows, elapsed);
        self.probes.decoded(elapsed);
    }

    /// So did a step of the draft model. `catches_up`: most of its rows only take in tokens, so it tells little of proposals.
    pub(crate) fn draft_took(&mut self, rows: usize, catches_up: bool, is_probe: bool, elapsed: Duration) {
        let elapsed = self.draft_step_time.map_or(elapsed, |time| time.of(rows));
        if !catches_up {
            self.draft_cost.add(rows, elapsed);
        }
        if is_probe {
            self.probes.spent(elapsed);
        }
    }

    /// What to propose for each sequence of a batch.
    pub(crate) fn choose(&self, options: &[Options]) -> Choice {
        let costs = Costs { model: &self.cost, draft: &self.draft_cost };
        let mut shares = choice::choose(options, self.rows_max, costs);
        let probe = self.probe(options, &shares);
        if let Some(probe) = probe {
            shares[probe] = Share { proposer: Proposer::Draft, count: 1 };
        }
        Choice { shares, is_probe: probe.is_some() }
    }

    /// The sequence for which the draft model proposes a token although that does not pay: the one with its oldest odds.
    fn probe(&self, options: &[Options], shares: &[Share]) -> Option<usize> {
        let rows = shares.len() + shares.iter().map(|share| share.count).sum::<usize>();
        let is_drafted = shares.iter().any(|share| share.proposer == Proposer::Draft && share.count > 0);
        let is_measured = self.cost.seconds(1).is_some();
        if is_drafted || !is_measured || !self.probes.is_due() || rows >= self.rows_max {
            return None;
        }
        let free = options.iter().zip(shares).enumerate().filter(|(_, (_, share))| share.count == 0);
        let drafts = free.filter_map(|(i, (options, _))| options.draft.as_ref().map(|draft| (i, draft)));
        let oldest = drafts.min_by(|(_, a), (_, b)| a.at.cmp(&b.at).then(a.rows.total_cmp(&b.rows)));
        oldest.map(|(i, _)| i)
    }

    /// A step had so many proposals of this kind, of which these became tokens.
    pub(crate) fn count(&mut self, proposer: Proposer, proposed: usize, accepted: usize) {
        let of_draft = (proposer == Proposer::Draft).then_some(&mut self.draft_counts);
        for counts in [Some(&mut self.counts), of_draft].into_iter().flatten() {
            counts.proposed += proposed as u64;
            counts.accepted += accepted as u64;
        }
    }

    /// All proposals since the start.
    pub(crate) fn counts(&self) -> ProposalCounts {
        self.counts
    }

    /// Those of the draft model among them.
    pub(crate) fn draft_counts(&self) -> ProposalCounts {
        self.draft_counts
    }
}

/// Proposals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProposalCounts {
    pub(crate) proposed: u64,
    pub(crate) accepted: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A draft model that takes a quarter of the time of the model.
    fn speculation() -> Speculation {
        let config = SpeculationConfig {
            step_time: Some(StepTime { first: 10 * MS, row: MS / 10 }),
            draft_step_time: Some(StepTime { first: 2 * MS, row: MS / 10 }),
            ..SpeculationConfig::default()
        };
        let mut speculation = Speculation::new(&config, 16).unwrap();
        speculation.took(1, MS);
        speculation
    }

    fn options(drafter: &Drafter) -> Options {
        let draft = DraftOption { chances: drafter.chances_of_draft(8), rows: 1.0, at: drafter.drafted_at() };
        Options { ngrams: Vec::new(), draft: Some(draft) }
    }

    #[test]
    fn a_draft_model_that_is_mostly_wrong_is_probed_now_and_then_and_used_again_once_it_is_right() {
        let mut speculation = speculation();
        let mut drafter = speculation.drafter(100);
        let mut proposed = |speculation: &mut Speculation, steps: usize, is_right: bool| {
            let mut proposed = 0;
            for _ in 0..steps {
                let Choice { shares, is_probe } = speculation.choose(&[options(&drafter)]);
                let Share { count, proposer } = shares[0];
                if count > 0 {
                    assert_eq!(proposer, Proposer::Draft);
                    (0..count).for_each(|_| speculation.draft_took(1, false, is_probe, MS));
                    speculation.drafted(&mut drafter, count, if is_right { count } else { 0 });
                }
                proposed += count;
                speculation.took(1 + count, MS);
            }
            proposed
        };
        assert!(proposed(&mut speculation, 20, false) > 0, "it is tried");
        let probes = proposed(&mut speculation, 1_000, false);
        // Of 10 s, a hundredth is 50 steps of 2 ms.
        assert!((40..60).contains(&probes), "{probes}");
        assert!(proposed(&mut speculation, 2_000, true) > 5_000, "it is used once probes were right");
        assert!(!speculation.choose(&[options(&drafter)]).is_probe);
    }

    #[test]
    fn probes_go_round() {
        let mut speculation = speculation();
        let mut drafters: Vec<_> = (0..4).map(|_| speculation.drafter(100)).collect();
        (0..100).for_each(|_| drafters.iter_mut().for_each(|drafter| speculation.drafted(drafter, 1, 0)));
        let mut probed = [0; 4];
        for _ in 0..40 {
            let options: Vec<_> = drafters.iter().map(options).collect();
            let choice = speculation.choose(&options);
            assert!(choice.is_probe);
            let counts: Vec<_> = choice.shares.iter().map(|share| share.count).collect();
            assert_eq!(counts.iter().sum::<usize>(), 1);
            let at = counts.iter().position(|count| *count == 1).unwrap();
            probed[at] += 1;
            speculation.drafted(&mut drafters[at], 1, 0);
        }
        assert_eq!(probed, [10; 4]);
        assert!(!speculation.choose(&[Options::default()]).is_probe, "no draft model, no probe");
    }

    #[test]
    fn a_batch_that_fills_the_step_has_no_row_for_a_probe() {
        let mut speculation = Speculation { rows_max: 4, ..speculation() };
        let mut drafters: Vec<_> = (0..4).map(|_| speculation.drafter(100)).collect();
        (0..100).for_each(|_| drafters.iter_mut().for_each(|drafter| speculation.drafted(drafter, 1, 0)));
        let probes = |sequences: usize| {
            let options: Vec<_> = drafters[..sequences].iter().map(options).collect();
            let Choice { shares, is_probe } = speculation.choose(&options);
            (is_probe, shares.iter().map(|share| share.count).sum::<usize>())
        };
        assert_eq!((probes(3), probes(4)), ((true, 1), (false, 0)));
    }
}
