//! Sampling and changes of slots, by the reference.

use crate::cuda::arguments::sampling::{
    Bias, ClearCounts, CountTokens, LATE_MASK, LOGPROBS_MAX, NO_MASK, SEEN, Sample, SampleRecord, Scatter, SlotFailure,
    SlotSampling, status,
};
use crate::cuda::arguments::{Argument, In, Out};
use crate::cuda::driver::recorder::memory::Memory;
use crate::sampling::order::top;
use crate::sampling::shares::shares;
use crate::sampling::{Constraints, Draw, History, SampleError, TokenSet};
use baton_types::{SamplingParams, TokenId};

pub(super) fn scatter(a: &Scatter, memory: &mut Memory) {
    let pairs: Vec<i32> = memory.read(a.pairs, 0, 2 * a.count as usize);
    for pair in pairs.chunks_exact(2).filter(|pair| pair[0] >= 0) {
        memory.write(a.array, pair[0] as usize, &pair[1..]);
    }
}

pub(super) fn clear_counts(a: &ClearCounts, memory: &mut Memory) {
    let vocab = a.vocab as usize;
    memory.write(a.counts, a.row as usize * vocab, &vec![0u32; vocab]);
}

pub(super) fn count_tokens(a: &CountTokens, memory: &mut Memory) {
    let tokens: Vec<i32> = memory.read(a.tokens, 0, a.len as usize);
    for (i, token) in tokens.into_iter().enumerate().filter(|(_, token)| (0..a.vocab).contains(token)) {
        let at = a.row as usize * a.vocab as usize + token as usize;
        let count = memory.read_out(a.counts, at, 1)[0] | SEEN;
        memory.write(a.counts, at, &[count + u32::from(i >= a.prompt_len as usize)]);
    }
}

fn put<T: Argument>(memory: &mut Memory, to: Out<T>, index: usize, value: &T) {
    let mut bytes = Vec::new();
    value.append(&mut bytes);
    let at = to.address().expect("structs").plus(index * T::BYTES);
    memory.bytes_mut(at, T::BYTES).copy_from_slice(&bytes);
}

fn set(memory: &Memory, from: In<u32>, row: usize, words: usize) -> TokenSet {
    let bits: Vec<u32> = memory.read(from, row * words, words);
    (0..words as u32 * 32).filter(|token| bits[*token as usize / 32] >> (token % 32) & 1 == 1).collect()
}

const NOT_REACHED: SampleRecord = SampleRecord {
    status: status::NOT_REACHED,
    token: 0,
    value: 0,
    chosen: 0.0,
    best: 0.0,
    top_len: 0,
    sum: 0,
    top_tokens: [0; LOGPROBS_MAX],
    top_logits: [0.0; LOGPROBS_MAX],
};

pub(super) fn sample(a: &Sample, memory: &mut Memory) {
    for row in 0..a.rows as usize {
        let (slot, depth): (i32, i32) = (memory.read(a.slots, row, 1)[0], memory.read(a.depths, row, 1)[0]);
        if slot < 0 {
            put(memory, a.records, row, &NOT_REACHED);
            continue;
        }
        if depth != a.depth {
            continue;
        }
        let slot = slot as usize;
        if depth > 0 {
            let before = memory.element(In::at(a.records.address().expect("records")), row - 1);
            let SampleRecord { status: ended, token, .. } = before;
            if ended != status::SAMPLED || token != memory.read(a.ids, row, 1)[0] {
                put(memory, a.records, row, &NOT_REACHED);
                continue;
            }
            memory.write(a.accepted, slot, &[depth]);
        } else {
            memory.write(a.accepted, slot, &[0]);
        }
        let failure: SlotFailure = memory.element(In::at(a.failed.address().expect("failures")), slot);
        let record = if failure.status == status::SAMPLED { one(a, row, slot, memory) } else { failed(&failure) };
        if record.status == status::SAMPLED {
            memory.write(a.last, slot, &[record.token]);
            let of: SlotSampling = memory.element(a.sampling, slot);
            if of.counts >= 0 {
                let at = of.counts as usize * a.vocab as usize + record.token as usize;
                let count = memory.read_out(a.counts, at, 1)[0] | SEEN;
                memory.write(a.counts, at, &[count + 1]);
            }
        } else {
            let failure = SlotFailure { status: record.status, token: record.token, value: record.value, reserved: 0 };
            put(memory, a.failed, slot, &failure);
        }
        put(memory, a.records, row, &record);
    }
}

