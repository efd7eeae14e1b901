// Every instruction that the kernels write as PTX, one a function. All need compute capability 8.0.
#pragma once

#include "types.cuh"

// The formats of 16 bits, passed as their bits.
struct Bf16 {};
struct F16 {};

// Rounded to nearest even. Subnormals are kept; what is too large is infinite.
template <class T> __device__ inline u16 rounded(f32 x);
template <> __device__ inline u16 rounded<Bf16>(f32 x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
template <> __device__ inline u16 rounded<F16>(f32 x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Both rounded; `low` is in the lower half, hence first in memory.
template <class T> __device__ inline u32 rounded_pair(f32 low, f32 high);
template <> __device__ inline u32 rounded_pair<Bf16>(f32 low, f32 high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
template <> __device__ inline u32 rounded_pair<F16>(f32 low, f32 high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

template <class T> __device__ inline f32 widened(u16 bits);
template <> __device__ inline f32 widened<Bf16>(u16 bits) { return __uint_as_float(u32(bits) << 16); }
template <> __device__ inline f32 widened<F16>(u16 bits) {
    f32 x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// The larger one; NaN if either is.
__device__ inline f32 max_or_nan(f32 a, f32 b) {
    f32 max;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
    return max;
}

// d = a b + d, with a [16, 16] in rows and b [16, 8] in columns. With group = lane / 4 and third = lane % 4, a thread has
//   a: (group, 2 third), (group + 8, 2 third), (group, 2 third + 8), (group + 8, 2 third + 8), each with the next column
//   b: (2 third, group), (2 third + 8, group), each with the next row
//   d: (group, 2 third), the next column, and both of row group + 8
template <class T> __device__ inline void mma(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> __device__ inline void mma<Bf16>(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ inline void mma<F16>(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 rows of 16 bytes. Lane l has the address of row l % 8 of matrix l / 8; it gets elements 2 (l % 4) and the next of row
// l / 4 of each.
__device__ inline void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same of the transposed matrices: row l / 4 is a column in shared memory.
__device__ inline void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Copies 16 bytes to shared memory past the first-level cache. If not `inside`, nothing is read, and 16 zeros are written; `from` must be a
// global address all the same.
__device__ inline void copy_async(u32 to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Closes this thread's group of copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's groups are incomplete.
template <int pending> __device__ inline void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// The address in the window of shared memory.
__device__ inline u32 shared_address(const void *at) { return u32(__cvta_generic_to_shared(at)); }

// The CTA's dynamic shared memory.
__device__ inline u8 *dynamic_shared() {
    extern __shared__ __align__(128) u8 bytes[];
    return bytes;
}
