// Which algorithms of cuBLASLt give the bits of mma.sync with k ascending, over M, and what the others would gain.
//
//   products     one line a shape and M; `exact` counts algorithms whose every output has our bits

#include "inputs.h"
#include "instructions.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <map>
#include <string>

#define CHECK(call)                                                                                                                        \
    do {                                                                                                                                   \
        const int error = int(call);                                                                                                       \
        if (error != 0) {                                                                                                                  \
            printf("%s: error %d\n", #call, error);                                                                                        \
            exit(1);                                                                                                                       \
        }                                                                                                                                  \
    } while (0)

__global__ void fill(uint16_t *values, long count, uint64_t seed, int spread, int sign_pairs, int fraction_bits, int bias) {
    for (long i = long(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += long(gridDim.x) * blockDim.x) {
        // Of the cancelling matrix each second value is the negative of the one before it; its partner repeats.
        uint64_t z = (seed + uint64_t(i / 2)) * 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        const int exponent = bias + int(z % uint64_t(2 * spread + 1)) - spread;
        const uint32_t sign = uint32_t(z >> 40 & 1) ^ uint32_t(sign_pairs & int(i & 1));
        const uint32_t low = (uint32_t(z >> 50) & ((1u << fraction_bits) - 1)) ^ uint32_t((i & 1) && (z >> 60) < 5);
        values[i] = uint16_t(sign << 15 | uint32_t(exponent) << fraction_bits | low);
    }
}

__global__ void round_all(uint16_t *out, const float *in, long count, bool bf16) {
    for (long i = long(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += long(gridDim.x) * blockDim.x) {
        out[i] = bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(in[i])) : __half_as_ushort(__float2half_rn(in[i]));
    }
}

template <typename T> __global__ void count_differing(unsigned long long *found, const T *a, const T *b, long count) {
    unsigned long long mine = 0;
    for (long i = long(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += long(gridDim.x) * blockDim.x) mine += a[i] != b[i];
    if (mine) atomicAdd(found, mine);
}

struct Algorithm {
    cublasLtMatmulAlgo_t algo;
    int id, tile, stages, split, reduction, swizzle, custom, inner, cluster;
    bool operator<(const Algorithm &o) const { return name() < o.name(); }
    std::string name() const {
        char text[160];
        snprintf(text, sizeof text, "id %d tile %d stages %d split %d reduction %d swizzle %d custom %d inner %d cluster %d", id, tile, stages, split,
                 reduction, swizzle, custom, inner, cluster);
        return text;
    }
};

template <typename T> int attribute(const cublasLtMatmulAlgo_t &algo, cublasLtMatmulAlgoConfigAttributes_t of) {
    T value = 0;
    size_t written;
    if (cublasLtMatmulAlgoConfigGetAttribute(&algo, of, &value, sizeof value, &written) != CUBLAS_STATUS_SUCCESS) return -1;
    return int(value);
}

Algorithm named(const cublasLtMatmulAlgo_t &algo) {
    return {algo,
            attribute<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID),
            attribute<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
            attribute<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
            attribute<int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
            attribute<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
            attribute<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
            attribute<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
            attribute<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
            attribute<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)};
}

const size_t WORKSPACE = 64 << 20;
cublasLtHandle_t handle;
void *workspace, *flush;
unsigned long long *found;

// D [m, n] = X [m, k] times W [n, k] transposed: column-major D^T = W^T of X^T.
struct Product {
    int m, n, k;
    cudaDataType_t out;
    cublasLtMatmulDesc_t description;
    cublasLtMatrixLayout_t w, x, d;

    Product(int m, int n, int k, cudaDataType_t in, cudaDataType_t out) : m(m), n(n), k(k), out(out) {
        CHECK(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        const cublasOperation_t transposed = CUBLAS_OP_T;
        CHECK(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
        CHECK(cublasLtMatrixLayoutCreate(&w, in, k, n, k));
        CHECK(cublasLtMatrixLayoutCreate(&x, in, k, m, k));
        CHECK(cublasLtMatrixLayoutCreate(&d, out, n, m, n));
    }
    ~Product() {
        cublasLtMatmulDescDestroy(description);
        for (auto layout : {w, x, d}) cublasLtMatrixLayoutDestroy(layout);
    }
    std::vector<Algorithm> algorithms(uint32_t reductions, int most) const {
        cublasLtMatmulPreference_t preference;
        CHECK(cublasLtMatmulPreferenceCreate(&preference));
        CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE, sizeof WORKSPACE));
        CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions));
        std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
        int count = 0;
        cublasLtMatmulAlgoGetHeuristic(handle, description, w, x, d, d, preference, most, results.data(), &count);
        cublasLtMatmulPreferenceDestroy(preference);
        std::vector<Algorithm> all;
        for (int i = 0; i < count; i++)
            if (results[size_t(i)].state == CUBLAS_STATUS_SUCCESS) all.push_back(named(results[size_t(i)].algo));
        return all;
    }
    bool run(const Algorithm &by, const void *x_at, const void *w_at, void *d_at) const {
        const float one = 1, zero = 0;
        return cublasLtMatmul(handle, description, &one, w_at, w, x_at, x, &zero, d_at, d, d_at, d, &by.algo, workspace, WORKSPACE, nullptr) ==
               CUBLAS_STATUS_SUCCESS;
    }
    // Median seconds of a run with weights out of the second-level cache.
    double seconds(const Algorithm &by, const void *x_at, const void *w_at, void *d_at) const {
        cudaEvent_t start, end;
        CHECK(cudaEventCreate(&start));
        CHECK(cudaEventCreate(&end));
        std::vector<float> all;
        for (int i = 0; i < 7; i++) {
            CHECK(cudaMemsetAsync(flush, i, 128 << 20));
            CHECK(cudaEventRecord(start));
            run(by, x_at, w_at, d_at);
            CHECK(cudaEventRecord(end));
            CHECK(cudaEventSynchronize(end));
            float milliseconds;
            CHECK(cudaEventElapsedTime(&milliseconds, start, end));
            if (i > 1) all.push_back(milliseconds);
        }
        std::sort(all.begin(), all.end());
        CHECK(cudaEventDestroy(start));
        CHECK(cudaEventDestroy(end));
        return all[all.size() / 2] / 1e3;
    }
};

