// GPT-2's forward pass over the tokens of all rows (model.py's GPT2.forward), the kernels beside
// this file one after another.
//
// One call, since between two of them Python would find that the weights have driven its code and
// data out of the caches, 86 times a step of gpt2 (benchmarks/README.md).

#include "team.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

struct Linear;  // linear.cpp's
typedef void LinearKernel(const Linear*, const void* x, void* y, int64_t n_tokens, int n_threads);
typedef void AddNormKernel(const void* x, const void* y, const void* weight, const void* bias,
                           void* total, void* out, int64_t n_rows, int64_t width, float epsilon,
                           int n_threads);
typedef void AttentionKernel(const void* qkv, void* y, void* layer, float* scales,
                             const int64_t* positions, const int64_t* tables,
                             const int64_t* blocks, const bool* in_prompt, int64_t n_tokens,
                             int64_t n_head, int64_t block_size, int head_size, int n_threads);

// As kernels/__init__.py's Norm, Block and Model.
struct Norm {
    const void *weight, *bias;
};
struct Block {
    Norm ln_1, ln_2;
    const Linear *c_attn, *attn_c_proj, *c_fc, *mlp_c_proj;
    void* cache;
    float* scales;
};
struct Model {
    LinearKernel* linear;
    AddNormKernel* add_norm;
    AttentionKernel* attention;
    const char *wte, *wpe;  // [n_vocab, width], [n_ctx, width] of elements of `element` bytes
    const Block* h;
    Norm ln_f;
    const Linear* lm_head;
    int64_t n_layer, n_head, n_vocab, n_ctx, width, element, block_size;
    float epsilon;
};

static bool all_below(int64_t limit, const int64_t* values, int64_t n) {
    return std::all_of(values, values + n, [=](int64_t v) { return 0 <= v && v < limit; });
}

// to[i] = from[rows[i]]
static void gather(const char* from, const int64_t* rows, int64_t n, int64_t bytes, char* to) {
    for (int64_t i = 0; i < n; i++) std::memcpy(to + i * bytes, from + rows[i] * bytes, bytes);
}

// ids, positions: [n_tokens]; tables, blocks, in_prompt: see attention.cpp; samples: [n_samples],
// the tokens whose logits: [n_samples, n_vocab] are wanted, n_tokens at most. Returns whether the
// model has all of those ids and positions; if not, nothing was done.
extern "C" int forward(const Model* model, const int64_t* ids, const int64_t* positions,
                       const int64_t* tables, const int64_t* blocks, const bool* in_prompt,
                       const int64_t* samples, int64_t n_tokens, int64_t n_samples, void* logits,
                       int n_threads) {
    const Model& m = *model;
    if (!all_below(m.n_vocab, ids, n_tokens) || !all_below(m.n_ctx, positions, n_tokens))
        return false;
    const int64_t row = m.width * m.element, size = n_tokens * row;
    const auto memory = allocate(8 * size);
    std::atomic<int64_t> delayed_ns{0};
    as_team(n_threads, linear_bytes(n_tokens, 4 * m.width), [&](Member& me) {
        char *x = memory.get()->bytes, *y = x + size, *total = y + size, *normed = total + size,
             *wide = normed + size;
        const auto add_norm = [&](const Norm& norm) {  // and x is the sum
            m.add_norm(x, y, norm.weight, norm.bias, total, normed, n_tokens, m.width, m.epsilon,
                       n_threads);
            std::swap(x, total);
        };
        const auto linear = [&](const Linear* layer, const void* from, void* to) {
            m.linear(layer, from, to, n_tokens, n_threads);
        };
        me.share(1, [&](int64_t, auto) {
            gather(m.wte, ids, n_tokens, row, x);
            gather(m.wpe, positions, n_tokens, row, y);
        });
        for (const Block* block = m.h; block < m.h + m.n_layer; block++) {
            add_norm(block->ln_1);
            linear(block->c_attn, normed, wide);
            m.attention(wide, normed, block->cache, block->scales, positions, tables, blocks,
                        in_prompt, n_tokens, m.n_head, m.block_size, m.width / m.n_head, n_threads);
            linear(block->attn_c_proj, normed, y);
            add_norm(block->ln_2);
            linear(block->c_fc, normed, wide);
            linear(block->mlp_c_proj, wide, y);
        }
        me.share(1, [&](int64_t, auto) {
            gather(x, samples, n_samples, row, total);
            gather(y, samples, n_samples, row, wide);
        });
        m.add_norm(total, wide, m.ln_f.weight, m.ln_f.bias, x, normed, n_samples, m.width,
                   m.epsilon, n_threads);
        m.linear(m.lm_head, normed, logits, n_samples, n_threads);
        delayed_ns += delay.since_last_ns();
    });
    crew.learn(n_threads, delayed_ns, now_ns());
    return true;
}
