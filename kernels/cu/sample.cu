// Samples tokens: docs/numerics.md, "Sampling", with the bits of kernels/src/sampling.
//
// One CTA samples one row. Sums of shares are sums of whole numbers, so no order of adding changes a bit.

#include "blake3.cuh"
#include "params/sampling.h"
#include "radix.cuh"

namespace {

struct Scratch {
    Selection selection;
    u64 lanes[WARPS];
    u64 sums[WARPS];  // of the shares of each warp's tokens
    u64 random;
    u32 token;
};

struct Row {
    const f32 *logits;
    u32 vocab;
    u32 best; // the most likely token
};

// The largest finite f32.
constexpr f32 MAX = 0x1.fffffep+127f;

// Not min and max, which return the other operand for NaN.
__device__ inline f32 clamped(f32 x) { return x < -MAX ? -MAX : x > MAX ? MAX : x; }

__device__ inline bool has(const u32 *set, u32 token) { return set[token / 32] >> (token % 32) & 1; }

// Whether a row counts: the row before it must have sampled the draft that it computed.
__device__ inline bool is_reached(const Sample &p, u32 row) {
    if (p.depth == 0) return true;
    const SampleRecord &before = p.records[row - 1];
    return before.status == SAMPLED && before.token == p.ids[row];
}

// Ends a row and its slot.
__device__ inline void fail(const Sample &p, u32 row, SlotFailure failure) {
    if (threadIdx.x != 0) return;
    SampleRecord &record = p.records[row];
    record.status = failure.status;
    record.token = failure.token;
    record.value = failure.value;
    record.top_len = 0;
    p.failed[p.slots[row]] = failure;
    p.accepted[p.slots[row]] = p.depth;
}

// Bias, penalties, then allowed tokens: `to` is [vocab]. Returns whether a token is allowed.
__device__ inline bool adjust(Scratch &s, const Sample &p, const SlotSampling &of, const f32 *model, f32 *to, const u32 *late, u32 &best) {
    const u32 vocab = p.vocab;
    const f32 *from = model;
    if (of.bias_len > 0) {
        each_token(model, vocab, [&](f32 logit, u32 token) { to[token] = logit; });
        __syncthreads();
        for (i32 i = threadIdx.x; i < of.bias_len; i += THREADS) {
            const Bias bias = p.bias[of.bias_first + i];
            if (u32(bias.token) < vocab) to[bias.token] = clamped(__fadd_rn(to[bias.token], bias.value));
        }
        __syncthreads();
        from = to;
    }
    const u32 *counts = of.counts < 0 ? nullptr : p.counts + i64(of.counts) * vocab;
    const u32 *allowed = of.allowed < 0 ? nullptr : p.allowed + i64(of.allowed) * p.words;
    u64 best_key = 0;
    bool any = false;
    each_token(from, vocab, [&](f32 logit, u32 token) {
        const u32 seen = counts ? counts[token] : 0;
        if (seen) {
            logit = logit > 0.0f ? __fdiv_rn(logit, of.repetition) : __fmul_rn(logit, of.repetition);
            const u32 generated = seen & ~SEEN;
            if (generated) logit = __fsub_rn(logit, __fadd_rn(__fmul_rn(of.frequency, __uint2float_rn(generated)), of.presence));
            logit = clamped(logit);
        }
        if ((allowed && !has(allowed, token)) || (late && !has(late, token))) {
            logit = -__uint_as_float(0x7f800000u);
        } else {
            any = true;
        }
        to[token] = logit;
        const u64 key = key_of(logit, token);
        best_key = key > best_key ? key : best_key;
    });
    best = token_of(merge_block(best_key, s.lanes, Largest()));
    return merge_block(any, s.lanes, Largest());
}

// The first token whose running sum of kept shares exceeds the random number's part of their sum, which `total` is set to.
__device__ inline u32 draw(Scratch &s, const Row &row, Scale scale, u64 least, u64 &total) {
    // Each warp has consecutive tokens, a multiple of its lanes.
    const u32 chunk = (row.vocab + THREADS - 1) / THREADS * WARP;
    const auto kept = [&](f32 logit, u32 token) { return key_of(logit, token) >= least ? share_of(scale, logit) : 0; };
    const u32 begin = warp_id() * chunk, end = begin + chunk < row.vocab ? begin + chunk : row.vocab;
    u64 sum = 0;
    for (u32 first = begin + lane_id(); first < end; first += EACH * WARP) {
        f32 x[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; i++) x[i] = first + i * WARP < end ? row.logits[first + i * WARP] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) sum += first + i * WARP < end ? kept(x[i], first + i * WARP) : 0;
    }
    sum = merge_warp(sum, Add());
    if (lane_id() == 0) s.sums[warp_id()] = sum;
    __syncthreads();
    const u64 of_lane = s.sums[lane_id()], running = running_warp(of_lane);
    total = __shfl_sync(ALL_LANES, running, WARPS - 1);
    // floor(random * total / 2^53), exactly.
    const u64 target = __umul64hi(s.random, total) << 11 | s.random * total >> 53;
    const u32 warp = u32(__ffs(i32(__ballot_sync(ALL_LANES, running > target)))) - 1;
    const u64 rest = target - __shfl_sync(ALL_LANES, running - of_lane, warp);
    // All threads look at that warp's tokens.
    const u32 each = (chunk + THREADS - 1) / THREADS, from = warp * chunk + threadIdx.x * each;
    u32 to = from + each < (warp + 1) * chunk ? from + each : (warp + 1) * chunk;
    to = to < row.vocab ? to : row.vocab;
    sum = 0;
    for (u32 token = from; token < to; token++) sum += kept(row.logits[token], token);
    u64 before = running_block(sum, s.lanes).before;
    if (before <= rest && rest - before < sum) {
        u32 token = from;
        for (;; token++) {
            before += kept(row.logits[token], token);
            if (before > rest) break;
        }
        s.token = token;
    }
    __syncthreads();
    return s.token;
}

