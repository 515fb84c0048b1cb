// Attention over a paged KV cache, for the tokens of many rows of unequal lengths (selective
// batching; Orca, OSDI 2022, section 3.2).
//
// PyTorch's own attention wants rows of one length: it pads and masks, or is called once a row.
// This loop stores each token's key and value and then reads exactly the live ones of its row,
// block by block. Reading them from memory is what bounds it, so the code is portable and the
// compiler does the vectors.
//
// Built by kernels/__init__.py. Sums are float, and a token's result depends on its own row alone:
// neighbours in the batch, the number of threads and where the blocks lie change no bit of it.

#include "multiply.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

const int LARGEST_HEAD = 256;
const int CHUNK = 96;  // queries of one row that share what they read: some passes of multiply_all
// keys: far enough for memory to answer in time; the hardware's prefetcher stops at every page
const int AHEAD = 16;

template <typename T>
static inline void prefetch(const T* row, int head_size) {
    const char* line = (const char*)(row + AHEAD * head_size);
    for (int i = 0; i < head_size * int(sizeof(T)); i += CACHE_LINE) __builtin_prefetch(line + i);
}

// y = softmax(q K / √D) V: one query against tokens 0 … length − 1 of its row.
// keys, values: [slots, D].
template <typename T>
static inline void attend(const T* query, const T* keys, const T* values, const int64_t* blocks,
                          int64_t block_size, int64_t length, int head_size, float* weights, T* y) {
    float q[LARGEST_HEAD], sum[LARGEST_HEAD] = {0},
          largest = std::numeric_limits<float>::lowest(), total = 0;
    for (int d = 0; d < head_size; d++) q[d] = float(query[d]) / std::sqrt(float(head_size));
    for (int64_t start = 0; start < length; start += block_size) {
        const T* key = keys + blocks[start / block_size] * block_size * head_size;
        const int64_t n = std::min(block_size, length - start);
        for (int64_t i = 0; i < n; i++, key += head_size) {
            prefetch(key, head_size);
            float dot = 0;
            #pragma omp simd reduction(+ : dot)
            for (int d = 0; d < head_size; d++) dot += q[d] * float(key[d]);
            weights[start + i] = dot;
        }
    }
    #pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < length; i++) largest = std::max(largest, weights[i]);
    #pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < length; i++) total += weights[i] = std::exp(weights[i] - largest);
    for (int64_t start = 0; start < length; start += block_size) {
        const T* value = values + blocks[start / block_size] * block_size * head_size;
        const int64_t n = std::min(block_size, length - start);
        for (int64_t i = 0; i < n; i++, value += head_size) {
            prefetch(value, head_size);
            #pragma omp simd
            for (int d = 0; d < head_size; d++) sum[d] += weights[start + i] * float(value[d]);
        }
    }
    for (int d = 0; d < head_size; d++) y[d] = T(sum[d] / total);
}

// The same for n queries at positions first, first + 1, … of one row: two products for every PANEL
// keys. queries, y: [n, stride], [n, y_stride].
template <typename T>
static void attend_chunk(const T* queries, int64_t stride, int64_t n, const T* keys,
                         const T* values, const int64_t* blocks, int64_t block_size, int64_t first,
                         int head_size, std::vector<float>& weights, T* y, int64_t y_stride) {
    const int64_t length = first + n, tiles = (length + PANEL - 1) / PANEL,
                  panels = (head_size + PANEL - 1) / PANEL;
    float q[CHUNK * LARGEST_HEAD], tile[PANEL * std::max(PANEL, LARGEST_HEAD)], total[CHUNK];
    float sums[CHUNK * (LARGEST_HEAD + PANEL)] = {0};  // [panels, n, PANEL]
    const auto at = [&](const T* cache, int64_t position) {
        return cache +
               (blocks[position / block_size] * block_size + position % block_size) * head_size;
    };
    for (int64_t r = 0; r < n; r++)
        for (int d = 0; d < head_size; d++)
            q[r * head_size + d] = float(queries[r * stride + d]) / std::sqrt(float(head_size));
    weights.assign(tiles * n * PANEL, 0);  // [tiles, n, PANEL]
    for (int64_t j = 0; j < tiles; j++) {
        const int64_t m = std::min<int64_t>(PANEL, length - j * PANEL);
        std::fill(tile, tile + head_size * PANEL, 0.0f);
        for (int64_t i = 0; i < m; i++) {
            const T* key = at(keys, j * PANEL + i);
            for (int d = 0; d < head_size; d++) tile[d * PANEL + i] = float(key[d]);
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
                const T* value = at(values, j * PANEL + i) + p * PANEL;
                for (int d = 0; d < width; d++) tile[i * PANEL + d] = float(value[d]);
                std::fill(tile + i * PANEL + width, tile + (i + 1) * PANEL, 0.0f);
            }
            multiply_all(&weights[j * n * PANEL], n, PANEL, tile, m, sums + p * n * PANEL, nullptr,
                         0);
        }
    }
    for (int64_t r = 0; r < n; r++)
        for (int d = 0; d < head_size; d++)
            y[r * y_stride + d] = T(sums[(d / PANEL * n + r) * PANEL + d % PANEL] / total[r]);
}

