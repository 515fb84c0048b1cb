// The products of multiply.h by AMX's tiles: 16 tokens × 16 outputs at a time, of Pairs or Quads.
//
// A packed panel is what tiles of weights have to be: 16 elements × 16 outputs. A tile sums the first
// numbers of Pairs and the second ones apart, and then adds both to the sum so far (Intel,
// Instruction Set Reference, TDPBF16PS), not in the order of multiply.h. So a process multiplies by
// the one or by the other, whatever the number of tokens, and an answer does not depend on the batch.
//
// Ran on an Intel Xeon with AMX (model 207) on 2026-11-28, to the bits of its emulation.
#pragma once

#include "multiply.h"

#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

const int TILE = 16;  // tokens, outputs, and elements of them
// elements: their weights for a panel and the next ones are in the level-2 cache, with all tokens
const int TILED_BLOCK = 512;

typedef std::array<uint8_t, 8> TileRows;  // rows, of 64 bytes each, in each tile

#ifdef EMULATE_TILES  // for tests on processors without them; 0: as if Linux refused them
#define TILED 1

static bool may_use_tiles() { return EMULATE_TILES; }
static thread_local uint32_t tiles[8][TILE][TILE];
static thread_local TileRows tile_rows;
static void configure(const TileRows& rows) { tile_rows = rows; }
static void release() {}
static void LOAD_TILE(int tile, const void* from, int64_t stride) {
    for (int64_t r = 0; r < tile_rows[tile]; r++)
        std::memcpy(tiles[tile][r], (const char*)from + r * stride, 64);
}
static void STORE_TILE(int tile, void* to, int64_t stride) {
    for (int64_t r = 0; r < tile_rows[tile]; r++)
        std::memcpy((char*)to + r * stride, tiles[tile][r], 64);
}
static void multiply_row(uint32_t* row, const Pair* x, const Pair (*w)[TILE]) {
    Vector firsts = {}, seconds = {};
    for (int k = 0; k < TILE; k++) {
        const Bits pair = Bits{} + x[k];
        firsts = multiply_add(firsts, first(pair), first(load(w[k])));
        seconds = multiply_add(seconds, second(pair), second(load(w[k])));
    }
    firsts += seconds;
    asm("" : "+x"(firsts));  // else -ffast-math adds the three in another order
    store((float*)row, load((const float*)row) + firsts);
}
static void multiply_row(uint32_t* row, const Quad* x, const Quad (*w)[TILE]) {
    Ints sum = load((const Quad*)row);
    for (int k = 0; k < TILE; k++) sum = multiply_add(sum, x[k], load(w[k]));
    store((int32_t*)row, sum);
}
#define MULTIPLY_TILES(sums, x, w)          \
    for (int64_t r = 0; r < tile_rows[x]; r++) \
        multiply_row(tiles[sums][r], (const T*)tiles[x][r], (const T(*)[TILE])tiles[w])

#elif defined __AMX_BF16__ && defined __AMX_INT8__ && defined __AVX512F__
#define TILED 1
#include <sys/syscall.h>
#include <unistd.h>

// Linux lets a process use tiles once it has requested them.
static bool may_use_tiles() {
    const int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool may = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return may;
}

static void configure(const TileRows& rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {}};
    std::copy(rows.begin(), rows.end(), shape.rows);
    // by itself: GCC 12's _tile_loadconfig says that it reads 8 of the 64 bytes
    asm volatile("ldtilecfg %0" ::"m"(shape));
}
static void release() { _tile_release(); }
// macros: a tile's number is a part of the instruction
#define LOAD_TILE(tile, from, stride) _tile_loadd(tile, from, stride)
#define STORE_TILE(tile, to, stride) _tile_stored(tile, to, stride)
#define MULTIPLY_TILES(sums, x, w)                                     \
    if constexpr (std::is_same_v<T, Pair>) _tile_dpbf16ps(sums, x, w); \
    else _tile_dpbusd(sums, x, w)
#endif

#ifdef TILED
static_assert(PANEL == 4 * TILE, "panels are AVX-512's, which every processor with AMX has");

// Memory that is read next, brought into the level-2 cache some lines at a time.
struct Fetch {
    const char *at, *const end;
    const int64_t lines;
    void some() {
        if (at >= end) return;
        for (int64_t i = 0; i < lines; i++) __builtin_prefetch(at + i * CACHE_LINE, 0, 2);
        at += lines * CACHE_LINE;
    }
};

