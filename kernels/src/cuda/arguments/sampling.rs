//! Arguments of sampling, and of what it keeps per slot.

use super::{Element, In, Out, arguments};

/// What the header says first.
#[cfg(any(test, feature = "testing"))]
pub(crate) const INTRO: &str = "Sampling, and what it keeps per slot.\n\
    //\n\
    // A row of these kernels is a row of the step that samples: the rows of one slot follow one another, the first has depth 0. A row whose\n\
    // slot is negative is padding.";

/// Most alternatives of a row whose log-probabilities are reported.
pub(crate) const LOGPROBS_MAX: usize = 20;

/// Of `counts`: the token is in prompt or output. The other bits say how often it was generated.
#[cfg(any(test, feature = "testing"))]
pub(crate) const SEEN: u32 = 0x8000_0000;

/// How a row ended.
pub(crate) mod status {
    pub(crate) const SAMPLED: i32 = 0;
    /// Token and value: the first logit that is not finite.
    pub(crate) const NOT_FINITE: i32 = 1;
    pub(crate) const NOTHING_ALLOWED: i32 = 2;
    pub(crate) const MASK_LATE: i32 = 3;
    /// Padding, or behind a draft that was not sampled.
    pub(crate) const NOT_REACHED: i32 = 4;
}

/// What `masks` says of a row without a mask, and of one whose mask did not arrive in time.
pub(crate) const NO_MASK: i32 = -1;
/// See [`NO_MASK`].
pub(crate) const LATE_MASK: i32 = -2;

/// The same for kernels.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn constants() -> String {
    use status::{MASK_LATE, NOT_FINITE, NOT_REACHED, NOTHING_ALLOWED, SAMPLED};
    format!(
        "// Most alternatives of a row whose log-probabilities are reported.\nconstexpr i32 LOGPROBS_MAX = {LOGPROBS_MAX};\n\n\
         // Of `counts`: the token is in prompt or output. The other bits say how often it was generated.\n\
         constexpr u32 SEEN = {SEEN:#x};\n\nenum SampleStatus {{\n    SAMPLED = {SAMPLED},\n    \
         NOT_FINITE = {NOT_FINITE},      // token and value: the first logit that is not finite\n    \
         NOTHING_ALLOWED = {NOTHING_ALLOWED},\n    MASK_LATE = {MASK_LATE},\n    \
         NOT_REACHED = {NOT_REACHED},     // padding, or behind a draft that was not sampled\n}};\n"
    )
}

arguments! {
    /// How a slot samples. The host checks all of it: no number is NaN, indices are inside their arrays.
    struct SlotSampling {
        seed: u64,
        sample_index: u32,
        temperature: f32,
        top_p: f32,
        /// 0: all
        top_k: u32,
        repetition: f32,
        frequency: f32,
        presence: f32,
        /// not 0: the largest logit, whatever the temperature
        greedy: i32,
        /// alternatives, 0 to LOGPROBS_MAX; negative: no log-probabilities
        logprobs: i32,
        /// row of `counts`; negative: no penalties
        counts: i32,
        /// in `bias`
        bias_first: i32,
        bias_len: i32,
        /// row of `allowed`; negative: every token
        allowed: i32,
        /// tokens less likely than this part of the most likely one are not drawn; 0: all are
        min_p: f32,
    }

    /// Added to the logit of a token. A slot names each token at most once.
    struct Bias {
        token: i32,
        value: f32,
    }

    /// Why a slot yields no more tokens; all of it 0: it does.
    struct SlotFailure {
        status: i32,
        token: i32,
        /// bits of the logit
        value: u32,
        reserved: i32,
    }

    /// What a row sampled. The logarithm is left to the host:
    /// log-probability = f32(f64(logit) - (f64(best) + ln(f64(sum) / 2^40))).
    struct SampleRecord {
        status: i32,
        token: i32,
        /// NOT_FINITE: bits of the logit
        value: u32,
        /// the model's logit of the token
        chosen: f32,
        /// the largest of the model's logits
        best: f32,
        top_len: i32,
        /// of the shares of the model's logits at temperature 1; 0 without log-probabilities
        sum: u64,
        /// most likely first
        top_tokens: [i32; LOGPROBS_MAX],
        top_logits: [f32; LOGPROBS_MAX],
    }

    /// Samples the rows of one depth.
    struct Sample {
        /// [rows, vocab], as the model returned them
        logits: In<f32>,
        /// [rows, vocab], scratch of rows with bias, penalties or allowed tokens
        adjusted: Out<f32>,
        /// [rows]
        slots: In<i32>,
        /// [rows] in the sequence: of the token that the row computed, not of the one that it samples
        positions: In<i32>,
        /// [rows] within the slot's rows
        depths: In<i32>,
        /// [rows] the row's own token: the draft that the row before must have sampled
        ids: In<i32>,
        /// [rows] row of `late`; -1: none; -2: did not arrive in time
        masks: In<i32>,
        /// [slots]
        sampling: In<SlotSampling>,
        bias: In<Bias>,
        /// [.., words], bit i of word w is token 32 w + i
        allowed: In<u32>,
        /// [.., words]
        late: In<u32>,
        /// [.., vocab]
        counts: Out<u32>,
        /// [slots] the token sampled last
        last: Out<i32>,
        /// [slots] drafts that were sampled too
        accepted: Out<i32>,
        /// [slots]
        failed: Out<SlotFailure>,
        /// [rows]
        records: Out<SampleRecord>,
        rows: i32,
        vocab: i32,
        words: i32,
        depth: i32,
    }

    /// array[index] = value for each pair; a pair with a negative index is padding. No index occurs twice.
    struct Scatter {
        array: Out<i32>,
        /// [count, 2]: index, value
        pairs: In<i32>,
        count: i32,
        reserved: i32,
    }

    /// Sets a row of counts to 0.
    struct ClearCounts {
        /// [.., vocab]
        counts: Out<u32>,
        row: i32,
        vocab: i32,
    }

    /// Counts the tokens of a sequence in a row of counts. Tokens outside the vocabulary count for nothing.
    struct CountTokens {
        /// [.., vocab]
        counts: Out<u32>,
        /// [len]
        tokens: In<i32>,
        row: i32,
        vocab: i32,
        len: i32,
        /// the first of `tokens`, which were not generated
        prompt_len: i32,
    }
}

macro_rules! elements {
    ($($name:ident),*) => { $(
        impl Element for $name {
            #[cfg(any(test, feature = "testing"))]
            const C: &'static str = stringify!($name);
        }
    )* };
}
elements!(SlotSampling, Bias, SlotFailure, SampleRecord);
