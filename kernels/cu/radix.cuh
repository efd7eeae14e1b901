// Top-k and top-p: the smallest key that is kept, by radix selection over digits of eight bits.
//
// The digits are those of the key, behind two of its nearness: an integer that never falls where the key rises, so that the order is the
// same. Nearness tells tokens apart at once, where the first digits of keys are nearly all equal. As soon as the tokens of a digit fit a
// list in shared memory, the list is sorted. The smallest key that is kept does not depend on any of this.
#pragma once

#include "block.cuh"
#include "shares.cuh"

constexpr u32 DIGIT = 8;
constexpr u32 SUMS = 1 << DIGIT;
constexpr u32 LIST = 2 * THREADS;
constexpr u32 EACH = 4; // logits that a thread loads before it uses one

// In shared memory.
struct Selection {
    u64 lanes[WARPS];
    u64 list[LIST];
    u32 counts[SUMS];       // tokens by digit
    u32 low[SUMS], high[SUMS]; // their shares: halves of a sum of 64 bits
    u32 listed;
    u32 digit;              // at which the goal is reached
    u64 before;             // what the digits above it hold
    u64 found;
};

// Calls f(logit, token) for each token, by all threads of the CTA.
template <class F> __device__ inline void each_token(const f32 *logits, u32 vocab, F f) {
    for (u32 first = threadIdx.x; first < vocab; first += EACH * THREADS) {
        f32 x[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; i++) x[i] = first + i * THREADS < vocab ? logits[first + i * THREADS] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            if (first + i * THREADS < vocab) f(x[i], first + i * THREADS);
        }
    }
}

// 65,535 for the best logit, 0 far below it: where shares at this temperature are 0.
__device__ inline u32 nearness(Scale scale, f32 steps, f32 logit) {
    const f32 below = __fmul_rn(__fsub_rn(scale.best, logit), steps);
    return 65535u - u32(__float2int_rz(below < 65535.0f ? below : 65535.0f));
}

// Nearness and key: 80 bits, of which the first `bits` are `prefix`.
struct Digits {
    u32 near;
    u64 key;

    __device__ u32 at(u32 bits) const {
        return bits < 16 ? near >> (8 - bits) & 255 : u32(key >> (72 - bits)) & 255;
    }
    __device__ bool begins_with(u32 near_prefix, u64 key_prefix, u32 bits) const {
        if (bits < 16) return near >> (16 - bits) == near_prefix;
        return near == near_prefix && (bits == 16 || key >> (80 - bits) == key_prefix);
    }
};

// Adds a share to the sum of a digit. A carry is noticed by the one addition that causes it, so the halves are exact in every order.
__device__ inline void add_share(Selection &s, u32 digit, u64 share) {
    const u32 low = u32(share), before = atomicAdd(&s.low[digit], low);
    const u32 high = u32(share >> 32) + (before + low < low);
    if (high) atomicAdd(&s.high[digit], high);
}

// Sorts list[0 .. count], largest first. What is behind, up to a power of two, becomes 0.
__device__ inline void sort_list(Selection &s, u32 count) {
    u32 size = 2;
    while (size < count) size *= 2;
    for (u32 at = count + threadIdx.x; at < size; at += THREADS) s.list[at] = 0;
    __syncthreads();
    for (u32 run = 2; run <= size; run *= 2) {
        for (u32 apart = run / 2; apart > 0; apart /= 2) {
            if (threadIdx.x < size / 2) {
                const u32 low = threadIdx.x & (apart - 1), at = (threadIdx.x - low) * 2 + low;
                const u64 a = s.list[at], b = s.list[at + apart];
                const bool descends = (at & run) == 0;
                if ((a < b) == descends) {
                    s.list[at] = b;
                    s.list[at + apart] = a;
                }
            }
            __syncthreads();
        }
    }
}

// What a selection counts.
enum class Measure { count, share };

// The smallest of the largest keys that together reach a goal; 0 if all do not. Keys below `least` count for nothing. With Measure::count
// each key counts 1 and the goal is `goal`. With Measure::share each counts its share, and the goal is ceil(part * sum), at least 1;
// `total` is set to that sum.
template <Measure measure>
__device__ inline u64 select(Selection &s, const f32 *logits, u32 vocab, Scale scale, u64 least, u64 goal, f64 part, u64 &total) {
    constexpr bool by_share = measure == Measure::share;
    // 28: e^-28 is below 2^-40, so that all tokens with a share are nearer.
    const f32 steps = __fdiv_rn(65535.0f / 28.0f, scale.temperature);
    u32 near_prefix = 0, bits = 0, count = 0;
    u64 key_prefix = 0;
    do {
        __syncthreads(); // the pass before may still be read
        if (threadIdx.x < SUMS) s.counts[threadIdx.x] = s.low[threadIdx.x] = s.high[threadIdx.x] = 0;
        __syncthreads();
        each_token(logits, vocab, [&](f32 logit, u32 token) {
            const Digits digits = {nearness(scale, steps, logit), key_of(logit, token)};
            if (digits.key < least || !digits.begins_with(near_prefix, key_prefix, bits)) return;
            const u64 share = by_share ? share_of(scale, logit) : 1;
            if (share == 0) return;
            atomicAdd(&s.counts[digits.at(bits)], 1u);
            if (by_share) add_share(s, digits.at(bits), share);
        });
        __syncthreads();
        // Thread 0 has the largest digit.
        const u32 digit = SUMS - 1 - threadIdx.x % SUMS;
        u64 sum = 0;
        if (threadIdx.x < SUMS) sum = by_share ? u64(s.high[digit]) << 32 | s.low[digit] : s.counts[digit];
        const Running running = running_block(sum, s.lanes);
        if (bits == 0) {
            total = running.all;
            if (by_share) {
                goal = __double2ull_ru(__dmul_rn(part, __ull2double_rn(total)));
                goal = goal > 0 ? goal : 1;
            }
            if (total < goal) return 0;
        }
        if (running.before < goal && goal - running.before <= sum) {
            s.digit = digit;
            s.before = running.before;
        }
        __syncthreads();
        goal -= s.before;
        count = s.counts[s.digit];
        if (bits < 16) {
            near_prefix = near_prefix << DIGIT | s.digit;
        } else {
            key_prefix = key_prefix << DIGIT | s.digit;
        }
        bits += DIGIT;
    } while (count > LIST);

    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    each_token(logits, vocab, [&](f32 logit, u32 token) {
        const Digits digits = {nearness(scale, steps, logit), key_of(logit, token)};
        if (digits.key < least || !digits.begins_with(near_prefix, key_prefix, bits)) return;
        if (by_share && share_of(scale, logit) == 0) return;
        s.list[atomicAdd(&s.listed, 1u)] = digits.key;
    });
    __syncthreads();
    sort_list(s, count);
    const u32 first = 2 * threadIdx.x;
    u64 pair[2] = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        if (first + i < count) pair[i] = by_share ? share_of(scale, logit_of(s.list[first + i])) : 1;
    }
    const u64 before = running_block(pair[0] + pair[1], s.lanes).before;
    if (before < goal && goal - before <= pair[0] + pair[1]) s.found = s.list[goal - before <= pair[0] ? first : first + 1];
    __syncthreads();
    return s.found;
}
