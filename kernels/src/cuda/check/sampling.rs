//! Sampling of rows that differ in everything that a slot may ask for.

use super::scene::Scene;
use crate::cuda::arguments::sampling::{
    Bias, LATE_MASK, LOGPROBS_MAX, NO_MASK, SEEN, Sample, SampleRecord, SlotFailure, SlotSampling, status,
};
use crate::cuda::arguments::{Argument, In, Out};
use crate::cuda::launch::Launcher;
use crate::device::DeviceError;

/// Less than a warp, than a block, and a usual one.
const VOCABULARIES: [usize; 4] = [11, 300, 5001, 32_003];

/// Slots, in the order below.
const SLOTS: usize = 9;

pub(super) fn all(scene: &mut Scene, small: bool) -> Result<(), DeviceError> {
    VOCABULARIES[..if small { 2 } else { 4 }].iter().try_for_each(|vocab| sample(scene, *vocab))
}

fn plain(scene: &mut Scene) -> SlotSampling {
    SlotSampling {
        seed: scene.random.next(),
        sample_index: scene.random.below(4),
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        repetition: 1.0,
        frequency: 0.0,
        presence: 0.0,
        greedy: 0,
        logprobs: -1,
        counts: -1,
        bias_first: 0,
        bias_len: 0,
        allowed: -1,
        min_p: 0.0,
    }
}

fn sample(scene: &mut Scene, vocab: usize) -> Result<(), DeviceError> {
    // Whole words of 64 bits.
    let words = 2 * vocab.div_ceil(64);
    let mut slots: Vec<SlotSampling> = (0..SLOTS).map(|_| plain(scene)).collect();
    // 0 is greedy. 1 has penalties and a draft, 2 a bias and allowed tokens, 3 a mask. 4 comes without its mask in time, 5 has a logit that is
    // no number, 6 has failed before, 7 may sample nothing. 8 has a large temperature and few tokens.
    slots[0].greedy = 1;
    let penalties = SlotSampling { repetition: 1.3, frequency: 0.4, presence: -0.2, counts: 1, ..slots[1] };
    slots[1] = SlotSampling { temperature: 1.2, top_p: 0.9, logprobs: 5, ..penalties };
    slots[2] = SlotSampling { logprobs: LOGPROBS_MAX as i32, bias_first: 1, bias_len: 2, allowed: 0, ..slots[2] };
    slots[3].logprobs = 0;
    slots[8] = SlotSampling { temperature: 2.0, top_k: 5, top_p: 0.99, min_p: 0.05, logprobs: 1, ..slots[8] };
    // Slot 1 has two rows, and one row is padding.
    let of: Vec<i32> = vec![0, 1, 1, 2, 3, 4, 5, 6, 7, 8, -1];
    let depths = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let masks = [NO_MASK, NO_MASK, NO_MASK, NO_MASK, 0, LATE_MASK, NO_MASK, NO_MASK, 1, NO_MASK, NO_MASK];
    let rows = of.len();
    let mut logits: Vec<f32> = (0..rows * vocab).map(|_| scene.random.float() * 6.0).collect();
    logits[6 * vocab + vocab / 2] = f32::NAN;
    // Equal logits: the order decides.
    logits[vocab] = logits[2 * vocab - 1];
    // The draft is surely sampled, so that the row behind it is too.
    let draft = vocab / 3;
    logits[vocab + draft] = 80.0;
    let mut ids = vec![1; rows];
    ids[2] = draft as i32;
    let word = |scene: &mut Scene, at: usize| {
        let inside = vocab.saturating_sub(32 * at).min(32);
        scene.random.next() as u32 & ((1u64 << inside) - 1) as u32
    };
    let mut allowed: Vec<u32> = (0..words).map(|at| word(scene, at)).collect();
    allowed[0] |= 3;
    let mut late: Vec<u32> = (0..words).map(|at| word(scene, at)).collect();
    late[0] |= 5;
    late.extend(vec![0; words]);
    let counts: Vec<u32> = (0..2 * vocab)
        .map(|_| match scene.random.below(8) {
            0 => SEEN,
            1 => SEEN | 2,
            _ => 0,
        })
        .collect();
    let bias = [Bias { token: 0, value: 50.0 }, Bias { token: 1, value: 3.5 }, Bias { token: 4, value: -2.0 }];
    let mut failed = [SlotFailure { status: 0, token: 0, value: 0, reserved: 0 }; SLOTS];
    failed[6] = SlotFailure { status: status::NOT_FINITE, token: 3, value: f32::INFINITY.to_bits(), reserved: 0 };
    let positions: Vec<i32> = (0..rows as i32).map(|row| 3 * row).collect();
    let sample = Sample {
        logits: In::at(scene.floats(&logits)?),
        adjusted: Out::at(scene.empty(rows * vocab * 4)?),
        slots: In::at(scene.ints(&of)?),
        positions: In::at(scene.ints(&positions)?),
        depths: In::at(scene.ints(&depths)?),
        ids: In::at(scene.ints(&ids)?),
        masks: In::at(scene.ints(&masks)?),
        sampling: In::at(scene.structs(&slots)?),
        bias: In::at(scene.structs(&bias)?),
        allowed: In::at(scene.structs(&allowed)?),
        late: In::at(scene.structs(&late)?),
        counts: Out::at(scene.structs(&counts)?),
        last: Out::at(scene.ints(&[9; SLOTS])?),
        accepted: Out::at(scene.ints(&[9; SLOTS])?),
        failed: Out::at(scene.structs(&failed)?),
        records: Out::at(scene.empty(rows * SampleRecord::BYTES)?),
        rows: rows as i32,
        vocab: vocab as i32,
        words: words as i32,
        depth: 0,
    };
    scene.run(Launcher::sample(sample))?;
    scene.run(Launcher::sample(Sample { depth: 1, ..sample }))?;
    scene.clear();
    Ok(())
}
