// y = x W + b for a few to some hundred tokens, W packed once.
//
// At such sizes a matrix product is bound half by reading W from memory and half by arithmetic;
// libraries do one after the other, and most copy W into their own order at every call. Here W lies
// in the order it is read, and while one block of it is multiplied with all tokens, the next is on
// its way from memory.
//
// W is [in, out] in panels of PANEL outputs: packed[panel][in][PANEL], the last one filled up with
// zeros. Its elements are float or bfloat16; sums are float, over the inputs in order, so that a
// token's result does not depend on the other tokens.

#include "multiply.h"

#include <cmath>
#include <vector>

// inputs: a block of weights stays in the level-1 cache while all tokens pass
const int BLOCK = 64;

// x (1 + tanh u) / 2 = x / (1 + exp(−2u)), u = √(2/π) (x + 0.044715 x³)
static inline float gelu(float x) {
    const float twice_u = 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1 + std::exp(std::min(-twice_u, 80.0f)));  // -ffast-math knows no infinity
}

template <typename T>
static void linear(const T* x, const T* packed, const T* bias, T* y, int64_t n_tokens, int64_t n_in,
                   int64_t n_out, int with_gelu, int n_threads) {
    const bool widen = sizeof(T) < sizeof(float);
    const int lines = PANEL * sizeof(T) / CACHE_LINE;
    const int64_t n_panels = (n_out + PANEL - 1) / PANEL;
    std::vector<float> wide_x(widen ? n_tokens * n_in : 0);
    for (size_t i = 0; i < wide_x.size(); i++) wide_x[i] = float(x[i]);
    const float* tokens = widen ? wide_x.data() : (const float*)x;
    #pragma omp parallel num_threads(n_threads)
    {
        std::vector<float> sums(n_tokens * PANEL), wide_w(widen ? BLOCK * PANEL : 0);
        #pragma omp for schedule(dynamic)  // threads of a shared machine are not equally fast
        for (int64_t panel = 0; panel < n_panels; panel++) {
            const int64_t first = panel * PANEL, width = std::min<int64_t>(PANEL, n_out - first);
            for (int64_t t = 0; t < n_tokens; t++)
                for (int64_t o = 0; o < width; o++)
                    sums[t * PANEL + o] = bias ? float(bias[first + o]) : 0;
            for (int64_t start = 0; start < n_in; start += BLOCK) {
                const T* w = packed + (panel * n_in + start) * PANEL;
                const int64_t n = std::min<int64_t>(BLOCK, n_in - start);
                const char* next = (const char*)(w + n * PANEL);
                if (widen && n_tokens > ROWS) {  // widen once what several passes will read
                    for (int64_t i = 0; i < n * PANEL; i += LANES)
                        *(Vector*)&wide_w[i] = load(w + i);
                    multiply_all(tokens + start, n_tokens, n_in, wide_w.data(), n, sums.data(),
                                 next, lines);
                } else {
                    multiply_all(tokens + start, n_tokens, n_in, w, n, sums.data(), next, lines);
                }
            }
            if (with_gelu)
                for (int64_t i = 0; i < n_tokens * PANEL; i++) sums[i] = gelu(sums[i]);
            for (int64_t t = 0; t < n_tokens; t++)
                for (int64_t o = 0; o < width; o++)
                    y[t * n_out + first + o] = T(sums[t * PANEL + o]);
        }
    }
}

// x: [n_tokens, n_in]; packed as above; bias: [n_out] or null; y: [n_tokens, n_out].
extern "C" {
int panel_size() { return PANEL; }
void linear_float32(const float* x, const float* packed, const float* bias, float* y,
                    int64_t n_tokens, int64_t n_in, int64_t n_out, int with_gelu, int n_threads) {
    linear(x, packed, bias, y, n_tokens, n_in, n_out, with_gelu, n_threads);
}
void linear_bfloat16(const BFloat16* x, const BFloat16* packed, const BFloat16* bias, BFloat16* y,
                     int64_t n_tokens, int64_t n_in, int64_t n_out, int with_gelu, int n_threads) {
    linear(x, packed, bias, y, n_tokens, n_in, n_out, with_gelu, n_threads);
}
}
