// Attention over a paged KV cache, for the tokens of many rows of unequal lengths (selective
// batching; Orca, OSDI 2022, section 3.2).
//
// PyTorch's own attention wants rows of one length: it pads and masks, or is called once a row.
// This loop stores each token's key and value and then reads exactly the live ones of its row.
// Reading them from memory is what bounds it. The keys of all heads of a block lie together, and so
// do its values: a thread takes a row and some heads, reads tens of consecutive kilobytes from each
// block, and has the next block on its way meanwhile, wherever it lies.
//
// Built by kernels/__init__.py. Sums are float, and a token's result depends on its own row alone:
// neighbours in the batch, the number of threads and where the blocks lie change no bit of it.

#include "multiply.h"
#include "team.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

const int LARGEST_HEAD = 256;
const int CHUNK = 96;  // queries of one row that share what they read: some passes of multiply_all

// A layer's keys and values: [n_blocks, 2, n_head, block_size, head_size] of T; int8 ones have a
// scale each: [n_blocks, 2, n_head, block_size].
template <typename T>
struct Cache {
    static const bool SCALED = sizeof(T) == 1;
    T* layer;
    float* scales;
    int64_t n_head, block_size;
    int head_size;
    T* keys(int64_t block, int64_t head) const {
        return layer + (block * 2 * n_head + head) * block_size * head_size;
    }
    T* values(int64_t block, int64_t head) const { return keys(block, n_head + head); }
    float* scale(const T* at) const { return scales + (at - layer) / head_size; }
    float factor(const T* at) const { return SCALED ? *scale(at) : 1; }
};

// One token's key or value of one head, kept as it is or as the nearest of 255 multiples of the
// largest number's 127th part. model.py's KVCache comes to the same bytes.
template <typename T>
static void keep(const T* x, const Cache<T>& cache, T* at) {
    std::memcpy(at, x, cache.head_size * sizeof(T));
}
template <typename T>
static void keep(const T* x, const Cache<int8_t>& cache, int8_t* at) {
    const uint32_t magnitude = largest_magnitude(x, cache.head_size);
    const float largest = float_of(magnitude), steps = largest < 1e-30f ? 0 : 127 / largest;
    *cache.scale(at) = magnitude >= INFINITE ? float_of(INFINITE + 1) : largest * (1 / 127.0f);
    #pragma omp simd
    for (int d = 0; d < cache.head_size; d++) at[d] = int8_t(std::rint(float(x[d]) * steps));
}

static inline Vector load(const BFloat16* p) {
    Vector wide;
    for (int l = 0; l < LANES; l++) wide[l] = float(p[l]);
    return wide;
}
static inline Vector load(const int8_t* p) {
    Ints wide;  // by the instruction: compilers may take the bytes one by one
#if defined __AVX512F__
    wide = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined __AVX2__
    wide = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    for (int l = 0; l < LANES; l++) wide[l] = p[l];
#endif
    return __builtin_convertvector(wide, Vector);
}

static inline void prefetch(const void* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch((const char*)at + i, 0, 2);
}

// parts[0][i] = the sum of all lanes of parts[i], 2 × width of them.
template <int width>
static inline void fold(Vector* parts) {
    Ints low, high;  // lane l: l without and with `width`, of the second vector where l has it
    for (int l = 0; l < LANES; l++) {
        low[l] = (l & ~width) + (l & width ? LANES : 0);
        high[l] = low[l] + width;
    }
    #pragma GCC unroll 16
    for (int i = 0; i < width; i++)
        parts[i] = __builtin_shuffle(parts[i], parts[i + width], low) +
                   __builtin_shuffle(parts[i], parts[i + width], high);
    if constexpr (width > 1) fold<width / 2>(parts);
}

// One query of T and up to LANES consecutive keys, then values, of E, of one head.
template <typename T, typename E, int size>
struct Head {
    static void multiply(const T* query, const E* keys, int n, int head_size, float* dots) {
        for (int i = 0; i < n; i++, keys += head_size) {
            float dot = 0;
            #pragma omp simd reduction(+ : dot)
            for (int d = 0; d < head_size; d++) dot += float(query[d]) * float(keys[d]);
            dots[i] = dot;
        }
    }
    static void add(const float* weights, const E* values, int n, int head_size, float* sums) {
        for (int i = 0; i < n; i++, values += head_size)
            #pragma omp simd
            for (int d = 0; d < head_size; d++) sums[d] += weights[i] * float(values[d]);
    }
    static void finish(const float* sums, int head_size, T* y) {
        for (int d = 0; d < head_size; d++) y[d] = T(sums[d]);
    }
};