template <typename T> long differing(const void *a, const void *b, long count) {
    CHECK(cudaMemset(found, 0, sizeof *found));
    count_differing<T><<<1024, 256>>>(found, static_cast<const T *>(a), static_cast<const T *>(b), count);
    unsigned long long result;
    CHECK(cudaMemcpy(&result, found, sizeof result, cudaMemcpyDeviceToHost));
    return long(result);
}

struct Tally {
    int exact = 0, not_exact = 0;
};
std::map<std::string, Tally> by_identity[2]; // id, reduction and split; outputs in f32, then narrow ones

void shape(int n, int k, const std::vector<int> &rows, bool bf16 = true) {
    const cudaDataType_t narrow = bf16 ? CUDA_R_16BF : CUDA_R_16F;
    const int most = *std::max_element(rows.begin(), rows.end());
    uint16_t *x, *w, *rounded;
    float *ours;
    void *theirs;
    CHECK(cudaMalloc(&x, 2ul * most * k));
    CHECK(cudaMalloc(&w, 2ul * n * k));
    CHECK(cudaMalloc(&ours, 4ul * most * n));
    CHECK(cudaMalloc(&rounded, 2ul * most * n));
    CHECK(cudaMalloc(&theirs, 4ul * most * n));
    for (int m : rows) {
        for (cudaDataType_t out : {CUDA_R_32F, narrow}) {
            const bool f32 = out == CUDA_R_32F;
            const Product product(m, n, k, narrow, out);
            const auto plain = product.algorithms(CUBLASLT_REDUCTION_SCHEME_NONE, 128), any = product.algorithms(CUBLASLT_REDUCTION_SCHEME_MASK, 128);
            std::vector<long> differences(plain.size(), 0), of_any(any.size(), 0);
            std::vector<bool> ran(plain.size(), true);
            for (int kind = 0; kind < 2; kind++) { // independent values of wide exponents, then cancelling pairs
                const int spread = bf16 ? (kind ? 8 : 12) : 5, fraction_bits = bf16 ? 7 : 10, bias = bf16 ? 127 : 13;
                fill<<<1024, 256>>>(x, long(m) * k, 1 + kind, spread, kind, fraction_bits, bias);
                fill<<<1024, 256>>>(w, long(n) * k, 1000003 + kind, spread, 0, fraction_bits, bias);
                const long tiles = long((m + 15) / 16) * ((n + 7) / 8);
                if (bf16) by_mma<true, 16><<<unsigned((tiles + 3) / 4), 128>>>(ours, nullptr, x, w, m, n, k);
                else by_mma<false, 16><<<unsigned((tiles + 3) / 4), 128>>>(ours, nullptr, x, w, m, n, k);
                round_all<<<1024, 256>>>(rounded, ours, long(m) * n, bf16);
                CHECK(cudaDeviceSynchronize());
                const auto compare = [&](const Algorithm &by) -> long {
                    CHECK(cudaMemset(theirs, 0xee, 4ul * m * n));
                    if (!product.run(by, x, w, theirs) || cudaDeviceSynchronize() != cudaSuccess) return -1;
                    return f32 ? differing<uint32_t>(theirs, ours, long(m) * n) : differing<uint16_t>(theirs, rounded, long(m) * n);
                };
                for (size_t i = 0; i < plain.size(); i++) {
                    const long d = compare(plain[i]);
                    if (d < 0) ran[i] = false;
                    else differences[i] += d;
                }
                for (size_t i = 0; i < any.size() && i < 8; i++) of_any[i] += compare(any[i]);
            }
            int exact = 0;
            double fastest_exact = 1e9, fastest = 1e9, first_plain = 0, first_any = 0;
            std::string fastest_name = "none";
            for (size_t i = 0; i < plain.size(); i++) {
                if (!ran[i]) continue;
                Tally &tally = by_identity[f32 ? 0 : 1]["id " + std::to_string(plain[i].id) + " reduction " + std::to_string(plain[i].reduction) + " split " + std::to_string(plain[i].split)];
                (differences[i] == 0 ? tally.exact : tally.not_exact) += 1;
                exact += differences[i] == 0;
                if (i >= 24 && differences[i]) continue;
                const double seconds = product.seconds(plain[i], x, w, theirs);
                if (i == 0) first_plain = seconds;
                fastest = std::min(fastest, seconds);
                if (differences[i] == 0 && seconds < fastest_exact) {
                    fastest_exact = seconds;
                    fastest_name = plain[i].name();
                }
            }
            for (size_t i = 0; i < any.size() && i < 8; i++) {
                const double seconds = product.seconds(any[i], x, w, theirs);
                if (i == 0) first_any = seconds;
                fastest = std::min(fastest, seconds);
            }
            const double flops = 2.0 * m * n * k, bytes = 2.0 * n * k + 2.0 * m * k + (f32 ? 4.0 : 2.0) * m * n;
            printf("n %d k %d m %d %s: %d of %zu without reduction are exact; first of these %s; first of any (split %d, reduction %d) differs in %ld of %ld; "
                   "fastest exact %.1f us (%.0f TFLOP/s, %.0f GB/s), first without reduction %.1f, first of any %.1f, fastest seen %.1f; exact/any %.3f; %s\n",
                   n, k, m, f32 ? (bf16 ? "bf16 to f32" : "f16 to f32") : bf16 ? "bf16" : "f16", exact, plain.size(), plain.empty() ? "absent" : differences[0] == 0 ? "exact" : "not exact",
                   any.empty() ? 0 : any[0].split, any.empty() ? 0 : any[0].reduction, any.empty() ? 0 : of_any[0], 2l * m * n, fastest_exact * 1e6,
                   flops / fastest_exact / 1e12, bytes / fastest_exact / 1e9, first_plain * 1e6, first_any * 1e6, fastest * 1e6, fastest_exact / first_any,
                   fastest_name.c_str());
            int shown = 0;
            for (size_t i = 0; i < plain.size(); i++)
                if (ran[i] && differences[i] && shown++ < 3) printf("    not exact: %ld differ: %s\n", differences[i], plain[i].name().c_str());
            fflush(stdout);
        }
    }
    for (void *memory : {(void *)x, (void *)w, (void *)ours, (void *)rounded, theirs}) CHECK(cudaFree(memory));
}

