//! The running batch of a decode worker: steps whose length depends on sequences and context, and at most one prompt that is
//! computed beside them, a chunk a step.

use super::clock::{Time, ns, seconds};
use super::rates::Rates;
use std::collections::VecDeque;

/// Most of a prompt that is computed in one step, in tokens without context: it stalls the batch.
const CHUNK_TOKENS: f64 = 512.0;

/// A sequence.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: usize,
    /// Tokens that are still to come.
    pub(super) left: u32,
    /// Tokens that a step reads.
    pub(super) context: u64,
    /// When its last token came.
    pub(super) last: Time,
}

/// What came of the steps up to a boundary.
#[derive(Debug, Default)]
pub(super) struct Stepped {
    /// Microseconds between tokens, by request, in order.
    pub(super) gaps_us: Vec<(usize, Vec<u32>)>,
    /// Sequences that have ended.
    pub(super) ended: Vec<usize>,
    /// A prompt that is computed.
    pub(super) prefilled: Option<usize>,
}

/// Steps under way: they began at `from`, and the next boundary is behind `steps` of them.
#[derive(Clone, Copy, Debug)]
struct Run {
    from: Time,
    steps: u32,
    first_s: f64,
    growth_s: f64,
}

impl Run {
    /// The end of step `i`, from 1 on.
    fn end(&self, i: u32) -> Time {
        let i = f64::from(i);
        self.from + ns(i * self.first_s + self.growth_s * i * (i - 1.0) / 2.0)
    }
}

/// The batch.
#[derive(Debug, Default)]
pub(super) struct Batch {
    running: Vec<Sequence>,
    context: u64,
    joining: VecDeque<Sequence>,
    /// Prompts to compute here: the request, and seconds that are left of it.
    prompts: VecDeque<(usize, f64)>,
    run: Option<Run>,
    /// Number of the boundary that is waited for; others are stale.
    boundary: u64,
    step_s: f64,
}

impl Batch {
    /// Sequences that run or wait for a place.
    pub(super) fn sequences(&self) -> (usize, usize) {
        (self.running.len(), self.joining.len() + self.prompts.len())
    }

    /// Whether no step is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.run.is_none()
    }

    /// Seconds of prompts that are to be computed here.
    pub(super) fn prompts_s(&self) -> f64 {
        self.prompts.iter().map(|(_, left_s)| left_s).sum()
    }

    /// Length of the last step that was begun; 0 before the first.
    pub(super) fn step_s(&self) -> f64 {
        self.step_s
    }

    /// A sequence joins at the next boundary. The time of that, and its number, where it changed.
    pub(super) fn join(&mut self, sequence: Sequence, now: Time, rates: &Rates) -> Option<(Time, u64)> {
        self.joining.push_back(sequence);
        self.soon(now, rates)
    }

    /// A prompt is computed here, in `left_s` seconds without the batch; like [`Batch::join`].
    pub(super) fn compute(&mut self, request: usize, left_s: f64, now: Time, rates: &Rates) -> Option<(Time, u64)> {
        self.prompts.push_back((request, left_s));
        self.soon(now, rates)
    }

    /// The end of the step that is under way becomes a boundary.
    fn soon(&mut self, now: Time, rates: &Rates) -> Option<(Time, u64)> {
        let Some(run) = &mut self.run else { return self.begin(now, rates) };
        let (mut low, mut high) = (1, run.steps);
        while low < high {
            let middle = low.midpoint(high);
            if run.end(middle) >= now { high = middle } else { low = middle + 1 }
        }
        if high == run.steps {
            return None;
        }
        run.steps = high;
        self.boundary += 1;
        Some((run.end(high), self.boundary))
    }

    /// Begins steps, as many as nothing changes in between. When they are over; `None` where there is nothing to do.
    pub(super) fn begin(&mut self, now: Time, rates: &Rates) -> Option<(Time, u64)> {
        while self.running.len() < rates.decode.running_max as usize {
            let Some(sequence) = self.joining.pop_front() else { break };
            self.context += sequence.context;
            self.running.push(sequence);
        }
        let sequences = self.running.len();
        let decode_s = if sequences > 0 { rates.step_s(sequences, self.context) } else { 0.0 };
        let chunk_s = CHUNK_TOKENS / rates.prefill.tokens_per_s;
        let (steps, beside_s) = match self.prompts.front() {
            Some((_, left_s)) => (1, left_s.min(chunk_s)),
            None => (self.running.iter().map(|s| s.left).min()?, 0.0),
        };
        if sequences > 0 {
            self.step_s = decode_s;
        }
        let run = Run { from: now, steps, first_s: decode_s + beside_s, growth_s: rates.step_growth_s(sequences) };
        self.run = Some(run);
        self.boundary += 1;
        Some((run.end(steps), self.boundary))
    }

    /// A boundary is reached; `None` where it is a stale one. What goes on then begins with [`Batch::begin`].
    pub(super) fn reached(&mut self, boundary: u64, rates: &Rates) -> Option<Stepped> {
        if boundary != self.boundary {
            return None;
        }
        let run = self.run.take()?;
        let ends: Vec<Time> = (1..=run.steps).map(|i| run.end(i)).collect();
        let mut stepped = Stepped::default();
        for sequence in &mut self.running {
            let gap = |end: &Time| {
                let before = std::mem::replace(&mut sequence.last, *end);
                u32::try_from(end.saturating_sub(before) / 1_000).unwrap_or(u32::MAX)
            };
            stepped.gaps_us.push((sequence.request, ends.iter().map(gap).collect()));
            sequence.left -= run.steps;
            sequence.context += u64::from(run.steps);
        }
        for ended in self.running.extract_if(.., |sequence| sequence.left == 0) {
            stepped.ended.push(ended.request);
        }
        self.context = self.running.iter().map(|sequence| sequence.context).sum();
        if let Some((request, left_s)) = self.prompts.front_mut() {
            *left_s -= CHUNK_TOKENS / rates.prefill.tokens_per_s;
            if *left_s <= seconds(1) {
                stepped.prefilled = Some(*request);
                self.prompts.pop_front();
            }
        }
        Some(stepped)
    }
}
