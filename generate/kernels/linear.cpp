// y = x W + b for a few to some hundred tokens, W packed once.
//
// At such sizes a matrix product is bound half by reading W from memory and half by arithmetic;
// libraries do one after the other, and most copy W into their own order at every call. Here W lies
// in the order it is read, and while one block of it is multiplied with all tokens, the next is on
// its way from memory.
//
// W is [in, out] in panels of PANEL outputs: packed[panel][in / each][PANEL][each], where `each`
// inputs lie together: 1 float32, 2 bfloat16 or 4 int8 (see multiply.h). Inputs are filled up with
// zeros to a multiple of 32, outputs to whole panels. Sums go over the inputs in order, as float,
// of int8 as int32, so that a token's result does not depend on the other tokens.

#include "amx.h"
#include "lora.h"
#include "multiply.h"
#include "team.h"

#include <cmath>
#include <cstring>
#include <type_traits>

// elements: a block of weights stays in the level-1 cache while all tokens pass
const int BLOCK = 64;
#ifdef __AVX512BF16__
const bool PAIRED = true;
#else  // what several passes read is widened to float once
const bool PAIRED = false;
#endif

// x (1 + tanh u) / 2 = x / (1 + exp(−2u)), u = √(2/π) (x + 0.044715 x³)
static inline float gelu(float x) {
    const float twice_u = 1.5957691216f * (x + 0.044715f * x * x * x);
    // -ffast-math knows no infinity; and the C library's vector of exp takes each number by itself
    // if one of them leaves the range of floats
    return x / (1 + std::exp(std::max(-80.0f, std::min(-twice_u, 80.0f))));
}

// As kernels/__init__.py's Linear.
struct Linear {
    const void* packed;
    const int32_t* start;           // int8 alone: what an output's sum begins with
    const float *scales, *bias;     // [outputs of all panels]; scales: of int8
    int64_t n_in, n_out, with_gelu;  // n_in: a multiple of 32
    const Lora* lora;               // null: no adapters
};

// A pair as floats, in the order of multiply_add.
static inline void widen(Pair pair, float* wide, int64_t stride) {
    wide[0] = float_of(pair & 0xffff0000);
    wide[stride] = float_of(pair << 16);
}

// Inputs in an element of packed weights.
template <typename T>
const int EACH = std::is_same_v<T, float> ? 1 : std::is_same_v<T, Pair> ? 2 : 4;

// One thread's share of a layer's panels, packed as T.
// start: what each output's sum begins with. y: [n_tokens, n_out]. block: of elements.
// multiply_block(k, w, n, sums, next): adds to the sums of all tokens what their elements
// k … k + n − 1 give; value(token, output, sum): the sum as a float.
template <typename T, typename Sum, typename Y, typename Multiply, typename Value>
static void compute_panels(const Linear& layer, const Sum* start, Y* y, int64_t n_tokens,
                           int64_t block, Member& me, Multiply multiply_block, Value value) {
    const FlushSubnormals flush;
    const T* packed = (const T*)layer.packed;
    const int64_t n_in = layer.n_in / EACH<T>, n_panels = (layer.n_out + PANEL - 1) / PANEL;
    const auto memory = allocate(n_tokens * PANEL * sizeof(Sum));
    Sum* const sums = (Sum*)memory.get();
    me.share(n_panels, [&](int64_t panel, auto following) {
        const int64_t o = panel * PANEL, width = std::min<int64_t>(PANEL, layer.n_out - o);
        for (int64_t t = 0; t < n_tokens; t++) {
            std::copy_n(start + o, PANEL, &sums[t * PANEL]);
            // another core read y last: until it gives a line up, a store there would wait
            for (int64_t i = 0; i < width; i += CACHE_LINE / sizeof(Y))
                __builtin_prefetch(y + t * layer.n_out + o + i, 1);
        }
        for (int64_t k = 0; k < n_in; k += block) {
            const T* w = packed + (panel * n_in + k) * PANEL;
            const int64_t n = std::min(block, n_in - k);
            const T* next = w + n * PANEL;
            if (k + n == n_in) {
                const int64_t after = following();
                next = packed + (after < 0 ? panel : after) * n_in * PANEL;
            }
            multiply_block(k, w, n, sums, (const char*)next);
        }
        for (int64_t t = 0; t < n_tokens; t++) {
            float values[PANEL];
            for (int i = 0; i < PANEL; i++) values[i] = value(t, o + i, sums[t * PANEL + i]);
            if (layer.lora) layer.lora->add(t, panel, layer.n_in, values);
            if (layer.with_gelu)
                for (int i = 0; i < PANEL; i++) values[i] = gelu(values[i]);
            for (int64_t i = 0; i < width; i++) y[t * layer.n_out + o + i] = Y(values[i]);
        }
    });
}

// a lambda, and no function, whose address GCC would call for each number
const auto as_it_is = [](int64_t, int64_t, float sum) { return sum; };
const int LINES = PANEL * 4 / CACHE_LINE;  // cache lines of an element

