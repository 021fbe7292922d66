// Applies an optimizer's formula to every element of the table.
//
// A formula is a struct `Op`, derived from Elementwise, with
//     static void prepare(const Group&, float step, float* scalars): eight numbers per group and step, in double;
//     Op(const Launch&, const Row&, int row, const float* scalars);
//     update<P, G, S, V, ALIGNED>(row, i): the elements i to i + V - 1, for the dtypes of p, g and the states.
#pragma once
#include "_table.cuh"

constexpr int NUM_SCALARS = 8;

struct Elementwise {
    static constexpr bool ORDERED = false;  // sums over elements: who takes which must not depend on alignment
    static constexpr bool QUANTIZED = false;  // takes whole chunks: chunk<P, G>(row, chunk, lane, lanes)
    // Called once per chunk by all of its threads.
    __device__ __forceinline__ void finish(const Launch&, const Item&, double*) const {}
};

template <class T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<Bf16> = true;

template <class T, int V, bool ALIGNED>
__device__ __forceinline__ void read(const void* array, long long i, float (&x)[V]) {
    const T* source = static_cast<const T*>(array) + i;
    ASSUME_GLOBAL(source);
    if constexpr (V == 1 || !ALIGNED) {
#pragma unroll
        for (int k = 0; k < V; ++k) x[k] = widen(source[k]);
    } else {
        constexpr int NUM_WORDS = V * sizeof(T) / 4;
        u32 words[NUM_WORDS];
        if constexpr (NUM_WORDS % 4 == 0) {
#pragma unroll
            for (int k = 0; k < NUM_WORDS; k += 4) {
                const uint4* wide = reinterpret_cast<const uint4*>(source) + k / 4;
                CHECK_ALIGNED(wide, 16);
                const uint4 four = *wide;
                words[k] = four.x, words[k + 1] = four.y, words[k + 2] = four.z, words[k + 3] = four.w;
            }
        } else {
            static_assert(NUM_WORDS == 2, "");
            CHECK_ALIGNED(source, 8);
            const uint2 two = *reinterpret_cast<const uint2*>(source);
            words[0] = two.x, words[1] = two.y;
        }
#pragma unroll
        for (int k = 0; k < V; ++k) {
            if constexpr (sizeof(T) == 4)
                x[k] = __uint_as_float(words[k]);
            else
                x[k] = widen(T{static_cast<u16>(words[k / 2] >> (k % 2 * 16))});
        }
    }
}

template <class T, int V, bool ALIGNED>
__device__ __forceinline__ void write(void* array, long long i, const T (&x)[V]) {
    T* target = static_cast<T*>(array) + i;
    ASSUME_GLOBAL(target);
    if constexpr (V == 1 || !ALIGNED) {
#pragma unroll
        for (int k = 0; k < V; ++k) target[k] = x[k];
    } else {
        constexpr int NUM_WORDS = V * sizeof(T) / 4;
        u32 words[NUM_WORDS];
#pragma unroll
        for (int k = 0; k < NUM_WORDS; ++k) {
            if constexpr (sizeof(T) == 4)
                words[k] = __float_as_uint(x[k]);
            else
                words[k] = x[2 * k].bits | static_cast<u32>(x[2 * k + 1].bits) << 16;
        }
        if constexpr (NUM_WORDS % 4 == 0) {
#pragma unroll
            for (int k = 0; k < NUM_WORDS; k += 4) {
                uint4* wide = reinterpret_cast<uint4*>(target) + k / 4;
                CHECK_ALIGNED(wide, 16);
                *wide = make_uint4(words[k], words[k + 1], words[k + 2], words[k + 3]);
            }
        } else {
            CHECK_ALIGNED(target, 8);
            *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
        }
    }
}

template <class T, int V, bool ALIGNED>
__device__ __forceinline__ void write_rounded(void* array, long long i, const float (&x)[V]) {
    T rounded[V];
#pragma unroll
    for (int k = 0; k < V; ++k) rounded[k] = narrow<T>(x[k]);
    write<T, V, ALIGNED>(array, i, rounded);
}

// What stochastic rounding needs to know: the bits of element i depend on the seed, on which parameter it is of, on
// how many steps that has taken, and on i. All of these are the same on every replica, and most survive a checkpoint.
struct Dice {
    u64 seed;
    u32 param;
    u32 step;

    __device__ __forceinline__ Dice(const Launch& launch, const Row& row, int index)
        : seed(launch.control->seed), param(row.dice), step(static_cast<u32>(launch.steps[index])) {}

