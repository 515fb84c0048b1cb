// What adapters (LoRA, Hu et al. 2021) add to a linear layer: y[t] += B (A x[t]), A and B those of
// the slot that t's row has its adapter in; B is scaled.
//
// Tokens of one slot that lie side by side share the reading of A and B (the SGMV of Punica, Chen
// et al. 2023, section 4). Every sum goes over its numbers in the same order, whatever lies beside
// the token.
#pragma once

#include "bfloat16.h"
#include "multiply.h"
#include "team.h"

#include <algorithm>
#include <cstdint>

const int LARGEST_RANK = 64;  // as in kernels/__init__.py
const int RANKS = 4;          // rows of A at once; past the last one its products are not read

// x[n] times RANKS rows of a. n: a multiple of 32. Not inlined: of two loops around it that GCC
// unrolls in different ways, each would add in an order of its own.
template <typename X>
__attribute__((noinline)) static void project(const X* x, const float* a, int64_t n,
                                              float* products) {
    const float *b = a + n, *c = b + n, *d = c + n;
    float sum_a = 0, sum_b = 0, sum_c = 0, sum_d = 0;
    for (int64_t i = 0; i < n; i++) {
        const float value = float(x[i]);
        sum_a += value * a[i], sum_b += value * b[i], sum_c += value * c[i], sum_d += value * d[i];
    }
    products[0] = sum_a, products[1] = sum_b, products[2] = sum_c, products[3] = sum_d;
}

// As kernels/__init__.py's Lora.
struct Lora {
    const float* memory;  // the slots, of `stride` numbers each
    const int32_t* slots;  // each token's; −1: it has no adapter
    const int32_t* ranks;  // each slot's
    float* low;            // [tokens][LARGEST_RANK]: A x
    int64_t stride, offset;  // the layer's part of a slot begins at rank × offset

    // [rank][n_in]; B follows: [panels][rank][PANEL]
    const float* a(int32_t slot) const { return memory + slot * stride + ranks[slot] * offset; }

    // How many tokens from `first` on have its slot: ROWS at most.
    int64_t alike(int64_t first, int64_t end) const {
        int64_t t = first + 1;
        while (t < std::min(end, first + ROWS) && slots[t] == slots[first]) t++;
        return t - first;
    }

    // The next phase: A x of all tokens.
    template <typename X>
    void lower(const X* x, int64_t n_in, int64_t n_tokens, Member& me) const {
        if (std::all_of(slots, slots + n_tokens, [](int32_t slot) { return slot < 0; })) return;
        const int64_t some = std::clamp<int64_t>(n_tokens / 8, 1, ROWS);
        me.share((n_tokens + some - 1) / some, [&](int64_t piece, auto) {
            const int64_t end = std::min(n_tokens, (piece + 1) * some);
            for (int64_t first = piece * some, n; first < end; first += n) {
                n = alike(first, end);
                const int32_t slot = slots[first], rank = slot < 0 ? 0 : ranks[slot];
                for (int32_t r = 0; r < rank; r += RANKS)
                    for (int64_t t = first; t < first + n; t++)
                        project(x + t * n_in, a(slot) + r * n_in, n_in, low + t * LARGEST_RANK + r);
            }
        });
    }

    // values[PANEL] += B (A x) of a token.
    void add(int64_t t, int64_t panel, int64_t n_in, float* values) const {
        if (slots[t] < 0) return;
        const int64_t rank = ranks[slots[t]];
        const float* b = a(slots[t]) + rank * (n_in + panel * PANEL);
        multiply<1>(low + t * LARGEST_RANK, 0, b, rank, values, (const char*)b, 0, 1, 0);
    }
};