// The same of a size that fills whole vectors, known to the compiler. Query, Kept: what is loaded,
// T and E or Pairs of them; the sums of a vector of Pairs are two, of the first and of the second
// of each.
static inline void add_scaled(Vector* sums, float weight, Vector values) {
    sums[0] = multiply_add(sums[0], weight, values);
}
static inline void add_scaled(Vector* sums, float weight, Bits values) {
    sums[0] = multiply_add(sums[0], weight, first(values));
    sums[1] = multiply_add(sums[1], weight, second(values));
}
template <typename T, typename Query, typename E, typename Kept, int size>
struct WholeHead {
    static const int EACH = sizeof(Kept) / sizeof(E), N = size / EACH / LANES;
    static void multiply(const T* query, const E* keys, int n, int, float* dots) {
        Vector parts[LANES] = {};
        decltype(load((const Query*)query)) q[N];
        for (int j = 0; j < N; j++) q[j] = load((const Query*)query + j * LANES);
        for (int i = 0; i < n; i++, keys += size)
            #pragma GCC unroll 8
            for (int j = 0; j < N; j++)
                parts[i] = multiply_add(parts[i], q[j], load((const Kept*)keys + j * LANES));
        fold<LANES / 2>(parts);
        std::memcpy(dots, parts, n * sizeof(float));
    }
    static void add(const float* weights, const E* values, int n, int, float* sums) {
        Vector sum[N * EACH];
        #pragma GCC unroll 8
        for (int j = 0; j < N * EACH; j++) sum[j] = load(sums + j * LANES);
        for (int i = 0; i < n; i++, values += size)
            #pragma GCC unroll 8
            for (int j = 0; j < N; j++)
                add_scaled(sum + j * EACH, weights[i], load((const Kept*)values + j * LANES));
        #pragma GCC unroll 8
        for (int j = 0; j < N * EACH; j++) store(sums + j * LANES, sum[j]);
    }
    static void finish(const float* sums, int, T* y) {
        for (int j = 0; j < N; j++)
            for (int e = 0; e < EACH; e++)
                for (int l = 0; l < LANES; l++)
                    y[(j * LANES + l) * EACH + e] = T(sums[(j * EACH + e) * LANES + l]);
    }
};
template <> struct Head<float, float, 64> : WholeHead<float, float, float, float, 64> {};
template <> struct Head<BFloat16, BFloat16, 64> : WholeHead<BFloat16, Pair, BFloat16, Pair, 64> {};
template <typename T>
struct Head<T, int8_t, 64> : WholeHead<T, T, int8_t, int8_t, 64> {};

// y = softmax(q K / √D) V: one query of each of n_heads heads, from `head` on, against tokens
// 0 … length − 1 of its row. query, y: [n_heads, D]. size: D, or 0.
template <int size, typename T, typename E>
static void attend(const T* query, const Cache<E>& cache, const int64_t* blocks, int64_t length,
                   int64_t head, int64_t n_heads, std::vector<float>& scratch, T* y) {
    typedef Head<T, E, size> Kind;
    const int D = size ? size : cache.head_size;
    const float scale = 1 / std::sqrt(float(D));
    const int64_t block_size = cache.block_size, stride = (length + LANES - 1) / LANES * LANES;
    scratch.assign(n_heads * (stride + D), 0);
    float *weights = scratch.data(), *sums = weights + n_heads * stride;  // sums of each head
    // Calls of(h, first token, n, where their keys or values lie) for all live tokens, up to LANES
    // at a time, in the order in which they lie in memory; the same place of the block after each
    // is fetched meanwhile.
    const auto each = [&](auto block_of, const E* after, auto of) {
        for (int64_t start = 0; start < length; start += block_size) {
            const int64_t n = std::min(block_size, length - start);
            const E* block = block_of(start);
            const E* next = start + block_size < length ? block_of(start + block_size) : after;
            for (int64_t h = 0; h < n_heads; h++)
                for (int64_t i = 0; i < n; i += LANES) {
                    const int64_t at = (h * block_size + i) * D,
                                  m = std::min<int64_t>(LANES, n - i);
                    prefetch(next + at, m * D * sizeof(E));
                    if (cache.SCALED) prefetch(cache.scale(next + at), m * sizeof(float));
                    of(h, start + i, int(m), block + at);
                }
        }
    };
    const auto keys = [&](int64_t at) { return cache.keys(blocks[at / block_size], head); };
    const auto values = [&](int64_t at) { return cache.values(blocks[at / block_size], head); };
    each(keys, values(0), [&](int64_t h, int64_t at, int n, const E* k) {
        float* w = weights + h * stride + at;
        Kind::multiply(query + h * D, k, n, D, w);
        if (cache.SCALED)
            for (int i = 0; i < n; i++) w[i] *= cache.scale(k)[i];
    });
    for (int64_t h = 0; h < n_heads; h++) {
        float *w = weights + h * stride, largest = std::numeric_limits<float>::lowest(), total = 0;
        #pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < length; i++) largest = std::max(largest, w[i]);
        #pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < length; i++)  // exp is slow where it comes close to 0
            total += w[i] = std::exp(std::max((w[i] - largest) * scale, -80.0f));
        for (int64_t i = 0; i < length; i++) w[i] /= total;
    }
    each(values, values(0), [&](int64_t h, int64_t at, int n, const E* v) {
        float* w = weights + h * stride + at;
        if (cache.SCALED)
            for (int i = 0; i < n; i++) w[i] *= cache.scale(v)[i];
        Kind::add(w, v, n, D, sums + h * D);
    });
    for (int64_t h = 0; h < n_heads; h++) Kind::finish(sums + h * D, D, y + h * D);
}

