// y = x W + b for a few to some hundred tokens, W packed once.
//
// At such sizes a matrix product is bound half by reading W from memory and half by arithmetic; libraries do one after
// the other, and most copy W into their own order at every call. Here W lies in the order it is read, and while one
// block of it is multiplied with all tokens, the next is on its way from memory to the level-2 cache.
//
// W is [in, out] in panels of PANEL outputs: packed[panel][in][PANEL], the last one filled up with zeros. Its elements
// are float or bfloat16; sums are float, over the inputs in order, so that a token's result does not depend on the
// other tokens.

#include "bfloat16.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__  // 32 registers of 16 floats: 6 tokens × 64 outputs in 24 of them
const int LANES = 16, VECTORS = 4;
#else  // 16 registers of 8 floats: 6 × 16 in 12
const int LANES = 8, VECTORS = 2;
#endif
const int ROWS = 6, PANEL = LANES * VECTORS, BLOCK = 64, CACHE_LINE = 64;
typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

static inline Vector load(const float* p) { return *(const Vector*)p; }
static inline Vector load(const BFloat16* p) { return (Vector)(__builtin_convertvector(*(const Halves*)p, Bits) << 16); }

// sums[rows][PANEL] += x[rows][n] w[n][PANEL]. `next` is the memory that will be multiplied after this, `lines` cache
// lines for each input; of these, every `passes`-th input's are fetched, from `pass` on.
template <typename T, int rows>
static void multiply(const float* x, int64_t x_stride, const T* w, int64_t n, float* sums, const char* next, int lines,
                     int64_t passes, int64_t pass) {
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

// One block of weights with all tokens, ROWS of them at a time.
template <typename T>
static void multiply_all(const float* x, int64_t n_tokens, int64_t x_stride, const T* w, int64_t n, float* sums,
                         const char* next, int lines) {
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

static inline float gelu(float x) {  // x (1 + tanh u) / 2 = x / (1 + exp(−2u)), u = √(2/π) (x + 0.044715 x³)
    const float twice_u = 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1 + std::exp(std::min(-twice_u, 80.0f)));  // -ffast-math knows no infinity
}

template <typename T>
static void linear(const T* x, const T* packed, const T* bias, T* y, int64_t n_tokens, int64_t n_in, int64_t n_out,
                   int with_gelu, int n_threads) {
    const bool widen = sizeof(T) < sizeof(float);
    const int lines = PANEL * sizeof(T) / CACHE_LINE;
    const int64_t n_panels = (n_out + PANEL - 1) / PANEL;
    std::vector<float> wide_x(widen ? n_tokens * n_in : 0);
    for (size_t i = 0; i < wide_x.size(); i++) wide_x[i] = float(x[i]);
    const float* tokens = widen ? wide_x.data() : (const float*)x;
    #pragma omp parallel num_threads(n_threads)
    {
        std::vector<float> sums(n_tokens * PANEL), wide_w(widen ? BLOCK * PANEL : 0);
        #pragma omp for
        for (int64_t panel = 0; panel < n_panels; panel++) {
            const int64_t first = panel * PANEL, width = std::min<int64_t>(PANEL, n_out - first);
            for (int64_t t = 0; t < n_tokens; t++)
                for (int64_t o = 0; o < width; o++) sums[t * PANEL + o] = bias ? float(bias[first + o]) : 0;
            for (int64_t start = 0; start < n_in; start += BLOCK) {
                const T* w = packed + (panel * n_in + start) * PANEL;
                const int64_t n = std::min<int64_t>(BLOCK, n_in - start);
                const char* next = (const char*)(w + n * PANEL);
                if (widen && n_tokens > ROWS) {  // widen once what several passes will read
                    for (int64_t i = 0; i < n * PANEL; i += LANES) *(Vector*)&wide_w[i] = load(w + i);
                    multiply_all(tokens + start, n_tokens, n_in, wide_w.data(), n, sums.data(), next, lines);
                } else {
                    multiply_all(tokens + start, n_tokens, n_in, w, n, sums.data(), next, lines);
                }
            }
            if (with_gelu)
                for (int64_t i = 0; i < n_tokens * PANEL; i++) sums[i] = gelu(sums[i]);
            for (int64_t t = 0; t < n_tokens; t++)
                for (int64_t o = 0; o < width; o++) y[t * n_out + first + o] = T(sums[t * PANEL + o]);
        }
    }
}

// x: [n_tokens, n_in]; packed as above; bias: [n_out] or null; y: [n_tokens, n_out].
extern "C" {
int panel_size() { return PANEL; }
void linear_float32(const float* x, const float* packed, const float* bias, float* y, int64_t n_tokens, int64_t n_in,
                    int64_t n_out, int with_gelu, int n_threads) {
    linear(x, packed, bias, y, n_tokens, n_in, n_out, with_gelu, n_threads);
}
void linear_bfloat16(const BFloat16* x, const BFloat16* packed, const BFloat16* bias, BFloat16* y, int64_t n_tokens,
                     int64_t n_in, int64_t n_out, int with_gelu, int n_threads) {
    linear(x, packed, bias, y, n_tokens, n_in, n_out, with_gelu, n_threads);
}
}
