// The tensor cores' dot product of 16-bit floats in exact integers, with what documents leave open as parameters. The
// defaults are what an H100 and an H200 compute.
//
// A step takes `group` products and the accumulator. Each is a signed integer times a power of two. All are aligned
// to the largest exponent, cut to `fraction` bits behind its binary point, and summed exactly. The sum is rounded to
// binary32. The shape of the model is that of MMA-Sim (arXiv 2511.10909); the parameters are measured.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

enum class Format { bf16, f16 };

// Whose exponent a zero counts with when the largest exponent is sought.
enum class ZeroExponent { none, of_binary32, of_format };

struct Twin {
    int group = 16;
    int fraction = 25;
    ZeroExponent zero_input = ZeroExponent::none;
    bool zero_accumulator_counts = false;
    int least_exponent = -133;  // the largest exponent is never taken as less
    bool cut_down = false;      // towards minus infinity instead of towards zero
    bool round_nearest = false; // of the sum, instead of truncation
    bool flush_result = false;  // subnormal results to zero
    bool overflow_to_largest = false;
    bool negative_zero = false; // a negative sum that is rounded to zero keeps its sign
};

struct Term {
    int64_t significand; // signed
    int exponent;        // of the bit that stands for one
    int fraction;        // bits of `significand` behind the binary point
    bool counts;         // in the search of the largest exponent
};

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct Parts {
    bool negative, zero, infinite, nan;
    int32_t significand;
    int exponent, fraction;
};

inline Parts parts_of(uint32_t bits, int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1, all = (1 << exponent_bits) - 1;
    const int field = int(bits >> fraction_bits) & all;
    const int32_t fraction = int32_t(bits & ((1u << fraction_bits) - 1));
    const bool special = field == all;
    return {
        (bits >> (exponent_bits + fraction_bits) & 1) != 0,
        field == 0 && fraction == 0,
        special && fraction == 0,
        special && fraction != 0,
        field == 0 ? fraction : fraction | (1 << fraction_bits),
        (field == 0 ? 1 : field) - bias,
        fraction_bits,
    };
}

inline Parts parts_of(uint16_t bits, Format format) {
    return format == Format::bf16 ? parts_of(bits, 8, 7) : parts_of(bits, 5, 10);
}

// `sum * 2^exponent` as binary32.
inline uint32_t rounded(const Twin &twin, int64_t sum, int exponent) {
    if (sum == 0) return 0;
    const uint32_t sign = sum < 0 ? 0x80000000u : 0;
    uint64_t magnitude = sum < 0 ? uint64_t(-sum) : uint64_t(sum);
    const int top = 63 - __builtin_clzll(magnitude);
    int lowest = top + exponent - 23;
    if (lowest < -149) lowest = -149;
    const int shift = lowest - exponent;
    uint64_t kept;
    if (shift <= 0) {
        kept = magnitude << -shift;
    } else if (shift > 63) {
        kept = 0;
    } else {
        kept = magnitude >> shift;
        const uint64_t rest = magnitude & ((uint64_t(1) << shift) - 1), half = uint64_t(1) << (shift - 1);
        if (twin.round_nearest && (rest > half || (rest == half && (kept & 1)))) kept += 1;
    }
    if (kept == 0) return twin.negative_zero ? sign : 0;
    const double value = std::ldexp(double(kept), lowest);
    if (value >= 0x1p128) return sign | (twin.overflow_to_largest ? 0x7f7fffffu : 0x7f800000u);
    if (twin.flush_result && value < 0x1p-126) return twin.negative_zero ? sign : 0;
    return sign | bits_of(float(value));
}

// One step: `count` products of `x` and `w`, and the accumulator.
inline uint32_t step(const Twin &twin, Format format, const uint16_t *x, const uint16_t *w, int count, uint32_t accumulator) {
    Term terms[33];
    int used = 0, positive_infinities = 0, negative_infinities = 0;
    bool nan = false;
    const Parts c = parts_of(accumulator, 8, 23);
    nan |= c.nan;
    if (c.infinite) (c.negative ? negative_infinities : positive_infinities) += 1;
    terms[used++] = {c.negative ? -int64_t(c.significand) : int64_t(c.significand), c.exponent, 23,
                     !c.zero || twin.zero_accumulator_counts};
    for (int i = 0; i < count; i++) {
        const Parts a = parts_of(x[i], format), b = parts_of(w[i], format);
        nan |= a.nan || b.nan || (a.infinite && b.zero) || (a.zero && b.infinite);
        const bool negative = a.negative != b.negative, zero = a.zero || b.zero;
        if (!nan && (a.infinite || b.infinite)) (negative ? negative_infinities : positive_infinities) += 1;
        int exponent = a.exponent + b.exponent;
        if (twin.zero_input == ZeroExponent::of_binary32) {
            exponent = (a.zero ? -126 : a.exponent) + (b.zero ? -126 : b.exponent);
        }
        const int64_t product = int64_t(a.significand) * b.significand;
        terms[used++] = {negative ? -product : product, exponent, a.fraction + b.fraction,
                         !zero || twin.zero_input != ZeroExponent::none};
    }
    if (nan || (positive_infinities && negative_infinities)) return 0x7fffffffu;
    if (positive_infinities) return 0x7f800000u;
    if (negative_infinities) return 0xff800000u;
    int largest = -100000;
    for (int i = 0; i < used; i++) {
        if (terms[i].counts && terms[i].exponent > largest) largest = terms[i].exponent;
    }
    if (largest == -100000) return 0;
    if (largest < twin.least_exponent) largest = twin.least_exponent;
    int64_t sum = 0;
    for (int i = 0; i < used; i++) {
        const Term &term = terms[i];
        if (term.significand == 0) continue;
        const int left = twin.fraction - term.fraction + term.exponent - largest;
        if (left >= 0) {
            sum += term.significand << left;
        } else if (twin.cut_down) {
            sum += -left > 62 ? (term.significand < 0 ? -1 : 0) : term.significand >> -left;
        } else {
            const int64_t magnitude = term.significand < 0 ? -term.significand : term.significand;
            const int64_t cut = -left > 62 ? 0 : magnitude >> -left;
            sum += term.significand < 0 ? -cut : cut;
        }
    }
    return rounded(twin, sum, largest - twin.fraction);
}

// A whole dot product of `k` values, in steps of the twin's group with k ascending.
inline uint32_t dot(const Twin &twin, Format format, const uint16_t *x, const uint16_t *w, int k, uint32_t accumulator) {
    for (int i = 0; i < k; i += twin.group) {
        const int count = k - i < twin.group ? k - i : twin.group;
        accumulator = step(twin, format, x + i, w + i, count, accumulator);
    }
    return accumulator;
}
