//! What slots need to sample on the device, and what it sampled.

use super::arguments::sampling::{
    Bias, ClearCounts, CountTokens, LATE_MASK, NO_MASK, Sample, SampleRecord, SlotFailure, SlotSampling, status,
};
use super::arguments::{Argument, In, Out, bytes_of};
use super::buffers::{Activations, StepLayout, WORD};
use super::driver::{Address, Buffer, Command, Driver, Stream};
use super::launch::Launcher;
use super::staging::Staging;
use crate::device::{Bounds, DeviceError};
use crate::sampling::{History, SampleError, Sampled, TokenSet, log_total};
use crate::step::{Join, LateMask, RowId, SlotOutput, SlotRows, StepInput};
use baton_types::{TokenId, TokenLogprobs};
use std::sync::Arc;

/// Most biased tokens of one sequence.
const BIASES_MAX: usize = 1024;

/// State of all slots on the device.
#[derive(Debug)]
pub(super) struct Samplers {
    vocab: usize,
    /// Words of a set of tokens.
    words: usize,
    sampling: Buffer,
    /// [`BIASES_MAX`] of each slot.
    bias: Buffer,
    /// `[slots, words]`
    allowed: Buffer,
    /// `[rows, words]`, of the rows that sample in one step.
    late: Buffer,
    /// `[slots, vocab]`
    counts: Buffer,
    /// Tokens of a sequence that joins.
    tokens: Buffer,
    last: Buffer,
    accepted: Buffer,
    failed: Buffer,
    records: Buffer,
}

impl Samplers {
    pub(super) fn alloc(driver: &Arc<dyn Driver>, vocab: usize, bounds: &Bounds) -> Result<Self, DeviceError> {
        let (slots, rows) = (bounds.slots_max, bounds.logit_rows_max.min(bounds.rows_max));
        let words = vocab.div_ceil(u32::BITS as usize);
        let alloc = |count: usize, bytes: usize| Buffer::new(driver, count * bytes, "samplers");
        Ok(Self {
            vocab,
            words,
            sampling: alloc(slots, SlotSampling::BYTES)?,
            bias: alloc(slots * BIASES_MAX, Bias::BYTES)?,
            allowed: alloc(slots * words, WORD)?,
            late: alloc(rows * words, WORD)?,
            counts: alloc(slots * vocab, WORD)?,
            tokens: alloc(bounds.positions_max, WORD)?,
            last: alloc(slots, WORD)?,
            accepted: alloc(slots, WORD)?,
            failed: alloc(slots, SlotFailure::BYTES)?,
            records: alloc(rows, SampleRecord::BYTES)?,
        })
    }

    /// The token that each slot sampled last, i32 `[slots]`.
    pub(super) fn last(&self) -> Address {
        self.last.at()
    }

    /// Checks that a sequence fits.
    pub(super) fn check(join: &Join) -> Result<(), DeviceError> {
        let biased = join.bias.len();
        if biased > BIASES_MAX {
            return Err(DeviceError::Step(format!("{biased} tokens have a bias, {BIASES_MAX} fit")));
        }
        if join.sampling.typical_p < 1.0 || !join.sampling.bad_words.is_empty() {
            return Err(DeviceError::Step("typical_p and bad_words are not implemented on GPUs".into()));
        }
        Ok(())
    }