static void linear(const Linear& layer, const float* x, float* y, int64_t n_tokens, int n_threads) {
    as_team(n_threads, 0, [&](Member& me) {
        if (layer.lora) layer.lora->lower(x, layer.n_in, n_tokens, me);
        compute_panels<float>(
            layer, layer.bias, y, n_tokens, BLOCK, me,
            [&](int64_t k, const float* w, int64_t n, float* sums, const char* next) {
                multiply_all(x + k, n_tokens, layer.n_in, w, n, sums, next, LINES);
            },
            as_it_is);
    });
}

static void linear(const Linear& layer, const Pair* x, BFloat16* y, int64_t n_tokens,
                   int n_threads) {
    const int64_t n_in = layer.n_in / 2;
    const bool tiled = may_use_tiles(),
               widened = !PAIRED && !tiled && (n_tokens > ROWS || !FUSED);
    as_team(n_threads, linear_bytes(n_tokens, layer.n_in), [&](Member& me) {
        if (layer.lora) layer.lora->lower((const BFloat16*)x, layer.n_in, n_tokens, me);
        float* const wide_x = (float*)me.team->memory;
        if (widened)
            me.share_rows(n_tokens, layer.n_in, [&](int64_t t) {
                for (int64_t i = t * n_in; i < (t + 1) * n_in; i++) widen(x[i], wide_x + 2 * i, 1);
            });
        Tiles tiles{tiled};
        compute_panels<Pair>(
            layer, layer.bias, y, n_tokens, tiled ? TILED_BLOCK : BLOCK, me,
            [&](int64_t k, const Pair* w, int64_t n, float* sums, const char* next) {
                if (widened) {
                    float wide_w[2 * BLOCK * PANEL];
                    for (int64_t i = 0; i < n; i++)
                        for (int o = 0; o < PANEL; o++)
                            widen(w[i * PANEL + o], &wide_w[2 * i * PANEL + o], PANEL);
                    multiply_all(wide_x + 2 * k, n_tokens, 2 * n_in, wide_w, 2 * n, sums,
                                 next, (LINES + 1) / 2);
                } else {
                    tiles.multiply_all(x + k, n_tokens, n_in, w, n, sums, next, LINES);
                }
            },
            as_it_is);
    });
}

// A token's elements as bytes around 128: x ≈ scale (byte − 128). Returns the scale; NaN, which
// reaches every output, if an element is infinite or none.
template <typename X>
static float quantize(const X* x, int64_t n, uint8_t* bytes) {
    const uint32_t magnitude = largest_magnitude(x, n);
    if (magnitude >= INFINITE) return float_of(INFINITE + 1);
    const float largest = float_of(magnitude);
    const float per_unit = largest > 1e-30f ? 127 / largest : 0;
    for (int64_t i = 0; i < n; i++)
        bytes[i] = uint8_t(128 + int(std::nearbyint(float(x[i]) * per_unit)));
    return largest / 127;
}

// layer.start: −128 times the sum of an output's weights, which undoes what the bytes are too large.
template <typename X>
static void linear_int8(const Linear& layer, const X* x, X* y, int64_t n_tokens, int n_threads) {
    const int64_t n_in = layer.n_in / 4;
    const bool tiled = may_use_tiles() && n_in % TILE == 0;  // exact sums: in the same bits
    as_team(n_threads, linear_bytes(n_tokens, layer.n_in), [&](Member& me) {
        if (layer.lora) layer.lora->lower(x, layer.n_in, n_tokens, me);
        Quad* const quads = (Quad*)me.team->memory;
        float* const x_scales = (float*)(quads + n_tokens * n_in);
        me.share_rows(n_tokens, layer.n_in, [&](int64_t t) {
            x_scales[t] = quantize(x + t * 4 * n_in, 4 * n_in, (uint8_t*)&quads[t * n_in]);
        });
        Tiles tiles{tiled};
        compute_panels<Quad>(
            layer, layer.start, y, n_tokens, tiled ? TILED_BLOCK : BLOCK, me,
            [&](int64_t k, const Quad* w, int64_t n, int32_t* sums, const char* next) {
                tiles.multiply_all(quads + k, n_tokens, n_in, w, n, sums, next, LINES);
            },
            [&](int64_t t, int64_t o, int32_t sum) {
                return float(sum) * (x_scales[t] * layer.scales[o]) + layer.bias[o];
            });
    });
}

extern "C" int panel_size() { return PANEL; }

// x: [n_tokens, n_in]; y: [n_tokens, n_out].
#define EXPORT(name, function, X, Y)                                                               \
    extern "C" void name(const Linear* layer, const X* x, Y* y, int64_t n_tokens, int n_threads) { \
        function(*layer, x, y, n_tokens, n_threads);                                               \
    }
EXPORT(linear_float32, linear, float, float)
EXPORT(linear_bfloat16, linear, Pair, BFloat16)
EXPORT(linear_int8_float32, linear_int8, float, float)
EXPORT(linear_int8_bfloat16, linear_int8, BFloat16, BFloat16)
