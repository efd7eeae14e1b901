//! Speculation: tokens that a sequence will probably sample are computed as further rows of its next step. The device samples each row
//! with the sampler's randomness of its position and accepts a proposal only if it equals what was sampled, so the answer is the same bit
//! for bit ([`baton_kernels::step::SlotRows::samples`]).
//!
//! - `Ngrams` finds where the last tokens of a sequence occurred before: what followed there is proposed.
//! - Each sampled token is compared with the proposal for it, whether or not a row was spent on it. So the odds of a sequence
//!   (`odds`) are known before any row is spent.
//! - `StepCost` is the measured time of a step by its rows.
//! - `choice` spends rows where odds and cost make the batch faster, and no sequence slower.
//!
//! Pure: durations and tokens in, numbers of rows out.

mod choice;
mod cost;
mod drafter;
mod ngrams;
mod odds;

pub(crate) use drafter::Drafter;

use cost::StepCost;
use odds::Odds;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How tokens are proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpeculationMethod {
    /// They are not.
    Off,
    /// What followed the last tokens where they occurred before, in prompt or answer (prompt lookup).
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
    pub const OFF: Self = Self { method: SpeculationMethod::Off, tokens_max: 1, step_time: None };

    /// Most that [`SpeculationConfig::tokens_max`] may be: further proposals are hardly ever accepted, and a step's blocks grow with them.
    pub const TOKENS_MAX: usize = 16;

    /// Most proposed tokens of one sequence in one step; 0 where it is off.
    pub fn drafts_max(&self) -> usize {
        if self.method == SpeculationMethod::Off { 0 } else { self.tokens_max }
    }
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        Self { method: SpeculationMethod::Ngram, tokens_max: 8, step_time: None }
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
    /// Over all sequences: what a new one begins with.
    odds: Odds,
    proposed: u64,
    accepted: u64,
}

impl Speculation {
    /// `None` if it is off. Steps have at most `rows_max` rows that sample.
    pub(crate) fn new(config: &SpeculationConfig, rows_max: usize) -> Option<Self> {
        let drafts_max = config.drafts_max();
        let (cost, odds) = (StepCost::default(), Odds::default());
        let step_time = config.step_time;
        (drafts_max > 0).then_some(Self { drafts_max, rows_max, cost, step_time, odds, proposed: 0, accepted: 0 })
    }

    /// The drafter of a new sequence that may become so many tokens long.
    pub(crate) fn drafter(&self, len_max: usize) -> Drafter {
        Drafter::new(len_max, self.odds.clone())
    }

    /// The last of a sequence's tokens was just sampled.
    pub(crate) fn sampled(&mut self, drafter: &mut Drafter, tokens: &[baton_types::TokenId]) {
        drafter.sampled(tokens, &mut self.odds);
    }

    /// Most proposals of one sequence.
    pub(crate) fn drafts_max(&self) -> usize {
        self.drafts_max
    }

    /// A step of so many decode rows, proposals included, and no other rows, took this long.
    pub(crate) fn took(&mut self, rows: usize, elapsed: Duration) {
        self.cost.add(rows, self.step_time.map_or(elapsed, |time| time.of(rows)));
    }

    /// How many tokens to propose for each sequence of a batch, given the chances that all of its first proposals are accepted.
    pub(crate) fn choose(&self, chances: &[Vec<f32>]) -> Vec<usize> {
        choice::choose(chances, self.rows_max, &self.cost)
    }

    /// A step had so many proposals, of which these became tokens.
    pub(crate) fn count(&mut self, proposed: usize, accepted: usize) {
        self.proposed += proposed as u64;
        self.accepted += accepted as u64;
    }

    /// Tokens proposed and accepted since the start.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.proposed, self.accepted)
    }
}
