// sums[n][PANEL] += x[n][k] w[k][PANEL] with the sums in registers: what linear layers and
// attention to a prompt are made of.
//
// Elements are floats, or as many narrower numbers of consecutive inputs as fill the place of one:
// a Pair of bfloat16 or a Quad of int8, each of which newer processors multiply and add in one
// instruction. Where these are missing, fused multiply-adds or products of 16 bits come to the same
// sums, to the bit.
#pragma once

#include "bfloat16.h"

#include <algorithm>
#include <cstdint>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined __ARM_FEATURE_FMA
#include <arm_neon.h>
#endif

#ifdef __AVX512F__  // 32 registers of 16 floats: 6 tokens × 64 outputs in 24 of them
const int LANES = 16, VECTORS = 4;
#else  // 16 registers of 8 floats: 6 × 16 in 12
const int LANES = 8, VECTORS = 2;
#endif
const int ROWS = 6, PANEL = LANES * VECTORS, CACHE_LINE = 64;
typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

typedef uint32_t Pair;  // two bfloat16, the first in the lower half
typedef int32_t Quad;   // four bytes, the first in the lowest: of weights int8, of tokens uint8

static inline Vector load(const float* p) { return *(const Vector*)p; }
static inline Bits load(const Pair* p) { return *(const Bits*)p; }
static inline Ints load(const Quad* p) { return *(const Ints*)p; }  // sums of Quads, too
static inline void store(float* p, Vector v) { *(Vector*)p = v; }
static inline void store(int32_t* p, Ints v) { *(Ints*)p = v; }
static inline Vector first(Bits pairs) { return (Vector)(pairs << 16); }
static inline Vector second(Bits pairs) { return (Vector)(pairs & 0xffff0000); }

#if defined __AVX512F__ || defined __FMA__ || defined __ARM_FEATURE_FMA
const bool FUSED = true;
#else  // products and sums that the compiler, by -ffast-math, may add in another order
const bool FUSED = false;
#endif

// Rounded once, where the processor can.
static inline Vector multiply_add(Vector sum, Vector x, Vector w) {
#if defined __AVX512F__
    return (Vector)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined __FMA__
    return (Vector)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#elif defined __ARM_FEATURE_FMA  // never ran on an Arm: its bits were compared by emulation
    typedef float32x4_t Half __attribute__((may_alias));
    for (int i = 0; i < 2; i++)
        ((Half*)&sum)[i] = vfmaq_f32(((Half*)&sum)[i], ((Half*)&x)[i], ((Half*)&w)[i]);
    return sum;
#else
    return sum + x * w;
#endif
}

// The second of each pair, then the first, subnormal numbers as zeros (see FlushSubnormals): what
// the instruction does (Intel, Instruction Set Reference, VDPBF16PS).
static inline Vector multiply_add(Vector sum, Bits x, Bits w) {
#ifdef __AVX512BF16__
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
    return multiply_add(multiply_add(sum, second(x), second(w)), first(x), first(w));
#endif
}

// Exact: products of bytes in sums of 32 bits.
static inline Ints multiply_add(Ints sum, Ints x, Ints w) {
#if defined __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#elif defined __AVXVNNI__ && !defined __AVX512F__
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
#elif defined __AVX512BW__
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512((__m512i)x, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16((__m512i)w, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)x, 8),
                                          _mm512_srai_epi16((__m512i)w, 8));
    return sum + (Ints)even + (Ints)odd;
#elif defined __AVX2__ && !defined __AVX512F__
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256((__m256i)x, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)x, 8),
                                          _mm256_srai_epi16((__m256i)w, 8));
    return sum + (Ints)even + (Ints)odd;
#else
    for (int byte = 0; byte < 32; byte += 8) sum += (x >> byte & 255) * (w << (24 - byte) >> 24);
    return sum;
#endif
}

// One token's element, with the weights of many outputs.
static inline Vector multiply_add(Vector sum, float x, Vector w) {
    return multiply_add(sum, Vector{} + x, w);
}
static inline Vector multiply_add(Vector sum, Pair x, Bits w) {
    return multiply_add(sum, Bits{} + x, w);
}
static inline Ints multiply_add(Ints sum, Quad x, Ints w) {
    return multiply_add(sum, Ints{} + x, w);
}

// While it lives, its thread takes and makes no subnormal numbers, as the instructions for Pairs do
// at all times.
struct FlushSubnormals {
#ifdef __x86_64__
    const unsigned before = _mm_getcsr();
    FlushSubnormals() { _mm_setcsr(before | 0x8040); }  // results and operands
    ~FlushSubnormals() { _mm_setcsr(before); }
#else
    FlushSubnormals() {}
#endif
};

// sums[rows][PANEL] += x[rows][n] w[n][PANEL], n elements of T. `next` is the memory that will be
// multiplied after this, `lines` cache lines for each of them; of these, every `passes`-th one's
// are fetched, from `pass` on: into the level-1 cache if there is time for it, which few passes
// have not, else into level 2.
template <int rows, typename T, typename Sum>
static void multiply(const T* x, int64_t x_stride, const T* w, int64_t n, Sum* sums,
                     const char* next, int lines, int64_t passes, int64_t pass) {
    decltype(load(sums)) sum[rows][VECTORS];  // in registers: the loops over it must be unrolled
    #pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        #pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load(sums + r * PANEL + v * LANES);
    int64_t until_fetch = pass;
    for (int64_t k = 0; k < n; k++, w += PANEL, next += lines * CACHE_LINE) {
        if (until_fetch-- == 0) {
            until_fetch = passes - 1;
            if (passes > 3)
                for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * CACHE_LINE, 0, 3);
            else
                for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * CACHE_LINE, 0, 2);
        }
        decltype(load(w)) weight[VECTORS];
        #pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) weight[v] = load(w + v * LANES);
        #pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            #pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] = multiply_add(sum[r][v], x[r * x_stride + k], weight[v]);
    }
    #pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        #pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + v * LANES, sum[r][v]);
}

// The same for any number of rows, in passes of ROWS at most, as equal as can be.
template <typename T, typename Sum>
static void multiply_all(const T* x, int64_t n_tokens, int64_t x_stride, const T* w, int64_t n,
                         Sum* sums, const char* next, int lines) {
    const int64_t passes = (n_tokens + ROWS - 1) / ROWS;
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t from = n_tokens * pass / passes, rows = n_tokens * (pass + 1) / passes - from;
        const T* tokens = x + from * x_stride;
        Sum* into = sums + from * PANEL;
        switch (rows) {
            case 1: multiply<1>(tokens, x_stride, w, n, into, next, lines, passes, pass); break;
            case 2: multiply<2>(tokens, x_stride, w, n, into, next, lines, passes, pass); break;
            case 3: multiply<3>(tokens, x_stride, w, n, into, next, lines, passes, pass); break;
            case 4: multiply<4>(tokens, x_stride, w, n, into, next, lines, passes, pass); break;
            case 5: multiply<5>(tokens, x_stride, w, n, into, next, lines, passes, pass); break;
            default: multiply<ROWS>(tokens, x_stride, w, n, into, next, lines, passes, pass);
        }
    }
}
