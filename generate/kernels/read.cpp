// The sum of an array, as fast as this machine reads: what benchmarks hold the kernels against.
//
// Wide loads into sums enough to hide an addition's latency, the next lines on their way, and
// blocks handed out one by one, as in linear.cpp.

#include <algorithm>
#include <cstdint>

// 64-bit words: a cache line; 256 KB; 4 KB
const int64_t WORDS = 8, SUMS = 8, BLOCK = 1 << 15, AHEAD = 512;
typedef int64_t Line __attribute__((vector_size(WORDS * 8), aligned(8), may_alias));

// words: [n]. Returns their sum, modulo 2^64.
extern "C" int64_t read_int64(const int64_t* words, int64_t n, int n_threads) {
    int64_t total = 0;
    #pragma omp parallel for num_threads(n_threads) schedule(dynamic) reduction(+ : total)
    for (int64_t block = 0; block < n; block += BLOCK) {
        const int64_t end = std::min(block + BLOCK, n);
        Line sums[SUMS] = {};
        int64_t i = block;
        for (; i + SUMS * WORDS <= end; i += SUMS * WORDS)
            #pragma GCC unroll 8
            for (int s = 0; s < SUMS; s++) {
                __builtin_prefetch(words + i + s * WORDS + AHEAD, 0, 2);
                sums[s] += *(const Line*)(words + i + s * WORDS);
            }
        for (; i < end; i++) total += words[i];
        for (int s = 0; s < SUMS; s++)
            for (int w = 0; w < WORDS; w++) total += sums[s][w];
    }
    return total;
}
