// Sampling, and what it keeps per slot.
//
// A row of these kernels is a row of the step that samples: the rows of one slot follow one another, the first has depth 0. A row whose
// slot is negative is padding.
//
// Generated from kernels/src/cuda/arguments: change it there.
#pragma once

#include "../types.cuh"

// Most alternatives of a row whose log-probabilities are reported.
constexpr i32 LOGPROBS_MAX = 20;

// Of `counts`: the token is in prompt or output. The other bits say how often it was generated.
constexpr u32 SEEN = 0x80000000;

enum SampleStatus {
    SAMPLED = 0,
    NOT_FINITE = 1,      // token and value: the first logit that is not finite
    NOTHING_ALLOWED = 2,
    MASK_LATE = 3,
    NOT_REACHED = 4,     // padding, or behind a draft that was not sampled
};

// How a slot samples. The host checks all of it: no number is NaN, indices are inside their arrays.
struct SlotSampling {
    u64 seed;
    u32 sample_index;
    f32 temperature;
    f32 top_p;
    u32 top_k; // 0: all
    f32 repetition;
    f32 frequency;
    f32 presence;
    i32 greedy; // not 0: the largest logit, whatever the temperature
    i32 logprobs; // alternatives, 0 to LOGPROBS_MAX; negative: no log-probabilities
    i32 counts; // row of `counts`; negative: no penalties
    i32 bias_first; // in `bias`
    i32 bias_len;
    i32 allowed; // row of `allowed`; negative: every token
    f32 min_p; // tokens less likely than this part of the most likely one are not drawn; 0: all are
};
static_assert(sizeof(SlotSampling) == 64, "as the host lays it out");

// Added to the logit of a token. A slot names each token at most once.
struct Bias {
    i32 token;
    f32 value;
};
static_assert(sizeof(Bias) == 8, "as the host lays it out");

// Why a slot yields no more tokens; all of it 0: it does.
struct SlotFailure {
    i32 status;
    i32 token;
    u32 value; // bits of the logit
    i32 reserved;
};
static_assert(sizeof(SlotFailure) == 16, "as the host lays it out");

// What a row sampled. The logarithm is left to the host: log-probability = f32(f64(logit) - (f64(best) + ln(f64(sum) / 2^40))).
struct SampleRecord {
    i32 status;
    i32 token;
    u32 value; // NOT_FINITE: bits of the logit
    f32 chosen; // the model's logit of the token
    f32 best; // the largest of the model's logits
    i32 top_len;
    u64 sum; // of the shares of the model's logits at temperature 1; 0 without log-probabilities
    i32 top_tokens[20]; // most likely first
    f32 top_logits[20];
};
static_assert(sizeof(SampleRecord) == 192, "as the host lays it out");

// Samples the rows of one depth.
struct Sample {
    const f32 *logits; // [rows, vocab], as the model returned them
    f32 *adjusted; // [rows, vocab], scratch of rows with bias, penalties or allowed tokens
    const i32 *slots; // [rows]
    const i32 *positions; // [rows] in the sequence: of the token that the row computed, not of the one that it samples
    const i32 *depths; // [rows] within the slot's rows
    const i32 *ids; // [rows] the row's own token: the draft that the row before must have sampled
    const i32 *masks; // [rows] row of `late`; -1: none; -2: did not arrive in time
    const SlotSampling *sampling; // [slots]
    const Bias *bias;
    const u32 *allowed; // [.., words], bit i of word w is token 32 w + i
    const u32 *late; // [.., words]
    u32 *counts; // [.., vocab]
    i32 *last; // [slots] the token sampled last
    i32 *accepted; // [slots] drafts that were sampled too
    SlotFailure *failed; // [slots]
    SampleRecord *records; // [rows]
    i32 rows;
    i32 vocab;
    i32 words;
    i32 depth;
};
static_assert(sizeof(Sample) == 144, "as the host lays it out");

// array[index] = value for each pair; a pair with a negative index is padding. No index occurs twice.
struct Scatter {
    i32 *array;
    const i32 *pairs; // [count, 2]: index, value
    i32 count;
    i32 reserved;
};
static_assert(sizeof(Scatter) == 24, "as the host lays it out");

// Sets a row of counts to 0.
struct ClearCounts {
    u32 *counts; // [.., vocab]
    i32 row;
    i32 vocab;
};
static_assert(sizeof(ClearCounts) == 16, "as the host lays it out");

// Counts the tokens of a sequence in a row of counts. Tokens outside the vocabulary count for nothing.
struct CountTokens {
    u32 *counts; // [.., vocab]
    const i32 *tokens; // [len]
    i32 row;
    i32 vocab;
    i32 len;
    i32 prompt_len; // the first of `tokens`, which were not generated
};
static_assert(sizeof(CountTokens) == 32, "as the host lays it out");
