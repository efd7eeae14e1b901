// What the tensor cores compute: mma.sync against the scalar twin, wgmma and its shapes against mma.sync.
//
//   instructions [tiles]     tiles of 16 x 8 dot products of each kind (default 4000)

#include "inputs.h"
#include "instructions.cuh"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#define CHECK(call)                                                                                                                        \
    do {                                                                                                                                   \
        const cudaError_t error = (call);                                                                                                  \
        if (error != cudaSuccess) {                                                                                                        \
            printf("%s: %s\n", #call, cudaGetErrorString(error));                                                                          \
            exit(1);                                                                                                                       \
        }                                                                                                                                  \
    } while (0)

template <typename T> T *on_device(const std::vector<T> &values) {
    T *device;
    CHECK(cudaMalloc(&device, values.size() * sizeof(T)));
    CHECK(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

// Differing values of `count`, computed by all processors; `bits(i)` is the twin's.
template <typename Bits> long differing(long count, const std::vector<float> &device, Bits bits, long *first) {
    const int threads = int(std::thread::hardware_concurrency());
    std::atomic<long> found{0}, least{count};
    std::vector<std::thread> all;
    for (int t = 0; t < threads; t++) {
        all.emplace_back([&, t] {
            for (long i = t; i < count; i += threads) {
                if (bits(i) == bits_of(device[size_t(i)])) continue;
                found++;
                long seen = least;
                while (i < seen && !least.compare_exchange_weak(seen, i)) {
                }
            }
        });
    }
    for (std::thread &thread : all) thread.join();
    *first = least;
    return found;
}

struct Case {
    Format format;
    Kind kind;
    int k;
    long tiles;
    std::vector<uint16_t> x, w; // one tile: 16 rows of x, 8 of w
    std::vector<float> c;
};

Case drawn(Format format, Kind kind, int k, long tiles, uint64_t seed) {
    Random random{seed * 1000 + uint64_t(kind) * 10 + uint64_t(format)};
    Case drawn{format, kind, k, tiles, rows(random, format, kind, tiles * 16, k, true), rows(random, format, kind, tiles * 8, k, false), {}};
    for (long i = 0; i < tiles * 128; i++) drawn.c.push_back(accumulator(random, kind));
    return drawn;
}

// Each tile is a product of its own: 16 x 8.
template <bool bf16, int step>
__global__ void tiles_by_mma(float *d, const float *c, const uint16_t *x, const uint16_t *w, long tiles, int k) {
    const long tile = (long(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (tile >= tiles) return;
    const int lane = threadIdx.x % 32, group = lane / 4, right = lane % 4 * 2;
    const uint16_t *low = x + (tile * 16 + group) * k, *high = low + 8l * k, *row = w + (tile * 8 + group) * k;
    float sum[4];
    for (int i = 0; i < 4; i++) sum[i] = c[tile * 128 + (group + i / 2 * 8) * 8 + right + i % 2];
    for (int at = right; at < k; at += step) {
        if constexpr (step == 16) {
            const uint32_t a[4] = {pair(low + at), pair(high + at), pair(low + at + 8), pair(high + at + 8)};
            const uint32_t b[2] = {pair(row + at), pair(row + at + 8)};
            mma_k16<bf16>(sum, a, b);
        } else {
            const uint32_t a[2] = {pair(low + at), pair(high + at)};
            mma_k8<bf16>(sum, a, pair(row + at));
        }
    }
    for (int i = 0; i < 4; i++) d[tile * 128 + (group + i / 2 * 8) * 8 + right + i % 2] = sum[i];
}

std::vector<float> of_device(const Case &given, int step) {
    uint16_t *x = on_device(given.x), *w = on_device(given.w);
    float *c = on_device(given.c), *d;
    CHECK(cudaMalloc(&d, given.c.size() * 4));
    CHECK(cudaMemset(d, 0xee, given.c.size() * 4));
    const unsigned blocks = unsigned((given.tiles + 3) / 4);
    if (given.format == Format::bf16) {
        if (step == 16) tiles_by_mma<true, 16><<<blocks, 128>>>(d, c, x, w, given.tiles, given.k);
        else tiles_by_mma<true, 8><<<blocks, 128>>>(d, c, x, w, given.tiles, given.k);
    } else {
        if (step == 16) tiles_by_mma<false, 16><<<blocks, 128>>>(d, c, x, w, given.tiles, given.k);
        else tiles_by_mma<false, 8><<<blocks, 128>>>(d, c, x, w, given.tiles, given.k);
    }
    CHECK(cudaDeviceSynchronize());
    std::vector<float> result(given.c.size());
    CHECK(cudaMemcpy(result.data(), d, result.size() * 4, cudaMemcpyDeviceToHost));
    for (void *memory : {(void *)x, (void *)w, (void *)c, (void *)d}) CHECK(cudaFree(memory));
    return result;
}

uint32_t of_twin(const Twin &twin, const Case &given, long i) {
    const long tile = i / 128, row = i % 128 / 8, column = i % 8;
    return dot(twin, given.format, &given.x[size_t((tile * 16 + row) * given.k)], &given.w[size_t((tile * 8 + column) * given.k)], given.k,
               bits_of(given.c[size_t(i)]));
}

std::string described(const Twin &twin) {
    const char *zero[] = {"no exponent", "that of binary32", "that of its format"};
    return "groups of " + std::to_string(twin.group) + ", " + std::to_string(twin.fraction) + " bits, zero inputs " + zero[int(twin.zero_input)] +
           (twin.zero_accumulator_counts ? ", zero accumulator counts" : ", zero accumulator does not count") +
           (twin.least_exponent == -1000 ? ", no least exponent" : ", least exponent " + std::to_string(twin.least_exponent)) +
           (twin.cut_down ? ", cut down" : ", cut to zero") + (twin.round_nearest ? ", nearest" : ", truncated") +
           (twin.flush_result ? ", flushed" : ", subnormals kept") + (twin.overflow_to_largest ? ", largest" : ", infinity") +
           (twin.negative_zero ? ", -0 kept" : ", zero is +0");
}

std::vector<Twin> hypotheses() {
    std::vector<Twin> all;
    for (int group : {16, 8, 4})
        for (int fraction : {23, 24, 25, 26})
            for (ZeroExponent zero : {ZeroExponent::none, ZeroExponent::of_binary32, ZeroExponent::of_format})
                for (bool counts : {true, false})
                    for (int least : {-1000, -134, -133, -126})
                        for (int flags = 0; flags < 32; flags++)
                            all.push_back({group, fraction, zero, counts, least, bool(flags & 1), bool(flags & 2), bool(flags & 4),
                                           bool(flags & 8), bool(flags & 16)});
    return all;
}

// The first differences in full.
void show(const Twin &twin, const Case &given, const std::vector<float> &result) {
    int shown = 0;
    for (long at = 0; shown < 4 && at < long(result.size()); at++) {
        if (of_twin(twin, given, at) == bits_of(result[size_t(at)])) continue;
        shown++;
        const long tile = at / 128;
        printf("    device %08x twin %08x c %08x x", bits_of(result[size_t(at)]), of_twin(twin, given, at), bits_of(given.c[size_t(at)]));
        for (int k = 0; k < given.k; k++) printf(" %04x", given.x[size_t((tile * 16 + at % 128 / 8) * given.k + k)]);
        printf(" w");
        for (int k = 0; k < given.k; k++) printf(" %04x", given.w[size_t((tile * 8 + at % 8) * given.k + k)]);
        printf("\n");
    }
}

// The hypotheses with the fewest differences over all kinds together.
void search(Format format, long tiles) {
    std::vector<Case> cases;
    std::vector<std::vector<float>> results;
    for (int kind = 0; kind < int(Kind::count); kind++) {
        cases.push_back(drawn(format, Kind(kind), 16, tiles, 1));
        results.push_back(of_device(cases.back(), 16));
    }
    long fewest = -1;
    for (const Twin &twin : hypotheses()) {
        long sum = 0, first;
        for (size_t i = 0; i < cases.size(); i++) {
            sum += differing(tiles * 128, results[i], [&](long at) { return of_twin(twin, cases[i], at); }, &first);
            if (fewest >= 0 && sum > fewest) break;
        }
        if (fewest < 0 || sum < fewest) fewest = sum;
        if (sum == fewest) printf("  %ld of %ld: %s\n", sum, tiles * 128 * long(cases.size()), described(twin).c_str());
    }
}

// The twin as stated on fresh inputs, with its first differences, and other bounds of the exponent beside it.
void fresh(Format format, Kind kind, int k, long tiles) {
    const Case given = drawn(format, kind, k, tiles, 2);
    for (int group : {16, 8}) {
        const std::vector<float> result = of_device(given, group);
        const auto found = [&](int least) {
            Twin twin;
            twin.group = group;
            twin.least_exponent = least;
            long first;
            return differing(tiles * 128, result, [&](long i) { return of_twin(twin, given, i); }, &first);
        };
        const long stated = found(Twin{}.least_exponent);
        printf("  %s, k %d, mma.sync m16n8k%d: %ld of %ld differ; least exponent -132: %ld, -134: %ld, none: %ld\n", name_of(kind), k, group, stated,
               tiles * 128, found(-132), found(-134), found(-1000));
        if (stated && k == 16 && group == 16) show(Twin{}, given, result);
    }
}

// 128 x 512 outputs over `k`: every shape of wgmma against mma.sync.
void shapes(Format format, Kind kind, int k, uint64_t seed) {
    const int m = 128, n = 512;
    Random random{seed * 77 + uint64_t(kind)};
    const std::vector<uint16_t> x = rows(random, format, kind, m, k, true), w = rows(random, format, kind, n, k, false);
    std::vector<float> c;
    for (int i = 0; i < m * n; i++) c.push_back(accumulator(random, kind));
    uint16_t *x_device = on_device(x), *w_device = on_device(w);
    float *c_device = on_device(c), *d;
    CHECK(cudaMalloc(&d, c.size() * 4));
    const bool bf16 = format == Format::bf16;
    const auto result = [&](auto launch) {
        CHECK(cudaMemset(d, 0xee, c.size() * 4));
        launch();
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        std::vector<float> out(c.size());
        CHECK(cudaMemcpy(out.data(), d, out.size() * 4, cudaMemcpyDeviceToHost));
        return out;
    };
    for (const float *start : {(const float *)c_device, (const float *)nullptr}) {
        const unsigned blocks = m / 16 * (n / 8) / 4;
        const auto mma = result([&] {
            if (bf16) by_mma<true, 16><<<blocks, 128>>>(d, start, x_device, w_device, m, n, k);
            else by_mma<false, 16><<<blocks, 128>>>(d, start, x_device, w_device, m, n, k);
        });
        const auto shape = [&](const char *name, const std::vector<float> &out) {
            long first;
            const long found = differing(long(m) * n, out, [&](long i) { return bits_of(mma[size_t(i)]); }, &first);
            printf("  %s, k %d, %s, %s: %ld of %d differ from mma.sync m16n8k16", name_of(kind), k, start ? "accumulating" : "from zero", name, found, m * n);
            if (found) printf(", first: %08x and %08x", bits_of(out[size_t(first)]), bits_of(mma[size_t(first)]));
            printf("\n");
        };
#define SHAPE(width, from)                                                                                                                 \
    result([&] {                                                                                                                           \
        if (bf16) by_wgmma<true, width, from><<<dim3(n / width, m / 64), 128>>>(d, start, x_device, w_device, n, k);                       \
        else by_wgmma<false, width, from><<<dim3(n / width, m / 64), 128>>>(d, start, x_device, w_device, n, k);                           \
    })
        shape("wgmma m64n8k16", SHAPE(8, false));
        shape("wgmma m64n8k16, X in registers", SHAPE(8, true));
        shape("wgmma m64n64k16", SHAPE(64, false));
        shape("wgmma m64n256k16", SHAPE(256, false));
        shape("mma.sync m16n8k8", result([&] {
                  if (bf16) by_mma<true, 8><<<blocks, 128>>>(d, start, x_device, w_device, m, n, k);
                  else by_mma<false, 8><<<blocks, 128>>>(d, start, x_device, w_device, m, n, k);
              }));
    }
    for (void *memory : {(void *)x_device, (void *)w_device, (void *)c_device, (void *)d}) CHECK(cudaFree(memory));
}

int main(int count, char **arguments) {
    const long tiles = count > 1 ? atol(arguments[1]) : 4000;
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    printf("device: %s, sm_%d%d\n", device.name, device.major, device.minor);
    for (Format format : {Format::bf16, Format::f16}) {
        const char *name = format == Format::bf16 ? "bf16" : "f16";
        printf("%s, mma.sync m16n8k16 against the hypotheses:\n", name);
        search(format, 400);
        printf("%s, the twin as stated on fresh inputs:\n", name);
        for (int kind = 0; kind < int(Kind::count); kind++) {
            for (int k : {16, 128}) fresh(format, Kind(kind), k, tiles);
        }
        printf("%s, wgmma against mma.sync:\n", name);
        for (Kind kind : {Kind::near_one, Kind::wide, Kind::cancelling, Kind::zeros_beside_large, Kind::subnormal_results, Kind::any_bits}) {
            shapes(format, kind, 16, 3);
            shapes(format, kind, 2048, 4);
        }
    }
    return 0;
}
