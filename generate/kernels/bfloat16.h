// bfloat16, the upper half of a float, where the compiler has no type of its own; and floats by
// their bits, since -ffast-math knows no infinity and no NaN.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
static inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

struct BFloat16 {
    uint16_t bits;
    BFloat16() = default;
    explicit BFloat16(float x) {  // to the nearest, ties to even
        const uint32_t whole = bits_of(x);
        bits = uint16_t((whole + 0x7fff + ((whole >> 16) & 1)) >> 16);
    }
    explicit operator float() const { return float_of(uint32_t(bits) << 16); }
};

const uint32_t INFINITE = 0x7f800000;

// The bits of the largest magnitude: INFINITE or more if one is infinite or NaN.
template <typename X>
static inline uint32_t largest_magnitude(const X* x, int64_t n) {
    uint32_t largest = 0;  // bits without a sign are ordered as the numbers are
    #pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, bits_of(float(x[i])) & ~(1u << 31));
    return largest;
}
