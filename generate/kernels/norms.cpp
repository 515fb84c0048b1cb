// total = x + y, and the layer norm of each row of it (Ba et al. 2016): a residual addition and the
// norm that reads its sum, while the row is still in the level-1 cache.
//
// Sums are float, in an order that depends on the width alone: a row's result does not depend on
// the other rows, nor on the threads.

#include "bfloat16.h"
#include "team.h"

#include <cmath>
#include <cstdint>

template <typename T>
static void add_norm_row(const T* __restrict x, const T* __restrict y, const T* __restrict weight,
                         const T* __restrict bias, T* __restrict total, T* __restrict out,
                         int64_t width, float epsilon) {
    float sum = 0, squares = 0;
    for (int64_t i = 0; i < width; i++) {
        total[i] = T(float(x[i]) + float(y[i]));
        sum += float(total[i]);  // the norm is of what the next addition will find
    }
    const float mean = sum / width;
    for (int64_t i = 0; i < width; i++) {
        const float centred = float(total[i]) - mean;
        squares += centred * centred;
    }
    const float scale = 1 / std::sqrt(squares / width + epsilon);
    for (int64_t i = 0; i < width; i++)
        out[i] = T((float(total[i]) - mean) * scale * float(weight[i]) + float(bias[i]));
}

template <typename T>
static void add_norm(const T* x, const T* y, const T* weight, const T* bias, T* total, T* out,
                     int64_t n_rows, int64_t width, float epsilon, int n_threads) {
    as_team(n_rows * width > WORTH_HANDING_OUT ? n_threads : 1, 0, [&](Member& me) {
        me.share_rows(n_rows, width, [&](int64_t r) {
            add_norm_row(x + r * width, y + r * width, weight, bias, total + r * width,
                         out + r * width, width, epsilon);
        });
    });
}

// x, y, total, out: [n_rows, width]; weight, bias: [width].
#define EXPORT(name, T)                                                                       \
    extern "C" void name(const T* x, const T* y, const T* weight, const T* bias, T* total,    \
                         T* out, int64_t n_rows, int64_t width, float epsilon, int n_threads) { \
        add_norm(x, y, weight, bias, total, out, n_rows, width, epsilon, n_threads);          \
    }
EXPORT(add_norm_float32, float)
EXPORT(add_norm_bfloat16, BFloat16)
