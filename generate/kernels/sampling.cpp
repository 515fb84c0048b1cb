// From logits to ids, a row at a time: temperature, top-k, top-p, and the inverse of the cumulative
// distribution.
//
// What generate/sampling.py does with PyTorch, without its sort of the whole vocabulary: top-p
// needs to know only where the probability runs out, so logits are counted into buckets and the one
// bucket that holds the edge is sorted. A draw depends on its own row alone. Sums are double.

#include "bfloat16.h"
#include "team.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

const int BUCKETS = 1024, BUCKETS_PER_NAT = 64, BLOCK = 256;

// How a row is sampled, as generate/sampling.py packs it.
struct Settings {
    double temperature, top_p;  // temperature 0: the largest logit, the lowest id of equals
    int64_t top_k;
    uint64_t seed;
    int64_t index;
};

// One thread's memory, kept: fresh from the system for every row it would cost as much as the
// arithmetic.
struct Scratch {
    std::vector<float> scaled, weights, ones;
    std::vector<int> buckets;
    std::vector<double> sums;
    std::vector<std::pair<float, float>> inside;
};

static uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

// The number of a draw, as generate/sampling.py defines it.
static double uniform(uint64_t seed, uint64_t index) {
    const uint64_t GAMMA = 0x9e3779b97f4a7c15;
    return double(mixed(mixed(seed + GAMMA) + (index + 1) * GAMMA) >> 11) * 0x1p-53;
}

// The largest value such that the weights of all values from it upwards add up to `needed`, or else
// the smallest value that has any weight. values: ≤ 0.
static float edge(const std::vector<float>& values, const std::vector<float>& weights,
                  double needed, Scratch& scratch) {
    const size_t n = values.size();
    std::vector<int>& bucket = scratch.buckets;
    bucket.resize(n);
    for (size_t i = 0; i < n; i++) {
        bucket[i] = int(std::min(-values[i] * BUCKETS_PER_NAT, float(BUCKETS - 1)));
        // no number: a broken model's logits
        if (unsigned(bucket[i]) >= unsigned(BUCKETS)) bucket[i] = BUCKETS - 1;
    }
    double mass[BUCKETS] = {0}, above = 0;
    for (size_t i = 0; i < n; i++) mass[bucket[i]] += weights[i];
    int at = 0, last = BUCKETS - 1;
    while (last > 0 && mass[last] == 0) last--;
    while (at < last && above + mass[at] < needed) above += mass[at++];
    auto& inside = scratch.inside;
    inside.clear();
    for (size_t i = 0; i < n; i++)
        if (bucket[i] == at && weights[i] > 0) inside.push_back({values[i], weights[i]});
    std::sort(inside.begin(), inside.end(), std::greater<>());
    for (const auto& [value, weight] : inside)
        if ((above += weight) >= needed) return value;
    return inside.empty() ? std::numeric_limits<float>::lowest() : inside.back().first;
}

template <typename T>
static int64_t draw(const T* logits, int64_t n_vocab, const Settings& how, Scratch& scratch) {
    const float temperature = how.temperature;
    std::vector<float>&scaled = scratch.scaled, &weights = scratch.weights;
    scaled.resize(n_vocab), weights.resize(n_vocab), scratch.ones.resize(n_vocab, 1);
    for (int64_t i = 0; i < n_vocab; i++) scaled[i] = float(logits[i]);
    const float largest = *std::max_element(scaled.begin(), scaled.end());
    for (float& s : scaled) s = (s - largest) / temperature;
    float least = std::numeric_limits<float>::lowest();
    if (how.top_k < n_vocab) least = edge(scaled, scratch.ones, how.top_k, scratch);
    for (int64_t i = 0; i < n_vocab; i++)
        weights[i] = scaled[i] >= least ? std::exp(std::max(scaled[i], -80.0f)) : 0;
    if (how.top_p < 1) {  // nucleus sampling (Holtzman et al. 2020, section 3.1)
        const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
        least = edge(scaled, weights, how.top_p * all, scratch);
        for (int64_t i = 0; i < n_vocab; i++) weights[i] = scaled[i] >= least ? weights[i] : 0;
    }
    std::vector<double>& sums = scratch.sums;
    sums.assign((n_vocab + BLOCK - 1) / BLOCK, 0);
    double total = 0, before = 0;
    for (size_t b = 0; b < sums.size(); b++) {
        const int64_t end = std::min<int64_t>((b + 1) * BLOCK, n_vocab);
        for (int64_t i = b * BLOCK; i < end; i++) sums[b] += weights[i];
        total += sums[b];
    }
    const double target = uniform(how.seed, how.index) * total;
    size_t b = 0;
    while (b + 1 < sums.size() && before + sums[b] <= target) before += sums[b++];
    int64_t last = 0;  // the last id with any probability: rounding may carry the target past it
    for (int64_t i = b * BLOCK; i < std::min<int64_t>((b + 1) * BLOCK, n_vocab); i++)
        if (weights[i] > 0) {
            last = i;
            if ((before += weights[i]) > target) break;
        }
    return last;
}

template <typename T>
static void sample(const T* logits, int64_t stride, int64_t n_rows, int64_t n_vocab,
                   const Settings* settings, int64_t* ids, int n_threads) {
    as_team(n_rows > 1 ? n_threads : 1, 0, [&](Member& me) {
        Scratch scratch;
        me.share(n_rows, [&](int64_t r, auto) {
            const T* row = logits + r * stride;
            if (settings[r].temperature > 0) {
                ids[r] = draw(row, n_vocab, settings[r], scratch);
                return;
            }
            float largest = float(row[0]);
            int64_t& id = ids[r] = 0;
            for (int64_t at = 0; at < n_vocab; at += BLOCK) {  // logits are read once
                float most = largest;
                const int64_t end = std::min<int64_t>(at + BLOCK, n_vocab);
                for (int64_t i = at; i < end; i++) most = std::max(most, float(row[i]));
                if (most > largest) largest = most, id = at;
            }
            while (id < n_vocab - 1 && float(row[id]) != largest) id++;  // the lowest of equals
        });
    });
}

// logits: [n_rows, stride], of which n_vocab ≤ stride ids may be drawn. settings, ids: [n_rows].
#define EXPORT(name, T)                                                                            \
    extern "C" void name(const T* logits, int64_t stride, int64_t n_rows, int64_t n_vocab,         \
                         const Settings* settings, int64_t* ids, int n_threads) {                  \
        sample(logits, stride, n_rows, n_vocab, settings, ids, n_threads);                         \
    }
EXPORT(sample_float32, float)
EXPORT(sample_bfloat16, BFloat16)
