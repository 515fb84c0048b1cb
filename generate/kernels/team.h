// Threads that share work by pieces, and wait for work to be done, never for each other to come.
//
// The cores are rarely ours alone. At a barrier all threads wait for one that the system has put
// aside for a neighbour: a time slice, many times an iteration. So here every thread runs through
// all phases of the work, takes pieces of a phase while there are any, and goes on when all are
// done, by whichever thread; one that comes late finds them done. What can hold the others up is a
// thread put aside in the middle of a piece: a long wait is slept, which gives its core to that
// one, and where threads wait for cores too much, there is one fewer for a while.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <linux/futex.h>
#include <memory>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

const int64_t SPIN_NS = 50'000;         // most pieces take less
const int64_t WINDOW_NS = 200'000'000;  // over which delays are averaged
const int64_t SHORTEST_NS = 200'000'000, LONGEST_NS = 1'600'000'000;  // pauses of a thread
const int64_t WORTH_HANDING_OUT = 8192;  // elements that are rounded or added

extern "C" int omp_get_thread_num(), omp_get_num_threads();

static inline int64_t now_ns() {
    using std::chrono::nanoseconds;
    return nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What the threads of a team share.
struct Team {
    char* const memory;
    alignas(64) std::atomic<uint64_t> next{0};      // phase << 32 | pieces of it that were taken
    alignas(64) std::atomic<int64_t> done{0};       // pieces of that phase
    alignas(64) std::atomic<uint32_t> finished{0};  // phases
    std::atomic<int> asleep{0};

    // A piece of the phase's n that is not taken; −1: there is none any more.
    int64_t take(uint32_t phase, int64_t n) {
        uint64_t at = next.load(std::memory_order_acquire);
        do {
            if (at >> 32 != phase || int64_t(at & UINT32_MAX) >= n) return -1;
        } while (!next.compare_exchange_weak(at, at + 1, std::memory_order_acq_rel));
        return int64_t(at & UINT32_MAX);
    }

    void complete(uint32_t phase, int64_t n) {
        if (done.fetch_add(1, std::memory_order_acq_rel) < n - 1) return;
        done.store(0, std::memory_order_relaxed);
        next.store(uint64_t(phase + 1) << 32, std::memory_order_release);
        finished.store(phase + 1);
        if (asleep.load()) syscall(SYS_futex, &finished, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
    }

    // Until all pieces of the phase are done.
    void wait(uint32_t phase) {
        const auto waits = [&] { return finished.load(std::memory_order_acquire) == phase; };
        if (!waits()) return;
        for (const int64_t begin = now_ns(); now_ns() - begin < SPIN_NS;)
            for (int i = 0; i < 32; i++) {
                if (!waits()) return;
#ifdef __x86_64__
                __builtin_ia32_pause();
#endif
            }
        asleep++;
        while (finished.load() == phase)
            syscall(SYS_futex, &finished, FUTEX_WAIT_PRIVATE, phase, 0, 0, 0);
        asleep--;
    }
};

// One thread of a team.
struct Member {
    Team* team = nullptr;
    uint32_t phase = 0;  // that it is in
    static const int64_t UNKNOWN = -2;

    // The next phase: work(piece, following) is called once for each piece below n, on some thread.
    // following() takes what this thread does next, and returns it, or −1.
    template <typename Do>
    void share(int64_t n, Do work) {
        if (n <= 0) return;
        for (int64_t following, piece = team->take(phase, n); piece >= 0; piece = following) {
            following = UNKNOWN;
            work(piece, [&] { return following = team->take(phase, n); });
            team->complete(phase, n);
            if (following == UNKNOWN) following = team->take(phase, n);
        }
        team->wait(phase++);
    }

    // The next phase: work(row) for each of n_rows, of so many elements.
    template <typename Do>
    void share_rows(int64_t n_rows, int64_t width, Do work) {
        const int64_t some = std::max<int64_t>(1, WORTH_HANDING_OUT / width);
        share((n_rows + some - 1) / some, [&](int64_t piece, auto) {
            const int64_t end = std::min(n_rows, (piece + 1) * some);
            for (int64_t row = piece * some; row < end; row++) work(row);
        });
    }
};
inline thread_local Member member;

// How long a thread has waited for a core, as Linux counts it; always 0 where it does not.
struct Delay {
    const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    int64_t before_ns = 0;
    ~Delay() { close(file); }
    int64_t since_last_ns() {
        char text[64] = {};  // of which the second number is it
        char* end = text;
        if (pread(file, text, sizeof(text) - 1, 0) > 0) std::strtoll(text, &end, 10);
        const int64_t now = std::strtoll(end, nullptr, 10), before = before_ns;
        before_ns = now;
        return now - before;
    }
};
inline thread_local Delay delay;

// How many threads are worth having: one fewer for a while, where more than half a thread waits for
// a core on average. Beside a neighbour that computes all the time, one thread by itself does more
// than two that take turns. Every pause that was in vain is twice as long as the one before.
struct Crew {
    int away = 0;
    double waiting = 0;  // threads, lately
    int64_t before_ns = 0, changed_ns = 0, pause_ns = SHORTEST_NS;
    bool changed = true;

    int of(int n_threads) const { return std::max(1, n_threads - away); }

    // delayed_ns: how long the threads together have waited since this was called last.
    void learn(int n_threads, int64_t delayed_ns, int64_t now) {
        const int64_t passed = std::max<int64_t>(1, now - before_ns);
        before_ns = now;
        // a thread that was not of the team may have waited for a core with other work
        if (std::exchange(changed, false)) return;
        waiting += std::min(1.0, double(passed) / WINDOW_NS) *
                   (double(delayed_ns) / passed - waiting);
        const bool fewer = waiting > 0.5 && away < n_threads - 1;
        const bool soon = now - changed_ns < pause_ns;
        if (!fewer && (away == 0 || soon)) return;
        if (fewer) pause_ns = soon ? std::min(2 * pause_ns, LONGEST_NS) : SHORTEST_NS;
        away += fewer ? 1 : -1;
        waiting = 0;
        changed_ns = now;
        changed = true;
    }
};
inline thread_local Crew crew;  // the teams that this thread calls together

// Memory is of whole pages: loading a tile's row (amx.h) from two cache lines takes longer.
struct alignas(4096) Page {
    char bytes[4096];
};
static inline std::unique_ptr<Page[]> allocate(int64_t bytes) {
    return std::unique_ptr<Page[]>(new Page[bytes / sizeof(Page) + 1]);
}

// Bytes that a linear layer needs at most: all tokens as floats.
static inline int64_t linear_bytes(int64_t n_tokens, int64_t n_in) {
    return (n_tokens + 16) * n_in * int64_t(sizeof(float));
}

// Call work(member) on each of n_threads, or fewer, that share so many bytes of memory. On a team's
// thread call it there alone: the team's others call it, too.
template <typename Do>
static void as_team(int n_threads, int64_t bytes, Do work) {
    if (member.team) return work(member);
    const auto memory = allocate(bytes);
    Team team{memory.get()->bytes};
    #pragma omp parallel num_threads(crew.of(n_threads))
    {
        member = {&team, 0};
        work(member);
        // OpenMP's own barrier, which follows, waits by spinning: the caller comes there last
        team.complete(member.phase, omp_get_num_threads());
        if (omp_get_thread_num() == 0) team.wait(member.phase);
        member = {};
    }
}
