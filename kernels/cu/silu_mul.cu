// The activation of the MLP, behind a product that does not compute it itself. One thread has 8 neighbouring values.
#include "numerics.cuh"
#include "params/model.h"

constexpr i32 THREADS = 256;

template <class T> __device__ inline u32 inner_pair(u32 gate, u32 up) {
    const f32 low = gated(widened<T>(u16(gate)), widened<T>(u16(up)));
    const f32 high = gated(widened<T>(u16(gate >> 16)), widened<T>(u16(up >> 16)));
    return rounded_pair<T>(low, high);
}

template <class T> __device__ inline void silu_mul(const SiluMul &p) {
    const i32 chunks = p.ffn / 8;
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= i64(p.rows) * chunks) return;
    const i64 row = at / chunks;
    const i32 chunk = i32(at % chunks);
    const uint4 *pair = reinterpret_cast<const uint4 *>(p.gate_up + row * 2 * p.ffn) + 2 * chunk;
    const uint4 gate = pair[0], up = pair[1];
    uint4 inner;
    inner.x = inner_pair<T>(gate.x, up.x);
    inner.y = inner_pair<T>(gate.y, up.y);
    inner.z = inner_pair<T>(gate.z, up.z);
    inner.w = inner_pair<T>(gate.w, up.w);
    reinterpret_cast<uint4 *>(p.inner + row * p.ffn)[chunk] = inner;
}

extern "C" __global__ void __launch_bounds__(THREADS) silu_mul_bf16(const __grid_constant__ SiluMul p) { silu_mul<Bf16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul_f16(const __grid_constant__ SiluMul p) { silu_mul<F16>(p); }
