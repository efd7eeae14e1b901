// Seeded inputs, each kind made to show one rule of the arithmetic.
#pragma once

#include "twin.h"

#include <vector>

struct Random {
    uint64_t state;
    uint64_t next() { // splitmix64
        uint64_t z = state += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    int below(int n) { return int(next() % uint64_t(n)); }
};

enum class Kind { near_one, wide, cancelling, zeros_beside_large, subnormal_inputs, subnormal_results, overflow, special, any_bits, count };

inline const char *name_of(Kind kind) {
    const char *names[] = {"near one", "wide exponents", "cancelling", "zeros beside large values", "subnormal inputs",
                           "subnormal results", "overflow", "infinities and NaN", "any bits"};
    return names[int(kind)];
}

// A value of sign, significand and an exponent in [low, high], which must be in range.
inline uint16_t value(Random &random, Format format, int low, int high) {
    const int exponent = low + random.below(high - low + 1), sign = random.below(2);
    return format == Format::bf16 ? uint16_t(sign << 15 | (exponent + 127) << 7 | random.below(128))
                                  : uint16_t(sign << 15 | (exponent + 15) << 10 | random.below(1024));
}

inline uint16_t input(Random &random, Format format, Kind kind) {
    const bool bf16 = format == Format::bf16;
    const int least = bf16 ? -126 : -14, most = bf16 ? 127 : 15;
    const uint16_t sign = uint16_t(random.below(2) << 15);
    switch (kind) {
    case Kind::near_one: return value(random, format, -2, 2);
    case Kind::wide: return bf16 ? value(random, format, -14, 14) : value(random, format, least, most);
    case Kind::cancelling: return value(random, format, -7, 7);
    case Kind::zeros_beside_large:
        switch (random.below(3)) {
        case 0: return sign;
        case 1: return value(random, format, most - 3, most);
        default: return value(random, format, least, least + 20 < most ? least + 20 : most);
        }
    case Kind::subnormal_inputs:
        if (random.below(2)) return uint16_t(sign | random.below(bf16 ? 128 : 1024));
        return random.below(2) ? value(random, format, least, least + 8) : value(random, format, most - 8, most);
    case Kind::subnormal_results: return bf16 ? value(random, format, -76, -62) : value(random, format, least, least + 4);
    case Kind::overflow: return bf16 ? value(random, format, 60, 65) : value(random, format, most - 1, most);
    case Kind::special:
        switch (random.below(24)) {
        case 0: return uint16_t(sign | (bf16 ? 0x7f80 : 0x7c00));
        case 1: return random.below(8) ? sign : uint16_t(sign | (bf16 ? 0x7f81 + random.below(126) : 0x7c01 + random.below(1022)));
        default: return value(random, format, -4, 4);
        }
    default: return uint16_t(random.next());
    }
}

inline float accumulator(Random &random, Kind kind) {
    const auto of = [&](int low, int high) {
        const int exponent = low + random.below(high - low + 1);
        return float_of(uint32_t(random.below(2)) << 31 | uint32_t(exponent + 127) << 23 | uint32_t(random.below(1 << 23)));
    };
    if (random.below(4) == 0) return random.below(2) ? 0.0f : -0.0f;
    switch (kind) {
    case Kind::near_one: return of(-3, 6);
    case Kind::wide: return of(-30, 30);
    case Kind::cancelling: return of(-16, 16);
    case Kind::zeros_beside_large: return random.below(2) ? of(-126, -90) : of(-20, 20);
    case Kind::subnormal_inputs: return random.below(2) ? float_of(uint32_t(random.below(2)) << 31 | uint32_t(random.below(1 << 23))) : of(-126, -100);
    case Kind::subnormal_results: return random.below(2) ? float_of(uint32_t(random.below(1 << 23))) : of(-126, -120);
    case Kind::overflow: return of(124, 127);
    case Kind::special: return random.below(16) ? of(-4, 4) : float_of(uint32_t(random.below(2)) << 31 | 0x7f800000u | (random.below(4) ? 0 : 1));
    default: return float_of(uint32_t(random.next()));
    }
}

// Rows of `k` values. Of the cancelling kind, each value is followed by its own negative with some bits changed, and
// its partner by a copy, so that a sum is small beside its terms.
inline std::vector<uint16_t> rows(Random &random, Format format, Kind kind, long count, int k, bool left) {
    std::vector<uint16_t> all(size_t(count * k));
    for (size_t i = 0; i < all.size(); i++) {
        if (kind == Kind::cancelling && i % 2 == 1) {
            all[i] = left ? uint16_t(all[i - 1] ^ 0x8000 ^ (random.below(3) == 0)) : uint16_t(all[i - 1] ^ (random.below(3) == 0));
        } else {
            all[i] = input(random, format, kind);
        }
    }
    return all;
}