__device__ inline u64 sum_of_shares(Scratch &s, const Row &row, Scale scale) {
    u64 sum = 0;
    each_token(row.logits, row.vocab, [&](f32 logit, u32) { sum += share_of(scale, logit); });
    return merge_block(sum, s.lanes, Add());
}

// The least key of the tokens at least this part as likely as the most likely one.
__device__ inline u64 last_of_share(Scratch &s, const Row &row, Scale scale, f32 min_p) {
    const u64 enough = __double2ull_ru(f64(min_p) * 1099511627776.0); // 2^40 is one
    u64 last = ~0ull;
    each_token(row.logits, row.vocab, [&](f32 logit, u32 token) {
        if (share_of(scale, logit) < enough) return;
        const u64 key = key_of(logit, token);
        last = key < last ? key : last;
    });
    return merge_block(last, s.lanes, Smallest());
}

// The `count` most likely tokens, at least 1, to the record.
__device__ inline void report_top(Selection &s, const Row &row, u32 count, SampleRecord &record) {
    u64 least = 0, total;
    if (count < row.vocab) {
        least = select<Measure::count>(s, row.logits, row.vocab, {row.logits[row.best], 1.0f}, 0, count, 0.0, total);
    } else {
        count = row.vocab;
    }
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    each_token(row.logits, row.vocab, [&](f32 logit, u32 token) {
        const u64 key = key_of(logit, token);
        if (key >= least) s.list[atomicAdd(&s.listed, 1u)] = key;
    });
    __syncthreads();
    sort_list(s, count);
    if (threadIdx.x < count) {
        const u32 token = token_of(s.list[threadIdx.x]);
        record.top_tokens[threadIdx.x] = i32(token);
        record.top_logits[threadIdx.x] = row.logits[token];
    }
    if (threadIdx.x == 0) record.top_len = i32(count);
}

} // namespace