    // One call of the generator is enough for eight elements from a multiple of 8.
    __device__ __forceinline__ Random eight(u64 block) const {
        return philox(static_cast<u32>(block), static_cast<u32>(block >> 32), param, step, seed);
    }

    // 16 random bits for each of the elements i to i + V - 1.
    template <int V>
    __device__ __forceinline__ void roll(long long i, u32 (&bits)[V]) const {
        static_assert(V == 1 || V == 8, "");
        const u64 block = static_cast<u64>(i) >> 3;
        const int from = static_cast<int>(i & 7);
        const Random random = eight(block);
        u32 words[8] = {random.words[0], random.words[1], random.words[2], random.words[3]};
        if (V > 1 && from != 0) {
            const Random next = eight(block + 1);
            words[4] = next.words[0], words[5] = next.words[1], words[6] = next.words[2], words[7] = next.words[3];
        }
        // Shifts instead of a variable index, which would put the words into memory.
#pragma unroll
        for (int k = 0; k < 6; ++k) words[k] = from & 4 ? words[k + 2] : words[k];
#pragma unroll
        for (int k = 0; k < 5; ++k) words[k] = from & 2 ? words[k + 1] : words[k];
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = from & 1 ? words[k] >> 16 | words[k + 1] << 16 : words[k];
#pragma unroll
        for (int k = 0; k < V; ++k) bits[k] = words[k / 2] >> (k % 2 * 16) & 0xffffu;
    }
};

template <int V, bool ALIGNED>
__device__ __forceinline__ void write_by_chance(void* array, long long i, const float (&x)[V], const Dice& dice) {
    u32 bits[V];
    dice.roll(i, bits);
    Bf16 rounded[V];
#pragma unroll
    for (int k = 0; k < V; ++k) rounded[k] = narrow_by_chance(x[k], bits[k]);
    write<Bf16, V, ALIGNED>(array, i, rounded);
}

template <int V, bool ALIGNED>
__device__ __forceinline__ void write_copy(const Row& row, long long i, const float (&x)[V]) {
    if (row.copy == nullptr) return;
    if (row.flags & COPY_IS_BF16)
        write_rounded<Bf16, V, ALIGNED>(row.copy, i, x);
    else
        write_rounded<F16, V, ALIGNED>(row.copy, i, x);
}

template <class P, int V, bool ALIGNED>
__device__ __forceinline__ void write_parameter(const Row& row, long long i, const float (&p)[V], u32 flags,
                                                const Dice& dice) {
    bool written = false;
    if constexpr (MAY_HAVE<HAS_STOCHASTIC> && IS_BF16<P>) {
        if (flags & STOCHASTIC) {
            write_by_chance<V, ALIGNED>(row.p, i, p, dice);
            written = true;
        }
    }
    if (!written) write_rounded<P, V, ALIGNED>(row.p, i, p);
    if constexpr (MAY_HAVE<HAS_COPY>) write_copy<V, ALIGNED>(row, i, p);
}

// Unscales and clips; unscales in memory too where asked for. What the step goes on with is not rounded.
template <class G, int V, bool ALIGNED>
__device__ __forceinline__ void scale_gradient(const Row& row, long long i, const GradientScale& scale, float (&g)[V]) {
    if (scale.divides) {
#pragma unroll
        for (int k = 0; k < V; ++k) g[k] /= scale.unscale;
        write_rounded<G, V, ALIGNED>(row.g, i, g);
#pragma unroll
        for (int k = 0; k < V; ++k) g[k] *= scale.coef;
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) g[k] = scale(g[k]);
    }
}

// Elements from the chunk's start to the first at which every array of the row is aligned for wide access: 0 to
// V - 1, or -1 where there is none.
template <class P, class G, class S, int V>
__device__ __forceinline__ int aligned_from(const Row& row, long long start) {
    for (int head = 0; head < V; ++head) {
        const u64 i = static_cast<u64>(start + head);
        u64 low = (reinterpret_cast<u64>(row.p) + i * sizeof(P)) | (reinterpret_cast<u64>(row.g) + i * sizeof(G));
        if (row.m != nullptr) low |= reinterpret_cast<u64>(row.m) + i * sizeof(S);
        if (row.v != nullptr) low |= reinterpret_cast<u64>(row.v) + i * sizeof(S);
        if (row.v_max != nullptr) low |= reinterpret_cast<u64>(row.v_max) + i * sizeof(S);
        if (row.copy != nullptr) low |= (reinterpret_cast<u64>(row.copy) + i * sizeof(u16)) * (16 / (V * sizeof(u16)));
        if (low % 16 == 0) return head;
    }
    return -1;
}

