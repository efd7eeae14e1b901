// Rows of the residual stream and of the query that a later layer needs. Values are moved as bits.
#include "params/model.h"

constexpr i32 THREADS = 256;

__device__ inline void select(const Select &p) {
    const i32 row = i32(blockIdx.x), chosen = p.chosen[row];
    const f32 *__restrict__ residual = p.residual + i64(chosen) * p.hidden;
    const u16 *__restrict__ q = p.q + i64(chosen) * p.q_stride;
    f32 *__restrict__ residual_out = p.residual_out + i64(row) * p.hidden;
    u16 *__restrict__ q_out = p.q_out + i64(row) * p.query;
    for (i32 i = i32(threadIdx.x); i < p.hidden; i += THREADS) residual_out[i] = chosen < 0 ? 0.0f : residual[i];
    for (i32 i = i32(threadIdx.x); i < p.query; i += THREADS) q_out[i] = chosen < 0 ? u16(0) : q[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) select_bf16(const __grid_constant__ Select p) { select(p); }
extern "C" __global__ void __launch_bounds__(THREADS) select_f16(const __grid_constant__ Select p) { select(p); }
