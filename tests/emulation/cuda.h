// CUDA C++ on a CPU, as far as kernels/ uses it: put before an unmodified .cu file (g++ -include cuda.h).
//
// Every CUDA thread is a fiber with a stack of its own. A fiber runs until it waits (at a barrier, in a shuffle)
// or touches what other blocks can see (an atomic, a fence; by chance also at a wide access); then a scheduler
// picks the next one at random, by a seed, among all blocks that are resident, and lets some warps fall behind. A
// missing barrier, a race between blocks or a misaligned wide access hence shows up as different results or as an
// error, and not on some days only.
// There is no memory model: what one fiber wrote, all others see.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define TELLS_SANITIZER 1
#else
#define TELLS_SANITIZER 0
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// All in one section, which is swapped when another block gets its turn: so every block has its own.
#define __shared__ static __attribute__((section("emulated_shared")))

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

static inline double __longlong_as_double(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}

extern char __start_emulated_shared[] __attribute__((weak));
extern char __stop_emulated_shared[] __attribute__((weak));

namespace emulation {

constexpr int WARP = 32;
constexpr int BLOCK = 256;
constexpr int RESIDENT = 3;  // blocks alive at a time; a further one starts where one has ended
constexpr size_t STACK = 256 * 1024;

struct Block;

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    void* stack = nullptr;
    void* fake_stack = nullptr;  // the sanitizer's own
    bool started = false;
    bool done = true;
    Block* block = nullptr;
    unsigned thread = 0;
    unsigned num_shuffles = 0;
};

struct Warp {
    unsigned waiting = 0;
    uint64_t values[2][WARP];
};

struct Block {
    unsigned index = 0;
    unsigned alive = 0;
    unsigned waiting = 0;
    int barrier = 0;  // the line of the barrier at which its threads wait
    std::vector<char> shared;
    Warp warps[BLOCK / WARP];
    Fiber fibers[BLOCK];
};

using Body = void (*)(void**);

static Block* blocks[RESIDENT];
static Block* loaded = nullptr;
static Fiber* current = nullptr;
static std::vector<Fiber*> runnable;
static ucontext_t scheduler_context;
static jmp_buf scheduler_place;
static void* scheduler_fake_stack = nullptr;
static const void* scheduler_stack = nullptr;
static size_t scheduler_stack_size = 0;
static Body body = nullptr;
static void** arguments = nullptr;
static uint64_t random_state = 1;
static std::string error;
static unsigned picks_left = 0;  // until another warp is the slow one
static const Fiber* slow = nullptr;

static inline uint64_t random_number() {  // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545F4914F6CDD1DULL;
}

// From a fiber back to the scheduler.
static __attribute__((noinline)) void leave() {
#if TELLS_SANITIZER
    Fiber* self = current;
    __sanitizer_start_switch_fiber(&self->fake_stack, scheduler_stack, scheduler_stack_size);
    swapcontext(&self->context, &scheduler_context);
    __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
#else
    if (_setjmp(current->place) == 0) _longjmp(scheduler_place, 1);
#endif
}

static void wake_block(Block& block) {
    if (block.waiting == 0 || block.waiting != block.alive) return;
    block.waiting = 0;
    block.barrier = 0;
    for (Fiber& fiber : block.fibers)
        if (!fiber.done) runnable.push_back(&fiber);
}

static void run() {
#if TELLS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
    for (;;) {
        body(arguments);
        current->done = true;
        current->block->alive -= 1;
        wake_block(*current->block);  // who has ended is not waited for
        leave();
    }
}

static void enter(Fiber& fiber) {
    const size_t size = __stop_emulated_shared - __start_emulated_shared;
    if (size != 0 && loaded != fiber.block) {
        if (loaded) memcpy(loaded->shared.data(), __start_emulated_shared, size);
        memcpy(__start_emulated_shared, fiber.block->shared.data(), size);
        loaded = fiber.block;
    }
    current = &fiber;
    threadIdx.x = fiber.thread;
    blockIdx.x = fiber.block->index;
    const bool first = !fiber.started;
    if (first) {
        fiber.started = true;
        if (!fiber.stack)
            fiber.stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run, 0);
    }
#if TELLS_SANITIZER
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, STACK);
    swapcontext(&scheduler_context, &fiber.context);
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#else
    if (_setjmp(scheduler_place) == 0) {
        if (first)
            setcontext(&fiber.context);
        else
            _longjmp(fiber.place, 1);
    }
#endif
}

[[noreturn]] static void fail(const std::string& message) {
    if (error.empty()) error = message;
    leave();
    abort();  // the scheduler does not come back to a fiber after an error
}

static void start(Block& block, unsigned index) {
    block.index = index;
    block.alive = blockDim.x;
    block.waiting = 0;
    block.barrier = 0;
    block.shared.assign(__stop_emulated_shared - __start_emulated_shared, static_cast<char>(0xA5));
    if (loaded == &block) loaded = nullptr;
    for (Warp& warp : block.warps) warp.waiting = 0;
    for (unsigned thread = 0; thread < blockDim.x; ++thread) {
        Fiber& fiber = block.fibers[thread];
        fiber.block = &block;
        fiber.thread = thread;
        fiber.done = false;
        fiber.num_shuffles = 0;
        runnable.push_back(&fiber);
    }
}