int main() {
    CHECK(cublasLtCreate(&handle));
    CHECK(cudaMalloc(&workspace, WORKSPACE));
    CHECK(cudaMalloc(&flush, 128 << 20));
    CHECK(cudaMalloc(&found, sizeof *found));
    printf("cuBLASLt %zu\n", cublasLtGetVersion());
    const std::vector<int> all = {1, 17, 64, 257, 2048, 8192}, few = {1, 17, 64, 257};
    shape(6144, 4096, all);   // Llama-3-8B: query, key and value
    shape(4096, 4096, all);   // output of attention
    shape(28672, 4096, all);  // gate and up
    shape(4096, 14336, all);  // down
    shape(128256, 4096, few); // head
    shape(960, 576, all);     // SmolLM2-135M
    shape(576, 1536, all);
    shape(10240, 8192, all); // Llama-3-70B, whole and an eighth
    shape(1280, 8192, all);
    shape(8192, 3584, all);
    shape(6144, 4096, all, false); // f16
    shape(4096, 14336, all, false);
    for (int i = 0; i < 2; i++)
        for (const auto &[name, tally] : by_identity[i]) printf("%s output, %s: %d exact, %d not\n", i ? "bf16" : "f32", name.c_str(), tally.exact, tally.not_exact);
    return 0;
}
