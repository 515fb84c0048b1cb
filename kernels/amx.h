// The product of multiply.h for Pairs by AMX's tiles: 16 tokens × 16 outputs at a time.
//
// A packed panel is what a tile of weights has to be: 16 pairs of inputs × 16 outputs. A tile sums
// first and second elements apart and then adds both (Intel, Instruction Set Reference, TDPBF16PS),
// not in the order of multiply.h. So a process multiplies by the one or by the other, whatever the
// number of tokens, and an answer does not depend on the batch here either.
#pragma once

#include "multiply.h"

const int TILE = 16;  // tokens, outputs, and pairs of inputs

#if defined __AMX_BF16__ && defined __AVX512F__
#include <sys/syscall.h>
#include <unistd.h>

// Linux lets a process use tiles once it has requested them.
static bool may_use_tiles() {
    const int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool may = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return may;
}

// While it lives, its thread has seven whole tiles.
struct Tiles {
    Tiles() {
        struct Shape {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        };
        alignas(64) static const Shape shape = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64},
                                                {16, 16, 16, 16, 16, 16, 16}};
        // by itself: GCC 12's _tile_loadconfig says that it reads 8 of the 64 bytes
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Tiles() { _tile_release(); }
};
// macros: a tile's number is a part of the instruction
#define LOAD_TILE(tile, from, stride) _tile_loadd(tile, from, stride)
#define STORE_TILE(tile, to, stride) _tile_stored(tile, to, stride)
#define MULTIPLY_TILES(sums, x, w) _tile_dpbf16ps(sums, x, w)

#elif defined EMULATE_TILES  // for tests on processors without them
#include <cstring>

static bool may_use_tiles() { return true; }
struct Tiles {
    Tiles() {}
};
static thread_local uint32_t tiles[8][TILE][TILE];

static void LOAD_TILE(int tile, const void* from, int64_t stride) {
    for (int r = 0; r < TILE; r++) std::memcpy(tiles[tile][r], (const char*)from + r * stride, 64);
}
static void STORE_TILE(int tile, void* to, int64_t stride) {
    for (int r = 0; r < TILE; r++) std::memcpy((char*)to + r * stride, tiles[tile][r], 64);
}
static void multiply_emulated(int sums, int x, int w) {
    for (int r = 0; r < TILE; r++)
        for (int o = 0; o < TILE; o++) {
            float firsts = 0, seconds = 0;
            for (int k = 0; k < TILE; k++) {
                const Pair a = tiles[x][r][k], b = tiles[w][k][o];
                firsts += float_of(a << 16) * float_of(b << 16);
                seconds += float_of(a & 0xffff0000) * float_of(b & 0xffff0000);
            }
            const float sum = float_of(tiles[sums][r][o]) + (firsts + seconds);
            std::memcpy(&tiles[sums][r][o], &sum, 4);
        }
}
#define MULTIPLY_TILES(sums, x, w) multiply_emulated(sums, x, w)
#endif

#ifdef MULTIPLY_TILES
const bool TILED = true;
static_assert(PANEL == 4 * TILE, "panels are AVX-512's, which every processor with AMX has");

// As multiply_all. n_tokens, n: multiples of TILE.
static void multiply_tiles(const Pair* x, int64_t n_tokens, int64_t x_stride, const Pair* w,
                           int64_t n, float* sums, const char* next, int lines) {
    const int64_t passes = n_tokens / TILE, row = PANEL * 4;  // bytes, of weights as of sums
    asm volatile("" ::: "memory");  // the compiler does not know that loading a tile reads memory
    for (int64_t pass = 0; pass < passes; pass++, x += TILE * x_stride, sums += TILE * PANEL) {
        LOAD_TILE(0, sums, row);
        LOAD_TILE(1, sums + TILE, row);
        LOAD_TILE(2, sums + 2 * TILE, row);
        LOAD_TILE(3, sums + 3 * TILE, row);
        for (int64_t k = 0; k < n; k += TILE) {
            for (int64_t line = k * lines + pass; line < (k + TILE) * lines; line += passes)
                __builtin_prefetch(next + line * CACHE_LINE, 0, 2);
            const Pair* block = w + k * PANEL;
            LOAD_TILE(4, x + k, x_stride * 4);
            LOAD_TILE(5, block, row);
            MULTIPLY_TILES(0, 4, 5);
            LOAD_TILE(6, block + TILE, row);
            MULTIPLY_TILES(1, 4, 6);
            LOAD_TILE(5, block + 2 * TILE, row);
            MULTIPLY_TILES(2, 4, 5);
            LOAD_TILE(6, block + 3 * TILE, row);
            MULTIPLY_TILES(3, 4, 6);
        }
        STORE_TILE(0, sums, row);
        STORE_TILE(1, sums + TILE, row);
        STORE_TILE(2, sums + 2 * TILE, row);
        STORE_TILE(3, sums + 3 * TILE, row);
    }
}
#else
const bool TILED = false;
struct Tiles {};
static bool may_use_tiles() { return false; }
static void multiply_tiles(const Pair*, int64_t, int64_t, const Pair*, int64_t, float*, const char*,
                           int) {}
#endif
