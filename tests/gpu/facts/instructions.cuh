// mma.sync and wgmma, one instruction each, over operands in device memory. X is [m, k], W is [n, k], C and D are [m, n].
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

__device__ inline uint32_t pair(const uint16_t *at) { return *reinterpret_cast<const uint32_t *>(at); }

template <bool bf16> __device__ inline void mma_k16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    if constexpr (bf16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

template <bool bf16> __device__ inline void mma_k8(float d[4], const uint32_t a[2], uint32_t b) {
    if constexpr (bf16) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b));
    } else {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b));
    }
}

// One warp has a tile of 16 rows and 8 columns, k ascending. `c` may be null: the sum starts at +0.
template <bool bf16, int step>
__global__ void by_mma(float *d, const float *c, const uint16_t *x, const uint16_t *w, int m, int n, int k) {
    const int tiles = (n + 7) / 8;
    const long tile = (long(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32, group = lane / 4, third = lane % 4;
    const int row = int(tile / tiles) * 16 + group, column = int(tile % tiles) * 8;
    if (row - group >= m) return;
    const bool low = row < m, high = row + 8 < m, inside = column + group < n;
    const uint16_t *x_low = x + long(row) * k, *x_high = x_low + 8l * k, *w_row = w + long(column + group) * k;
    float sum[4] = {0, 0, 0, 0};
    const int out = column + third * 2;
    for (int i = 0; c && i < 4; i++) {
        const int r = row + i / 2 * 8, at = out + i % 2;
        if (r < m && at < n) sum[i] = c[long(r) * n + at];
    }
    for (int at = 0; at < k; at += step) {
        const int i = at + third * 2;
        if constexpr (step == 16) {
            const uint32_t a[4] = {low ? pair(x_low + i) : 0, high ? pair(x_high + i) : 0, low ? pair(x_low + i + 8) : 0,
                                   high ? pair(x_high + i + 8) : 0};
            const uint32_t b[2] = {inside ? pair(w_row + i) : 0, inside ? pair(w_row + i + 8) : 0};
            mma_k16<bf16>(sum, a, b);
        } else {
            const uint32_t a[2] = {low ? pair(x_low + i) : 0, high ? pair(x_high + i) : 0};
            mma_k8<bf16>(sum, a, inside ? pair(w_row + i) : 0);
        }
    }
    for (int i = 0; i < 4; i++) {
        const int r = row + i / 2 * 8, at = out + i % 2;
        if (r < m && at < n) d[long(r) * n + at] = sum[i];
    }
}

// A shared-memory descriptor without swizzle: core matrices of 8 rows by 16 bytes, 128 bytes apart in k, 256 in rows.
__device__ inline uint64_t descriptor(const void *shared) {
    const uint64_t address = uint64_t(__cvta_generic_to_shared(shared));
    return (address & 0x3ffff) >> 4 | uint64_t(128 >> 4) << 16 | uint64_t(256 >> 4) << 32;
}

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define R64(d, i) R16(d, i), R16(d, i + 16), R16(d, i + 32), R16(d, i + 48)
#define WGMMA(shape, types, registers, a, b, scale)                                                                                        \
    "{ .reg .pred p; setp.ne.b32 p, %" scale ", 0; wgmma.mma_async.sync.aligned." shape ".f32." types " {" registers "}, %" a ", %" b      \
    ", p, 1, 1, 0, 0; }"
#define N4 "%0,%1,%2,%3"
#define N32                                                                                                                                \
    N4 ",%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define N128                                                                                                                               \
    N32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"    \
        "%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,"     \
        "%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,"     \
        "%120,%121,%122,%123,%124,%125,%126,%127"

template <bool bf16, int n> __device__ inline void wgmma_k16(float *d, uint64_t a, uint64_t b, int accumulate) {
#define ISSUE(types)                                                                                                                       \
    if constexpr (n == 8) {                                                                                                                \
        asm volatile(WGMMA("m64n8k16", types, N4, "4", "5", "6") : R4(d, 0) : "l"(a), "l"(b), "r"(accumulate));                            \
    } else if constexpr (n == 64) {                                                                                                        \
        asm volatile(WGMMA("m64n64k16", types, N32, "32", "33", "34") : R16(d, 0), R16(d, 16) : "l"(a), "l"(b), "r"(accumulate));          \
    } else {                                                                                                                               \
        asm volatile(WGMMA("m64n256k16", types, N128, "128", "129", "130") : R64(d, 0), R64(d, 64) : "l"(a), "l"(b), "r"(accumulate));     \
    }
    if constexpr (bf16) {
        ISSUE("bf16.bf16")
    } else {
        ISSUE("f16.f16")
    }
#undef ISSUE
}

// The same with X in registers, n = 8.
template <bool bf16> __device__ inline void wgmma_k16_registers(float *d, const uint32_t a[4], uint64_t b, int accumulate) {
#define ISSUE(types)                                                                                                                       \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32." types                                  \
                 " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0; }"                                                                        \
                 : R4(d, 0)                                                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
    if constexpr (bf16) {
        ISSUE("bf16.bf16");
    } else {
        ISSUE("f16.f16");
    }
#undef ISSUE
}

// One warpgroup has 64 rows and `width` columns; m and n are multiples of these. Without `c` the first instruction
// does not accumulate (scale-d = 0).
template <bool bf16, int width, bool from_registers>
__global__ void by_wgmma(float *d, const float *c, const uint16_t *x, const uint16_t *w, int n, int k) {
    __shared__ alignas(128) uint16_t a[64 * 16], b[width * 16];
    const int row = blockIdx.y * 64, column = blockIdx.x * width, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int first = row + warp * 16 + lane / 4, right = lane % 4 * 2;
    float sum[width / 2];
    for (int i = 0; i < width / 2; i++) {
        const long at = long(first + i / 2 % 2 * 8) * n + column + i / 4 * 8 + right + i % 2;
        sum[i] = c ? c[at] : 123.0f;
    }
    for (int at = 0; at < k; at += 16) {
        __syncthreads();
        for (int i = thread; i < 64 * 16; i += 128) {
            const int r = i / 16, inside = i % 16;
            a[r / 8 * 128 + inside / 8 * 64 + r % 8 * 8 + inside % 8] = x[long(row + r) * k + at + inside];
        }
        for (int i = thread; i < width * 16; i += 128) {
            const int r = i / 16, inside = i % 16;
            b[r / 8 * 128 + inside / 8 * 64 + r % 8 * 8 + inside % 8] = w[long(column + r) * k + at + inside];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const int accumulate = c || at > 0;
        if constexpr (from_registers) {
            const uint16_t *low = x + long(first) * k + at + right, *high = low + 8l * k;
            const uint32_t registers[4] = {pair(low), pair(high), pair(low + 8), pair(high + 8)};
            wgmma_k16_registers<bf16>(sum, registers, descriptor(b), accumulate);
        } else {
            wgmma_k16<bf16, width>(sum, descriptor(a), descriptor(b), accumulate);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    for (int i = 0; i < width / 2; i++) {
        const long at = long(first + i / 2 % 2 * 8) * n + column + i / 4 * 8 + right + i % 2;
        d[at] = sum[i];
    }
}