    /// A sequence joins, before the rows of the step.
    pub(super) fn join(
        &self,
        join: &Join,
        driver: &Arc<dyn Driver>,
        stream: Stream,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        let (slot, params) = (join.slot, &join.sampling);
        let counts = History::is_needed(params);
        let sampling = SlotSampling {
            seed: params.seed,
            sample_index: join.sample_index,
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: params.top_k,
            repetition: params.repetition_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
            greedy: i32::from(params.is_greedy()),
            logprobs: params.logprobs.map_or(-1, |top| top as i32),
            counts: if counts { slot as i32 } else { -1 },
            bias_first: (slot * BIASES_MAX) as i32,
            bias_len: join.bias.len() as i32,
            allowed: if join.allowed.is_some() { slot as i32 } else { -1 },
            min_p: params.min_p,
        };
        let mut upload = |of: &Buffer, at: usize, data: &[u8]| staging.upload(stream, data, of.at().plus(at));
        upload(&self.sampling, slot * SlotSampling::BYTES, &bytes_of(&[sampling]))?;
        upload(&self.failed, slot * SlotFailure::BYTES, &[0; SlotFailure::BYTES])?;
        upload(&self.last, slot * WORD, &join.tokens.last().map_or(0, |token| *token as i32).to_ne_bytes())?;
        let bias: Vec<Bias> = join.bias.iter().map(|&(token, value)| Bias { token: token as i32, value }).collect();
        upload(&self.bias, slot * BIASES_MAX * Bias::BYTES, &bytes_of(&bias))?;
        if let Some(allowed) = &join.allowed {
            upload(&self.allowed, slot * self.words * WORD, &self.set(allowed))?;
        }
        if !counts {
            return Ok(());
        }
        let tokens: Vec<i32> = join.tokens.iter().map(|token| *token as i32).collect();
        upload(&self.tokens, 0, &bytes_of(&tokens))?;
        let (row, vocab, counts) = (slot as i32, self.vocab as i32, Out::at(self.counts.at()));
        let clear = Launcher::clear_counts(ClearCounts { counts, row, vocab });
        driver.enqueue(stream, &Command::Launch(clear))?;
        let (tokens, len) = (In::at(self.tokens.at()), tokens.len() as i32);
        let count = CountTokens { counts, tokens, row, vocab, len, prompt_len: join.prompt_len as i32 };
        if len == 0 { Ok(()) } else { driver.enqueue(stream, &Command::Launch(Launcher::count_tokens(count))) }
    }

    /// A set of tokens as words of bits.
    fn set(&self, tokens: &TokenSet) -> Vec<u8> {
        let mut words = vec![0u32; self.words];
        for token in 0..self.vocab {
            if tokens.contains(token as TokenId) {
                words[token / 32] |= 1 << (token % 32);
            }
        }
        bytes_of(&words)
    }

    /// Waits for the masks of a step, each until its deadline, and uploads them. Returns what each sampling row's `mask` is.
    pub(super) fn masks(
        &self,
        masks: &[Option<LateMask>],
        stream: Stream,
        staging: &mut Staging,
    ) -> Result<Vec<i32>, DeviceError> {
        let mut rows = Vec::with_capacity(masks.len());
        for (row, mask) in masks.iter().enumerate() {
            rows.push(match mask.as_ref().map(LateMask::wait) {
                None => NO_MASK,
                Some(Err(_)) => LATE_MASK,
                Some(Ok(tokens)) => {
                    staging.upload(stream, &self.set(&tokens), self.late.at().plus(row * self.words * WORD))?;
                    row as i32
                }
            });
        }
        Ok(rows)
    }

    /// The kernel that samples the rows of one depth; `rows` are the first selected ones.
    pub(super) fn sample(
        &self,
        activations: &Activations,
        layout: &StepLayout,
        step: Address,
        rows: usize,
        depth: usize,
    ) -> Command {
        let part = |part| StepLayout::at(step, part);
        Command::Launch(Launcher::sample(Sample {
            logits: In::at(activations.logits.at()),
            adjusted: Out::at(activations.adjusted.at()),
            slots: In::at(part(&layout.chosen_slots)),
            positions: In::at(part(&layout.chosen_positions)),
            depths: In::at(part(&layout.depths)),
            ids: In::at(part(&layout.drafts)),
            masks: In::at(part(&layout.masks)),
            sampling: In::at(self.sampling.at()),
            bias: In::at(self.bias.at()),
            allowed: In::at(self.allowed.at()),
            late: In::at(self.late.at()),
            counts: Out::at(self.counts.at()),
            last: Out::at(self.last.at()),
            accepted: Out::at(self.accepted.at()),
            failed: Out::at(self.failed.at()),
            records: Out::at(self.records.at()),
            rows: rows as i32,
            vocab: self.vocab as i32,
            words: self.words as i32,
            depth: depth as i32,
        }))
    }