template <class P, class G, class S, class Op>
__device__ __forceinline__ void update_chunk(Op& op, const Row& row, const Chunk& chunk, int lane, int lanes) {
    constexpr int V = sizeof(P) == 4 && sizeof(G) == 4 && sizeof(S) == 4 ? 4 : 8;  // 16 bytes of the narrowest
    const long long start = chunk.start;
    const int count = chunk.count;
    int head = aligned_from<P, G, S, V>(row, start);
    int vectors = head < 0 ? 0 : max(count - head, 0) / V;
    if (Op::ORDERED && head != 0) {
        head = 0;
        vectors = count / V;
        for (int k = lane; k < vectors; k += lanes) op.template update<P, G, S, V, false>(row, start + k * V);
    } else {
        head = head < 0 ? count : min(head, count);
        for (int k = lane; k < head; k += lanes) op.template update<P, G, S, 1, false>(row, start + k);
        for (int k = lane; k < vectors; k += lanes) op.template update<P, G, S, V, true>(row, start + head + k * V);
    }
    for (int k = head + vectors * V + lane; k < count; k += lanes) op.template update<P, G, S, 1, false>(row, start + k);
}

template <class P, class G, class S, class Op>
__device__ __forceinline__ void run_chunk(Op& op, const Row& row, const Chunk& chunk, int lane, int lanes) {
    if constexpr (Op::QUANTIZED)
        op.template chunk<P, G>(row, chunk, lane, lanes);
    else
        update_chunk<P, G, S>(op, row, chunk, lane, lanes);
}

// The bodies of all dtype pairs that may occur; a row's pair is the same for all threads of its chunk.
template <class Op>
__device__ __forceinline__ void run_pair(Op& op, const Row& row, const Chunk& chunk, int lane, int lanes) {
    switch (row.pair) {
        case 0:
            if constexpr ((PAIRS >> 0) & 1) run_chunk<float, float, float>(op, row, chunk, lane, lanes);
            break;
        case 1:
            if constexpr ((PAIRS >> 1) & 1) run_chunk<float, Bf16, float>(op, row, chunk, lane, lanes);
            break;
        case 2:
            if constexpr ((PAIRS >> 2) & 1) run_chunk<Bf16, Bf16, Bf16>(op, row, chunk, lane, lanes);
            break;
        case 3:
            if constexpr ((PAIRS >> 3) & 1) run_chunk<F16, F16, F16>(op, row, chunk, lane, lanes);
            break;
        case 4:
            if constexpr ((PAIRS >> 4) & 1) run_chunk<float, F16, float>(op, row, chunk, lane, lanes);
            break;
        case 5:
            if constexpr ((PAIRS >> 5) & 1) run_chunk<Bf16, Bf16, float>(op, row, chunk, lane, lanes);
            break;
        case 6:
            if constexpr ((PAIRS >> 6) & 1) run_chunk<F16, F16, float>(op, row, chunk, lane, lanes);
            break;
        case 7:
            if constexpr ((PAIRS >> 7) & 1) run_chunk<Bf16, float, float>(op, row, chunk, lane, lanes);
            break;
    }
}

// Backwards: what a norm has read last is still in the cache.
template <class Op>
__device__ __forceinline__ void update_all(const Launch& launch, float (*scalars)[NUM_SCALARS], double* shared) {
    int known_group = -1;
    float known_step = -1.0f;
    for (int at = num_items(launch) - 1 - static_cast<int>(blockIdx.x); at >= 0; at -= static_cast<int>(gridDim.x)) {
        const Item item(launch, at);
        __syncthreads();  // the scalars of the item before have been read
        const int ours = item.first + static_cast<int>(threadIdx.x);
        if (ours < item.end) {
            const int index = launch.chunks[ours].row;
            const int group = launch.rows[index].group;
            const float step = launch.steps[index] + 1.0f;
            if (group != known_group || step != known_step) {
                Op::prepare(group_of(launch, group), step, scalars[threadIdx.x]);
                known_group = group;
                known_step = step;
            }
        }
        __syncthreads();
        if (item.chunk() >= item.end) continue;
        const Chunk chunk = launch.chunks[item.chunk()];
        const Row row = row_of(launch, chunk.row);  // a copy: what is stored might alias the table
        Op op(launch, row, chunk.row, scalars[item.large ? 0 : threadIdx.x / LANES]);
        if (row.g != nullptr) run_pair(op, row, chunk, item.lane(), item.lanes());
        op.finish(launch, item, shared);
    }
}
