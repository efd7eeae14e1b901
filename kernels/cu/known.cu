// Known answers: the instructions that the numerics classes and sampling rest on, over operands in memory, for the host to compare with its
// own twins of them. Not part of a step.

#include "blake3.cuh"
#include "params/known.h"
#include "shares.cuh"
#if __has_include("numerics.cuh")
#include "numerics.cuh"
#endif

namespace {

__device__ inline u32 pair(const u16 *at) { return *reinterpret_cast<const u32 *>(at); }

// d += a b of one instruction; fragments as the PTX manual draws them.
template <bool bf16> __device__ inline void mma_k16(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
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

// A warp has a tile of 16 rows and 8 columns.
template <bool bf16> __device__ inline void tiles_by_mma(const KnownTiles &p) {
    const i32 tile = blockIdx.x, lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;
    const u16 *low = p.a + (i64(tile) * 16 + row) * p.k, *high = low + i64(8) * p.k;
    const u16 *right = p.b + (i64(tile) * 8 + row) * p.k; // here `row` is a column of the tile
    const f32 *c = p.c + i64(tile) * 128 + row * 8 + column;
    f32 sum[4] = {c[0], c[1], c[64], c[65]};
    for (i32 k = column; k < p.k; k += 16) {
        const u32 a[4] = {pair(low + k), pair(high + k), pair(low + k + 8), pair(high + k + 8)};
        const u32 b[2] = {pair(right + k), pair(right + k + 8)};
        mma_k16<bf16>(sum, a, b);
    }
    f32 *d = p.d + i64(tile) * 128 + row * 8 + column;
    d[0] = sum[0];
    d[1] = sum[1];
    d[64] = sum[2];
    d[65] = sum[3];
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A shared-memory descriptor without swizzle: core matrices of 8 rows by 16 bytes, 128 bytes apart in k, 256 in rows.
__device__ inline u64 descriptor(const void *shared) {
    const u64 address = __cvta_generic_to_shared(shared);
    return (address & 0x3ffff) >> 4 | u64(128 >> 4) << 16 | u64(256 >> 4) << 32;
}

template <bool bf16> __device__ inline void wgmma_k16(f32 (&d)[4], u64 a, u64 b) {
    if constexpr (bf16) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, p, "
                     "1, 1, 0, 0; }"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "l"(a), "l"(b), "r"(1));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, p, "
                     "1, 1, 0, 0; }"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "l"(a), "l"(b), "r"(1));
    }
}

// A warpgroup has a tile of 64 rows and 8 columns.
template <bool bf16> __device__ inline void tiles_by_wgmma(const KnownTiles &p) {
    __shared__ alignas(128) u16 a[64 * 16], b[8 * 16];
    const i32 tile = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
    const i32 row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
    const u16 *left = p.a + i64(tile) * 64 * p.k, *right = p.b + i64(tile) * 8 * p.k;
    const f32 *c = p.c + i64(tile) * 512 + row * 8 + column;
    f32 sum[4] = {c[0], c[1], c[64], c[65]};
    for (i32 k = 0; k < p.k; k += 16) {
        __syncthreads();
        for (i32 i = thread; i < 72 * 16; i += 128) {
            const i32 r = i / 16, inside = i % 16;
            const i32 core = inside / 8 * 64 + r % 8 * 8 + inside % 8;
            if (r < 64) {
                a[r / 8 * 128 + core] = left[i64(r) * p.k + k + inside];
            } else {
                b[core] = right[i64(r - 64) * p.k + k + inside];
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        wgmma_k16<bf16>(sum, descriptor(a), descriptor(b));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    f32 *d = p.d + i64(tile) * 512 + row * 8 + column;
    d[0] = sum[0];
    d[1] = sum[1];
    d[64] = sum[2];
    d[65] = sum[3];
}

#endif

__device__ inline u32 to_bf16(f32 x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ inline u32 to_f16(f32 x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ inline f32 of_f16(u16 bits) {
    f32 x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

template <class F> __device__ inline void each_f32(const KnownF32 &p, F f) {
    const i32 step = gridDim.x * blockDim.x;
    for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += step) {
        p.out[i] = f(p.x[i], p.y ? p.y[i] : 0.0f, p.z ? p.z[i] : 0.0f);
    }
}

template <class F> __device__ inline void each_f64(const KnownF64 &p, F f) {
    const i32 step = gridDim.x * blockDim.x;
    for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += step) {
        p.out[i] = f(p.x ? p.x[i] : 0.0, p.y ? p.y[i] : 0.0, p.n ? p.n[i] : 0);
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(32) known_mma_bf16(KnownTiles p) { tiles_by_mma<true>(p); }
extern "C" __global__ void __launch_bounds__(32) known_mma_f16(KnownTiles p) { tiles_by_mma<false>(p); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __global__ void __launch_bounds__(128) known_wgmma_bf16(KnownTiles p) { tiles_by_wgmma<true>(p); }
extern "C" __global__ void __launch_bounds__(128) known_wgmma_f16(KnownTiles p) { tiles_by_wgmma<false>(p); }
#endif

#define KNOWN_F32(name, expression)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) known_##name(KnownF32 p) {                                                           \
        each_f32(p, [](f32 x, f32 y, f32 z) -> u32 {                                                                                       \
            (void)y, (void)z;                                                                                                              \
            return expression;                                                                                                             \
        });                                                                                                                                \
    }
#define KNOWN_F64(name, expression)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) known_##name(KnownF64 p) {                                                           \
        each_f64(p, [](f64 x, f64 y, u64 n) -> u64 {                                                                                       \
            (void)x, (void)y, (void)n;                                                                                                     \
            return expression;                                                                                                             \
        });                                                                                                                                \
    }

KNOWN_F32(add, __float_as_uint(__fadd_rn(x, y)))
KNOWN_F32(mul, __float_as_uint(__fmul_rn(x, y)))
KNOWN_F32(fma, __float_as_uint(__fmaf_rn(x, y, z)))
KNOWN_F32(div, __float_as_uint(__fdiv_rn(x, y)))
KNOWN_F32(sqrt, __float_as_uint(__fsqrt_rn(x)))
KNOWN_F32(to_bf16, to_bf16(x))
KNOWN_F32(to_f16, to_f16(x))
KNOWN_F32(of_f16, __float_as_uint(of_f16(u16(__float_as_uint(x))))) // of the lower half of the bits
KNOWN_F32(to_i32, u32(__float2int_rz(x)))
KNOWN_F32(of_u32, __float_as_uint(__uint2float_rn(__float_as_uint(x))))
KNOWN_F32(share_exp, __float_as_uint(share_exp(x)))
#if __has_include("numerics.cuh")
KNOWN_F32(exp, __float_as_uint(exp_(x)))
KNOWN_F32(exp2, __float_as_uint(exp2_(x)))
#endif
KNOWN_F32(ordered, ordered(x))

KNOWN_F64(mul_f64, u64(__double_as_longlong(__dmul_rn(x, y))))
KNOWN_F64(to_u64_up, __double2ull_ru(x))
KNOWN_F64(of_u64, u64(__double_as_longlong(__ull2double_rn(n))))
KNOWN_F64(share, share_of({f32(x), f32(y)}, __uint_as_float(u32(n)))) // best, temperature, bits of a logit
KNOWN_F64(random, random_bits(n, u32(n >> 7), n * 3))