    /// Where the records are.
    pub(super) fn records(&self) -> Address {
        self.records.at()
    }
}

/// Depth and own token of each row that samples, in order.
pub(super) fn sampling_rows(step: &StepInput, depths: &mut Vec<i32>, drafts: &mut Vec<i32>) {
    depths.clear();
    drafts.clear();
    let mut end = 0;
    for segment in &step.segments {
        end += segment.rows;
        for depth in 0..segment.samples {
            depths.push(depth as i32);
            drafts.push(match step.ids[end - segment.samples + depth] {
                RowId::Token(token) => token as i32,
                RowId::LastSampled => -1,
            });
        }
    }
}

/// The mask of each row that samples, in order.
pub(super) fn late_masks(step: &StepInput) -> Vec<Option<LateMask>> {
    let of =
        |segment: &SlotRows| (0..segment.samples).map(|depth| segment.masks.get(depth).cloned()).collect::<Vec<_>>();
    step.segments.iter().flat_map(of).collect()
}

/// What the rows of a step sampled, from the records of its rows.
pub(super) fn outputs<'a>(
    segments: impl Iterator<Item = &'a Segment>,
    records: &[u8],
    vocab: usize,
) -> Vec<SlotOutput> {
    let mut records = records.chunks_exact(SampleRecord::BYTES).map(|mut bytes| SampleRecord::take(&mut bytes));
    let output = |segment: &Segment| {
        let mut output = SlotOutput { slot: segment.slot, rows: Vec::with_capacity(segment.samples), accepted: 0 };
        for depth in 0..segment.samples {
            let Some(record) = records.next() else { break };
            if record.status == status::NOT_REACHED {
                continue;
            }
            let row = sampled(&record, segment.logprobs, vocab);
            let draft = segment.drafts.get(depth).copied();
            output.accepted += usize::from(row.as_ref().is_ok_and(|row| Some(row.token) == draft));
            output.rows.push(row);
        }
        output
    };
    segments.map(output).collect()
}

/// A segment that samples.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Segment {
    slot: usize,
    samples: usize,
    /// Its drafted tokens.
    drafts: Vec<TokenId>,
    /// Whether its slot reports log-probabilities.
    logprobs: bool,
}

impl Segment {
    /// Rows of a step, whose ids are `ids`.
    pub(super) fn new(rows: &SlotRows, ids: &[RowId], logprobs: bool) -> Self {
        let drafted = ids[ids.len() - rows.samples..].iter().skip(1);
        let token = |id: &RowId| if let RowId::Token(token) = id { Some(*token) } else { None };
        Self { slot: rows.slot, samples: rows.samples, drafts: drafted.filter_map(token).collect(), logprobs }
    }
}

fn sampled(record: &SampleRecord, logprobs: bool, vocab: usize) -> Result<Sampled, SampleError> {
    let token = record.token as TokenId;
    match record.status {
        status::SAMPLED if (token as usize) < vocab => {}
        status::NOT_FINITE => return Err(SampleError::NotFinite { token, value: f32::from_bits(record.value) }),
        status::NOTHING_ALLOWED => return Err(SampleError::NothingAllowed),
        status::MASK_LATE => return Err(SampleError::MaskLate),
        _ => return Err(SampleError::Empty),
    }
    let logprobs = logprobs.then(|| {
        let total = log_total(record.best, record.sum);
        let logprob = |logit: f32| (f64::from(logit) - total) as f32;
        let top = record.top_tokens.iter().zip(&record.top_logits).take(record.top_len.max(0) as usize);
        TokenLogprobs {
            chosen: logprob(record.chosen),
            top: top.map(|(token, logit)| (*token as TokenId, logprob(*logit))).collect(),
        }
    });
    Ok(Sampled { token, logprobs })
}
