// Attention over a paged KV cache, for the tokens of many rows of unequal lengths (selective batching; Orca,
// OSDI 2022, section 3.2).
//
// PyTorch's own attention wants rows of one length: it pads and masks, or is called once a row. This loop stores
// each token's key and value and then reads exactly the live ones of its row, block by block. Reading them from
// memory is what bounds it, so the code is portable and the compiler does the vectors.
//
// Built by kernels/__init__.py. Sums are float, and a token's result depends on its own row alone: neighbours in
// the batch, the number of threads and where the blocks lie change no bit of it.

#include "bfloat16.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

const int LARGEST_HEAD = 256, CACHE_LINE = 64;
const int AHEAD = 16;  // keys: far enough for memory to answer in time; the hardware's prefetcher stops at every page

template <typename T>
static inline void prefetch(const T* row, int head_size) {
    const char* line = (const char*)(row + AHEAD * head_size);
    for (int i = 0; i < head_size * int(sizeof(T)); i += CACHE_LINE) __builtin_prefetch(line + i);
}

// y = softmax(q K / √D) V: one query against tokens 0 … length − 1 of its row. keys, values: [slots, D].
template <typename T>
static inline void attend(const T* query, const T* keys, const T* values, const int64_t* blocks, int64_t block_size,
                          int64_t length, int head_size, float* weights, T* y) {
    float q[LARGEST_HEAD], sum[LARGEST_HEAD] = {0}, largest = std::numeric_limits<float>::lowest(), total = 0;
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

template <typename T>
static void paged_attention(const T* qkv, T* y, T* keys, T* values, const int64_t* positions, const int64_t* tables,
                            const int64_t* blocks, int64_t n_tokens, int64_t n_head, int64_t n_slots, int64_t block_size,
                            int head_size, int n_threads) {
    const int64_t width = n_head * head_size, of_a_head = n_slots * head_size;
    // Heads are the outer loop: each thread gets long and short rows alike.
    #pragma omp parallel num_threads(n_threads)
    {
        #pragma omp for collapse(2)
        for (int64_t h = 0; h < n_head; h++)
            for (int64_t t = 0; t < n_tokens; t++) {
                if (tables[t] < 0) continue;
                const int64_t block = blocks[tables[t] + positions[t] / block_size];
                const int64_t at = h * of_a_head + (block * block_size + positions[t] % block_size) * head_size;
                const T* key = qkv + (t * 3 + 1) * width + h * head_size;
                std::memcpy(keys + at, key, head_size * sizeof(T));
                std::memcpy(values + at, key + width, head_size * sizeof(T));
            }
        // The threads meet here: a chunk's tokens see each other's keys.
        std::vector<float> weights;
        #pragma omp for collapse(2)
        for (int64_t h = 0; h < n_head; h++)
            for (int64_t t = 0; t < n_tokens; t++) {
                const T* query = qkv + t * 3 * width + h * head_size;
                T* answer = y + t * width + h * head_size;
                if (tables[t] < 0) {
                    std::memcpy(answer, query + 2 * width, head_size * sizeof(T));
                    continue;
                }
                const int64_t length = positions[t] + 1, *table = blocks + tables[t];
                const T *k = keys + h * of_a_head, *v = values + h * of_a_head;
                weights.resize(length);
                if (head_size == 64)  // every GPT-2: a number that the compiler knows unrolls the loops
                    attend(query, k, v, table, block_size, length, 64, weights.data(), answer);
                else
                    attend(query, k, v, table, block_size, length, head_size, weights.data(), answer);
            }
    }
}

// qkv: [n_tokens, 3, n_head, head_size]; y: [n_tokens, n_head, head_size]; keys, values: [n_head, n_slots, head_size].
// positions, tables: [n_tokens]: a token's place in its row, and where in `blocks` the KV blocks of its row begin;
// −1: the row has no blocks, and the token attends to itself alone.
#define EXPORT(name, T)                                                                                                 \
    extern "C" void name(const T* qkv, T* y, T* keys, T* values, const int64_t* positions, const int64_t* tables,      \
                         const int64_t* blocks, int64_t n_tokens, int64_t n_head, int64_t n_slots, int64_t block_size, \
                         int head_size, int n_threads) {                                                               \
        paged_attention(qkv, y, keys, values, positions, tables, blocks, n_tokens, n_head, n_slots, block_size,        \
                        head_size, n_threads);                                                                         \
    }
EXPORT(paged_attention_float32, float)
EXPORT(paged_attention_bfloat16, BFloat16)