static std::string where_all_wait() {
    std::string text = "no thread can go on:";
    for (Block* block : blocks) {
        if (!block || block->alive == 0) continue;
        unsigned shuffling = 0;
        for (const Warp& warp : block->warps) shuffling += warp.waiting;
        text += " block " + std::to_string(block->index) + ": " + std::to_string(block->waiting) + " at __syncthreads, " +
                std::to_string(shuffling) + " in a shuffle, of " + std::to_string(block->alive) + ";";
    }
    return text;
}

// One at random; but for some thousand picks at a time one warp is passed over wherever others can run, so that
// the others get as far ahead of it as the barriers let them.
static size_t next() {
    if (picks_left-- == 0) {
        picks_left = 1000 + static_cast<unsigned>(random_number() % 8000);
        slow = runnable[random_number() % runnable.size()];
    }
    size_t pick = 0;
    for (int tries = 0; tries < 8; ++tries) {
        pick = random_number() % runnable.size();
        const Fiber& fiber = *runnable[pick];
        if (fiber.block != slow->block || fiber.thread / WARP != slow->thread / WARP) break;
    }
    return pick;
}

static void launch(Body to_run, unsigned grid, unsigned block, void** to_pass, uint64_t seed) {
    body = to_run;
    arguments = to_pass;
    gridDim.x = grid;
    blockDim.x = block;
    random_state = seed * 0x9E3779B97F4A7C15ULL + 0x1234567ULL;
    error.clear();
    runnable.clear();
    loaded = nullptr;
    picks_left = 0;
    std::vector<unsigned> order(grid);
    for (unsigned i = 0; i < grid; ++i) {
        const unsigned j = static_cast<unsigned>(random_number() % (i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    for (Block*& slot : blocks) {
        if (!slot) slot = new Block;
        if (!order.empty()) {
            start(*slot, order.back());
            order.pop_back();
        }
    }
    while (!runnable.empty() && error.empty()) {
        const size_t pick = next();
        Fiber* fiber = runnable[pick];
        runnable[pick] = runnable.back();
        runnable.pop_back();
        enter(*fiber);
        if (fiber->block->alive == 0 && !order.empty()) {
            start(*fiber->block, order.back());
            order.pop_back();
        }
    }
    bool all_done = true;
    for (Block* each : blocks) all_done = all_done && each->alive == 0;
    if (error.empty() && !all_done) error = where_all_wait();
    if (error.empty()) return;
    for (Block* each : blocks) {  // fibers are stuck in the middle: they start anew next time
        each->alive = 0;
        for (Fiber& fiber : each->fibers) fiber.started = false, fiber.done = true;
    }
}

static void maybe_yield(unsigned one_in) {
    if (random_number() % one_in) return;
    runnable.push_back(current);
    leave();
}

static void barrier(int line) {
    Block& block = *current->block;
    if (block.barrier != 0 && block.barrier != line)
        fail("threads of one block wait at different barriers: lines " + std::to_string(block.barrier) + " and " +
             std::to_string(line));
    block.barrier = line;
    block.waiting += 1;
    if (block.waiting == block.alive)
        wake_block(block);
    leave();
}

static uint64_t exchange(unsigned mask, uint64_t value, int distance) {
    if (mask != 0xffffffffu) fail("a shuffle with some lanes only: the emulation knows whole warps");
    Fiber& self = *current;
    Warp& warp = self.block->warps[self.thread / WARP];
    const unsigned lane = self.thread % WARP;
    uint64_t* values = warp.values[self.num_shuffles++ % 2];
    values[lane] = value;
    warp.waiting += 1;
    if (warp.waiting == WARP) {
        warp.waiting = 0;
        const unsigned first = self.thread - lane;
        for (unsigned i = 0; i < WARP; ++i) runnable.push_back(&self.block->fibers[first + i]);
    }
    leave();
    return values[lane ^ static_cast<unsigned>(distance)];
}

static void check_aligned(const void* pointer, unsigned num_bytes) {
    if (reinterpret_cast<uintptr_t>(pointer) % num_bytes)
        fail("an access of " + std::to_string(num_bytes) + " bytes is misaligned");
    maybe_yield(64);
}

// Calls a kernel with arguments of the types it declares, copied from where the pointers point, as cuLaunchKernel.
template <class... A, size_t... I>
static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(args[I])...);
}
template <class... A>
static void call(void (*kernel)(A...), void** args) {
    call(kernel, args, std::index_sequence_for<A...>{});
}

}  // namespace emulation

#define CHECK_ALIGNED(pointer, num_bytes) emulation::check_aligned(pointer, num_bytes)
#define __syncthreads() emulation::barrier(__LINE__)
static inline void __threadfence() { emulation::maybe_yield(2); }

static inline unsigned atomicAdd(unsigned* address, unsigned value) {
    emulation::maybe_yield(2);
    const unsigned before = *address;
    *address = before + value;
    return before;
}
static inline unsigned atomicOr(unsigned* address, unsigned value) {
    emulation::maybe_yield(2);
    const unsigned before = *address;
    *address = before | value;
    return before;
}

template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulation::exchange(mask, bits, distance);
    memcpy(&value, &bits, sizeof value);
    return value;
}