fn failed(failure: &SlotFailure) -> SampleRecord {
    SampleRecord { status: failure.status, token: failure.token, value: failure.value, ..NOT_REACHED }
}

fn one(a: &Sample, row: usize, slot: usize, memory: &Memory) -> SampleRecord {
    let vocab = a.vocab as usize;
    let of: SlotSampling = memory.element(a.sampling, slot);
    let logits: Vec<f32> = memory.read(a.logits, row * vocab, vocab);
    let params = SamplingParams {
        temperature: if of.greedy == 0 { of.temperature } else { 0.0 },
        top_p: of.top_p,
        top_k: of.top_k,
        min_p: of.min_p,
        presence_penalty: of.presence,
        frequency_penalty: of.frequency,
        repetition_penalty: of.repetition,
        seed: of.seed,
        ..SamplingParams::default()
    };
    let mut history = History::default();
    if of.counts >= 0 {
        let counts: Vec<u32> = memory.read_out(a.counts, of.counts as usize * vocab, vocab);
        let seen = |(token, count): (usize, &u32)| (*count & SEEN != 0).then_some(token as TokenId);
        // A token that was generated may count as prompt, too: it was seen.
        let prompt: Vec<TokenId> = counts.iter().enumerate().filter_map(seen).collect();
        let mut tokens = prompt.clone();
        for (token, count) in counts.iter().enumerate() {
            tokens.extend(std::iter::repeat_n(token as TokenId, (count & !SEEN) as usize));
        }
        history = History::rebuild(&tokens, prompt.len());
    }
    let bias: Vec<(TokenId, f32)> = (0..of.bias_len as usize)
        .map(|i| memory.element::<Bias>(a.bias, of.bias_first as usize + i))
        .map(|bias| (bias.token as TokenId, bias.value))
        .collect();
    let words = a.words as usize;
    let allowed = (of.allowed >= 0).then(|| set(memory, a.allowed, of.allowed as usize, words));
    let mask: i32 = memory.read(a.masks, row, 1)[0];
    if mask == LATE_MASK {
        return SampleRecord { status: status::MASK_LATE, ..NOT_REACHED };
    }
    let late = (mask != NO_MASK).then(|| set(memory, a.late, mask as usize, words));
    let draw = Draw {
        params: &params,
        history: &history,
        position: memory.read(a.positions, row, 1)[0] as u64 + 1,
        sample_index: of.sample_index,
        constraints: Constraints { bias: &bias, allowed: [allowed.as_ref(), late.as_ref()], barred: &[] },
    };
    let token = match draw.sample(&logits) {
        Ok(sampled) => sampled.token,
        Err(SampleError::NotFinite { token, value }) => {
            let (token, value) = (token as i32, value.to_bits());
            return SampleRecord { status: status::NOT_FINITE, token, value, ..NOT_REACHED };
        }
        Err(SampleError::NothingAllowed) => return SampleRecord { status: status::NOTHING_ALLOWED, ..NOT_REACHED },
        Err(error) => panic!("{error}"),
    };
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut record = SampleRecord {
        status: status::SAMPLED,
        token: token as i32,
        chosen: logits[token as usize],
        best,
        ..NOT_REACHED
    };
    if of.logprobs >= 0 {
        record.sum = shares(&logits, best, 1.0).into_iter().sum();
        for (i, token) in top(&logits, of.logprobs as usize).into_iter().enumerate() {
            (record.top_tokens[i], record.top_logits[i]) = (token as i32, logits[token as usize]);
            record.top_len = i as i32 + 1;
        }
    }
    record
}