extern "C" __global__ void __launch_bounds__(1024) sample(Sample p) {
    __shared__ Scratch s;
    const u32 row = blockIdx.x;
    const i32 slot = p.slots[row];
    SampleRecord &record = p.records[row];
    if (slot < 0) {
        if (threadIdx.x == 0) record.status = NOT_REACHED;
        return;
    }
    if (p.depths[row] != p.depth) return;
    if (!is_reached(p, row)) {
        if (threadIdx.x == 0) record.status = NOT_REACHED;
        return;
    }
    const SlotFailure failed = p.failed[slot];
    const SlotSampling of = p.sampling[slot];
    const i32 mask = p.masks[row];
    __syncthreads(); // all have read what the slot's failure is before one may change it
    if (failed.status) return fail(p, row, failed);
    if (mask < -1) return fail(p, row, {MASK_LATE, 0, 0, 0});

    const u32 vocab = p.vocab;
    const Row model_row = {p.logits + i64(row) * vocab, vocab, 0};
    u64 best = 0, bad = ~0ull;
    each_token(model_row.logits, vocab, [&](f32 logit, u32 token) {
        const u64 key = key_of(logit, token);
        best = key > best ? key : best;
        if ((__float_as_uint(logit) & 0x7f800000u) == 0x7f800000u && token < bad) bad = token;
    });
    bad = merge_block(bad, s.lanes, Smallest());
    if (bad != ~0ull) return fail(p, row, {NOT_FINITE, i32(bad), __float_as_uint(model_row.logits[bad]), 0});
    const Row model = {model_row.logits, vocab, token_of(merge_block(best, s.lanes, Largest()))};

    Row adjusted = model;
    const bool adjusts = of.bias_len > 0 || of.counts >= 0 || of.allowed >= 0 || mask >= 0;
    if (adjusts) {
        f32 *to = p.adjusted + i64(row) * vocab;
        const u32 *late = mask < 0 ? nullptr : p.late + i64(mask) * p.words;
        adjusted.logits = to;
        if (!adjust(s, p, of, model.logits, to, late, adjusted.best)) return fail(p, row, {NOTHING_ALLOWED, 0, 0, 0});
    }

    u32 token = adjusted.best;
    u64 sum = 0; // of the shares of the model's logits at temperature 1, once it is known
    if (!of.greedy) {
        if (threadIdx.x == 0) s.random = random_bits(of.seed, of.sample_index, u64(p.positions[row]) + 1);
        const Scale scale = {adjusted.logits[adjusted.best], of.temperature};
        u64 least = 0, total = 0;
        if (of.top_k >= 1 && of.top_k < vocab) {
            least = select<Measure::count>(s.selection, adjusted.logits, vocab, scale, 0, of.top_k, 0.0, total);
        }
        if (of.min_p > 0.0f) {
            const u64 last = last_of_share(s, adjusted, scale, of.min_p);
            least = last > least ? last : least;
        }
        if (of.top_p < 1.0f) {
            const u64 kept = select<Measure::share>(s.selection, adjusted.logits, vocab, scale, least, 0, f64(of.top_p), total);
            if (least == 0 && !adjusts && of.temperature == 1.0f) sum = total;
            least = kept;
        }
        token = draw(s, adjusted, scale, least, total);
        if (least == 0 && !adjusts && of.temperature == 1.0f) sum = total;
    }

    if (of.logprobs >= 0 && sum == 0) sum = sum_of_shares(s, model, {model.logits[model.best], 1.0f});
    if (of.logprobs > 0) {
        report_top(s.selection, model, u32(of.logprobs), record);
    } else if (threadIdx.x == 0) {
        record.top_len = 0;
    }
    if (threadIdx.x != 0) return;
    record.status = SAMPLED;
    record.token = i32(token);
    record.value = 0;
    record.chosen = model.logits[token];
    record.best = model.logits[model.best];
    record.sum = of.logprobs >= 0 ? sum : 0;
    p.last[slot] = i32(token);
    p.accepted[slot] = p.depth;
    if (of.counts >= 0) {
        u32 &count = p.counts[i64(of.counts) * vocab + token];
        count = (count + 1) | SEEN;
    }
}
