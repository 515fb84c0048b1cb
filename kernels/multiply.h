// sums[n][PANEL] += x[n][k] w[k][PANEL] with the sums in registers: what linear layers and
// attention to a prompt are made of.
#pragma once

#include "bfloat16.h"

#include <algorithm>
#include <cstdint>

#ifdef __AVX512F__  // 32 registers of 16 floats: 6 tokens × 64 outputs in 24 of them
const int LANES = 16, VECTORS = 4;
#else  // 16 registers of 8 floats: 6 × 16 in 12
const int LANES = 8, VECTORS = 2;
#endif
const int ROWS = 6, PANEL = LANES * VECTORS, CACHE_LINE = 64;
typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

static inline Vector load(const float* p) { return *(const Vector*)p; }
static inline Vector load(const BFloat16* p) {
    return (Vector)(__builtin_convertvector(*(const Halves*)p, Bits) << 16);
}

// sums[rows][PANEL] += x[rows][n] w[n][PANEL]. `next` is the memory that will be multiplied after
// this, `lines` cache lines for each input; of these, every `passes`-th input's are fetched, from
// `pass` on.
template <typename T, int rows>
static void multiply(const float* x, int64_t x_stride, const T* w, int64_t n, float* sums,
                     const char* next, int lines, int64_t passes, int64_t pass) {
    Vector sum[rows][VECTORS];  // in registers: the loops over it must be unrolled
    #pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        #pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load(sums + r * PANEL + v * LANES);
    int64_t until_fetch = pass;
    for (int64_t k = 0; k < n; k++, w += PANEL, next += lines * CACHE_LINE) {
        if (until_fetch-- == 0) {
            until_fetch = passes - 1;
            for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * CACHE_LINE, 0, 2);
        }
        Vector weight[VECTORS];
        #pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) weight[v] = load(w + v * LANES);
        #pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            #pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * x_stride + k] * weight[v];
    }
    #pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        #pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) *(Vector*)(sums + r * PANEL + v * LANES) = sum[r][v];
}

// The same for any number of rows, ROWS of them at a time.
template <typename T>
static void multiply_all(const float* x, int64_t n_tokens, int64_t x_stride, const T* w, int64_t n,
                         float* sums, const char* next, int lines) {
    const int64_t passes = (n_tokens + ROWS - 1) / ROWS;
    for (int64_t pass = 0; pass < passes; pass++, x += ROWS * x_stride, sums += ROWS * PANEL)
        switch (std::min<int64_t>(ROWS, n_tokens - pass * ROWS)) {
            case 1: multiply<T, 1>(x, x_stride, w, n, sums, next, lines, passes, pass); break;
            case 2: multiply<T, 2>(x, x_stride, w, n, sums, next, lines, passes, pass); break;
            case 3: multiply<T, 3>(x, x_stride, w, n, sums, next, lines, passes, pass); break;
            case 4: multiply<T, 4>(x, x_stride, w, n, sums, next, lines, passes, pass); break;
            case 5: multiply<T, 5>(x, x_stride, w, n, sums, next, lines, passes, pass); break;
            default: multiply<T, ROWS>(x, x_stride, w, n, sums, next, lines, passes, pass);
        }
}