template <typename T>
static void paged_attention(const T* qkv, T* y, T* keys, T* values, const int64_t* positions,
                            const int64_t* tables, const int64_t* blocks, int64_t n_tokens,
                            int64_t n_head, int64_t n_slots, int64_t block_size, int head_size,
                            int n_threads) {
    const int64_t width = n_head * head_size, of_a_head = n_slots * head_size;
    // (first token, tokens): consecutive tokens of one row
    std::vector<std::pair<int64_t, int64_t>> chunks;
    for (int64_t t = 0; t < n_tokens; t++)
        if (t > 0 && tables[t] >= 0 && tables[t] == tables[t - 1] && chunks.back().second < CHUNK)
            chunks.back().second++;
        else
            chunks.push_back({t, 1});
    #pragma omp parallel num_threads(n_threads)
    {
        #pragma omp for collapse(2)
        for (int64_t h = 0; h < n_head; h++)
            for (int64_t t = 0; t < n_tokens; t++) {
                if (tables[t] < 0) continue;
                const int64_t block = blocks[tables[t] + positions[t] / block_size];
                const int64_t at =
                    h * of_a_head + (block * block_size + positions[t] % block_size) * head_size;
                const T* key = qkv + (t * 3 + 1) * width + h * head_size;
                std::memcpy(keys + at, key, head_size * sizeof(T));
                std::memcpy(values + at, key + width, head_size * sizeof(T));
            }
        // The threads meet here: a chunk's tokens see each other's keys.
        std::vector<float> weights;
        #pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t h = 0; h < n_head; h++)
            for (size_t c = 0; c < chunks.size(); c++) {
                const int64_t t = chunks[c].first, n = chunks[c].second, first = positions[t];
                const T *query = qkv + t * 3 * width + h * head_size,
                        *k = keys + h * of_a_head, *v = values + h * of_a_head;
                T* answer = y + t * width + h * head_size;
                const int64_t* table = blocks + tables[t];
                if (tables[t] < 0) {
                    std::memcpy(answer, query + 2 * width, head_size * sizeof(T));
                } else if (n > 1) {
                    attend_chunk(query, 3 * width, n, k, v, table, block_size, first, head_size,
                                 weights, answer, width);
                } else {
                    weights.resize(first + 1);
                    // every GPT-2: a number that the compiler knows unrolls the loops
                    if (head_size == 64)
                        attend(query, k, v, table, block_size, first + 1, 64, weights.data(),
                               answer);
                    else
                        attend(query, k, v, table, block_size, first + 1, head_size, weights.data(),
                               answer);
                }
            }
    }
}

// qkv: [n_tokens, 3, n_head, head_size]; y: [n_tokens, n_head, head_size];
// keys, values: [n_head, n_slots, head_size]. positions, tables: [n_tokens]: a token's place in its
// row, and where in `blocks` the KV blocks of its row begin; −1: the row has no blocks, and the
// token attends to itself alone.
#define EXPORT(name, T)                                                                            \
    extern "C" void name(const T* qkv, T* y, T* keys, T* values, const int64_t* positions,         \
                         const int64_t* tables, const int64_t* blocks, int64_t n_tokens,           \
                         int64_t n_head, int64_t n_slots, int64_t block_size, int head_size,       \
                         int n_threads) {                                                          \
        paged_attention(qkv, y, keys, values, positions, tables, blocks, n_tokens, n_head,         \
                        n_slots, block_size, head_size, n_threads);                                \
    }
EXPORT(paged_attention_float32, float)
EXPORT(paged_attention_bfloat16, BFloat16)