// The same for n queries of one head at positions first, first + 1, … of one row: two products for
// every PANEL keys. queries, y: [n, stride], [n, y_stride].
template <typename T, typename E>
static void attend_chunk(const T* queries, int64_t stride, int64_t n, const Cache<E>& cache,
                         const int64_t* blocks, int64_t first, int64_t head,
                         std::vector<float>& weights, T* y, int64_t y_stride) {
    const int head_size = cache.head_size;
    const int64_t length = first + n, tiles = (length + PANEL - 1) / PANEL,
                  panels = (head_size + PANEL - 1) / PANEL;
    float q[CHUNK * LARGEST_HEAD], tile[PANEL * std::max(PANEL, LARGEST_HEAD)], total[CHUNK];
    float sums[CHUNK * (LARGEST_HEAD + PANEL)] = {0};  // [panels, n, PANEL]
    for (int64_t r = 0; r < n; r++)
        for (int d = 0; d < head_size; d++)
            q[r * head_size + d] = float(queries[r * stride + d]) / std::sqrt(float(head_size));
    weights.assign(tiles * n * PANEL, 0);  // [tiles, n, PANEL]
    for (int64_t j = 0; j < tiles; j++) {
        const int64_t m = std::min<int64_t>(PANEL, length - j * PANEL);
        std::fill(tile, tile + head_size * PANEL, 0.0f);
        for (int64_t i = 0; i < m; i++) {
            const int64_t position = j * PANEL + i;
            const E* key = cache.keys(blocks[position / cache.block_size], head) +
                           position % cache.block_size * head_size;
            for (int d = 0; d < head_size; d++)
                tile[d * PANEL + i] = cache.factor(key) * float(key[d]);
        }
        multiply_all(q, n, head_size, tile, head_size, &weights[j * n * PANEL], nullptr, 0);
    }
    for (int64_t r = 0; r < n; r++) {
        const int64_t live = first + r + 1;
        float largest = std::numeric_limits<float>::lowest(), sum = 0;
        for (int64_t j = 0; j * PANEL < live; j++)
            for (int64_t i = 0; i < std::min<int64_t>(PANEL, live - j * PANEL); i++)
                largest = std::max(largest, weights[(j * n + r) * PANEL + i]);
        for (int64_t j = 0; j < tiles; j++) {
            float* w = &weights[(j * n + r) * PANEL];
            const int64_t m = std::max<int64_t>(0, std::min<int64_t>(PANEL, live - j * PANEL));
            for (int64_t i = 0; i < m; i++) sum += w[i] = std::exp(w[i] - largest);
            std::fill(w + m, w + PANEL, 0.0f);  // the future
        }
        total[r] = sum;
    }
    for (int64_t j = 0; j < tiles; j++) {
        const int64_t m = std::min<int64_t>(PANEL, length - j * PANEL);
        for (int64_t p = 0; p < panels; p++) {
            const int width = std::min<int>(PANEL, head_size - p * PANEL);
            for (int64_t i = 0; i < m; i++) {
                const int64_t position = j * PANEL + i;
                const E* value = cache.values(blocks[position / cache.block_size], head) +
                                 position % cache.block_size * head_size;
                for (int d = 0; d < width; d++)
                    tile[i * PANEL + d] = cache.factor(value) * float(value[p * PANEL + d]);
                std::fill(tile + i * PANEL + width, tile + (i + 1) * PANEL, 0.0f);
            }
            multiply_all(&weights[j * n * PANEL], n, PANEL, tile, m, sums + p * n * PANEL,
                                nullptr, 0);
        }
    }
    for (int64_t r = 0; r < n; r++)
        for (int d = 0; d < head_size; d++)
            y[r * y_stride + d] = T(sums[(d / PANEL * n + r) * PANEL + d % PANEL] / total[r]);
}