// sums += x w over n elements: of one tile of tokens with the panel's four of outputs, or of `two`,
// the other at x2 and sums2, with two. Tiles are loaded before any is multiplied: by turns it takes
// longer. x: of rows that begin with a cache line, for loading from two of them takes longer.
template <bool two, typename T, typename Sum>
static void multiply_tiles(const T* x, const T* x2, int64_t x_stride, const T* w, int64_t n,
                           Sum* sums, Sum* sums2, Fetch& fetch) {
    const int64_t row = PANEL * sizeof(T), x_row = x_stride * sizeof(T);
    asm volatile("" ::: "memory");  // the compiler does not know that loading a tile reads memory
    LOAD_TILE(0, sums, row);
    LOAD_TILE(1, sums + TILE, row);
    LOAD_TILE(2, sums2, row);
    LOAD_TILE(3, sums2 + TILE, row);
    for (int64_t k = 0; k < n; k += TILE, w += TILE * PANEL) {
        fetch.some();
        LOAD_TILE(4, x + k, x_row);
        if constexpr (two) LOAD_TILE(5, x2 + k, x_row);
        LOAD_TILE(6, w, row);
        LOAD_TILE(7, w + TILE, row);
        MULTIPLY_TILES(0, 4, 6);
        MULTIPLY_TILES(1, 4, 7);
        if constexpr (two) {
            MULTIPLY_TILES(2, 5, 6);
            MULTIPLY_TILES(3, 5, 7);
        } else {
            LOAD_TILE(6, w + 2 * TILE, row);
            LOAD_TILE(7, w + 3 * TILE, row);
            MULTIPLY_TILES(2, 4, 6);
            MULTIPLY_TILES(3, 4, 7);
        }
    }
    STORE_TILE(0, sums, row);
    STORE_TILE(1, sums + TILE, row);
    STORE_TILE(2, sums2, row);
    STORE_TILE(3, sums2 + TILE, row);
}

// While it lives, its thread's tiles are in use, if they are on.
struct Tiles {
    const bool on = may_use_tiles();
    int64_t tokens = 0;  // that they are configured for
    ~Tiles() {
        if (tokens) release();
    }

    // Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights. Fewer rows take less time.
    void configure_for(int64_t wanted) {
        if (std::exchange(tokens, wanted) == wanted) return;
        const auto a = uint8_t(wanted > TILE ? (wanted + 1) / 2 : wanted),
                   b = uint8_t(wanted > TILE ? wanted / 2 : wanted);
        configure({a, a, b, b, a, b, TILE, TILE});
    }

    // As multiply.h's, in passes of two tiles of tokens at most. n: a multiple of TILE, if on.
    template <typename T, typename Sum>
    void multiply_all(const T* x, int64_t n_tokens, int64_t x_stride, const T* w, int64_t n,
                      Sum* sums, const char* next, int lines) {
        if (!on) return ::multiply_all(x, n_tokens, x_stride, w, n, sums, next, lines);
        const int64_t passes = (n_tokens + 2 * TILE - 1) / (2 * TILE),
                      sweeps = n_tokens > TILE ? 2 * passes : 1;
        Fetch fetch{next, next + n * lines * CACHE_LINE, (TILE * lines + sweeps - 1) / sweeps};
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t from = n_tokens * pass / passes,
                          tokens = n_tokens * (pass + 1) / passes - from, a = (tokens + 1) / 2;
            const T* const x1 = x + from * x_stride;
            Sum* const sums1 = sums + from * PANEL;
            const int HALF = PANEL / 2;
            configure_for(tokens);
            if (tokens <= TILE)
                multiply_tiles<false>(x1, x1, x_stride, w, n, sums1, sums1 + HALF, fetch);
            else
                for (int half = 0; half < PANEL; half += HALF)
                    multiply_tiles<true>(x1, x1 + a * x_stride, x_stride, w + half, n, sums1 + half,
                                         sums1 + a * PANEL + half, fetch);
        }
    }
};
#else
static bool may_use_tiles() { return false; }
struct Tiles {
    const bool on = false;
    template <typename... Operands>
    void multiply_all(Operands... operands) {
        ::multiply_all(operands...);
    }
};
#endif
