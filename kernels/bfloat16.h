// bfloat16, the upper half of a float, where the compiler has no type of its own.
#pragma once

#include <cstdint>
#include <cstring>

struct BFloat16 {
    uint16_t bits;
    BFloat16() = default;
    explicit BFloat16(float x) {  // to the nearest, ties to even
        uint32_t whole;
        std::memcpy(&whole, &x, 4);
        bits = uint16_t((whole + 0x7fff + ((whole >> 16) & 1)) >> 16);
    }
    explicit operator float() const {
        const uint32_t whole = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &whole, 4);
        return x;
    }
};