template <typename T, typename E>
static void paged_attention(const T* qkv, T* y, E* layer, float* scales, const int64_t* positions,
                            const int64_t* tables, const int64_t* blocks, const bool* in_prompt,
                            int64_t n_tokens, int64_t n_head, int64_t block_size, int head_size,
                            int n_threads) {
    const Cache<E> cache{layer, scales, n_head, block_size, head_size};
    const int64_t width = n_head * head_size;
    // (first token, tokens): consecutive tokens of one row's prompt, or one of its completion
    std::vector<std::pair<int64_t, int64_t>> chunks;
    for (int64_t t = 0; t < n_tokens; t++)
        if (t > 0 && in_prompt[t] && tables[t] >= 0 && tables[t] == tables[t - 1] &&
            chunks.back().second < CHUNK)
            chunks.back().second++;
        else
            chunks.push_back({t, 1});
    // heads of a task: as many as leave each thread some of every row
    const int64_t group = (n_head + n_threads - 1) / n_threads,
                  groups = (n_head + group - 1) / group, tasks = groups * chunks.size();
    as_team(n_threads, 0, [&](Member& me) {
        me.share_rows(n_tokens, 2 * width, [&](int64_t t) {
            if (tables[t] < 0) return;
            const int64_t block = blocks[tables[t] + positions[t] / block_size],
                          slot = positions[t] % block_size;
            const T* key = qkv + (t * 3 + 1) * width;
            for (int64_t h = 0; h < 2 * n_head; h++)  // the values follow the keys, here and there
                keep(key + h * head_size, cache, cache.keys(block, h) + slot * head_size);
        });
        // only now: a chunk's tokens see each other's keys
        std::vector<float> scratch;
        me.share(tasks, [&](int64_t task, auto) {
            const int64_t t = chunks[task / groups].first, n = chunks[task / groups].second;
            const int64_t head = task % groups * group, n_heads = std::min(group, n_head - head),
                          first = positions[t];
            const T* query = qkv + t * 3 * width + head * head_size;
            T* answer = y + t * width + head * head_size;
            const int64_t* table = blocks + tables[t];
            if (tables[t] < 0)
                std::memcpy(answer, query + 2 * width, n_heads * head_size * sizeof(T));
            else if (in_prompt[t])
                for (int64_t h = 0; h < n_heads; h++)
                    attend_chunk(query + h * head_size, 3 * width, n, cache, table, first, head + h,
                                 scratch, answer + h * head_size, width);
            else if (head_size == 64)  // every GPT-2
                attend<64>(query, cache, table, first + 1, head, n_heads, scratch, answer);
            else
                attend<0>(query, cache, table, first + 1, head, n_heads, scratch, answer);
        });
    });
}

// qkv: [n_tokens, 3, n_head, head_size]; y: [n_tokens, n_head, head_size]; layer, scales: a Cache.
// positions, tables: [n_tokens]: a token's place in its row, and where in `blocks` the KV blocks of
// its row begin; −1: the row has no blocks, and the token attends to itself alone. in_prompt: a token
// of a prompt is computed by attend_chunk and any other by attend, whose sums have another order, so
// that none depends on how many of its row are computed at once.
#define EXPORT(name, T, E)                                                                         \
    extern "C" void name(const T* qkv, T* y, E* layer, float* scales, const int64_t* positions,    \
                         const int64_t* tables, const int64_t* blocks, const bool* in_prompt,      \
                         int64_t n_tokens, int64_t n_head, int64_t block_size, int head_size,      \
                         int n_threads) {                                                          \
        paged_attention(qkv, y, layer, scales, positions, tables, blocks, in_prompt, n_tokens,     \
                        n_head, block_size, head_size, n_threads);                                 \
    }
EXPORT(paged_attention_float32, float, float)
EXPORT(paged_attention_bfloat16, BFloat16, BFloat16)
EXPORT(paged_attention_int8_float32, float, int8_t)
EXPORT(paged_attention_int8_bfloat16, BFloat16, int8_t)
