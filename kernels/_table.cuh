// The table of tensors on the device and the walk over it.
//
// A row is one parameter, a chunk a part of it. Large chunks have a block of 256 threads each, small ones, which
// are whole parameters, a warp each. The grid is persistent and of any size: which thread handles which element
// follows from the chunk alone, and so do all results.
#pragma once
#include "_math.cuh"

// Dtype pairs and features that may occur, as bit masks; the loader narrows them to what the table holds.
#ifndef PAIRS
#define PAIRS 0xff
#endif
#ifndef FEATURES
#define FEATURES 0xff
#endif

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
// Blocks per multiprocessor for which registers are kept free: 80 registers a thread for one dtype pair, 128 where
// several share a kernel.
constexpr int RESIDENT = (PAIRS & (PAIRS - 1)) == 0 ? 3 : 2;

struct Row {
    void* p;
    void* g;  // null: no gradient in this step
    void* m;
    void* v;
    void* v_max;
    void* copy;
    void* v_scales;
    long long count;
    int group;
    int pair;
    int flags;
    int first_chunk;
    int num_chunks;
    u32 dice;  // which of the optimizer's parameters it is, for random numbers
    int unused[2];
};
static_assert(sizeof(Row) == 96, "the layout that the host writes");

struct Chunk {
    long long start;
    int row;
    int count;
};
static_assert(sizeof(Chunk) == 16, "the layout that the host writes");

struct Group {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    const void* lr_tensor;
    u32 flags;
    u32 unused[3];
};
static_assert(sizeof(Group) == 64, "the layout that the host writes");

struct Control {
    u32 norm_arrivals;
    u32 step_arrivals;
    u32 nonfinite;
    u32 unused;
    u64 seed;
    u64 reserved[5];
};
static_assert(sizeof(Control) == 64, "the layout that the host writes");

// Words that the launch itself carries: addresses of gradients, then words of the groups. 4 KB of arguments in all
// by default, which every driver takes.
#ifndef TOLD
#define TOLD 498
#endif

struct Launch {
    Row* rows;
    const Chunk* chunks;
    Group* groups;
    float* steps;
    Control* control;
    double* workspace;
    const float* grad_scale;
    const float* found_inf;
    const float* clip_coef;
    float* outcome;
    int num_rows;
    int num_large;
    int num_small;
    int first_told;  // the row of the first address told
    float max_norm;
    float clip_epsilon;
    int num_told;         // addresses
    int num_group_words;  // of all groups, or 0
    u64 told[TOLD];
};
static_assert(sizeof(Launch) == 112 + 8 * TOLD, "the layout that the host writes");

enum RowFlag : int { COPY_IS_BF16 = 1, COPY_IS_F16 = 2 };

enum GroupFlag : u32 {
    MAXIMIZE = 1,
    DECOUPLED = 2,
    AMSGRAD = 4,
    NESTEROV = 8,
    NO_BIAS_CORRECTION = 16,
    STOCHASTIC = 32,
    ALWAYS_ADAPT = 64,
    UNSCALE = 128,  // gradients in memory too, not only where they are used
    NO_GRAD_AVERAGING = 256,
    LR_IS_F64 = 512,
};

enum Feature : int { HAS_AMSGRAD = 1, HAS_COPY = 2, HAS_STOCHASTIC = 4, HAS_UNSCALE = 8 };

template <int FEATURE>
constexpr bool MAY_HAVE = (FEATURES & FEATURE) != 0;

// The gradient of a row: as this launch tells it, else as the table has it.
__device__ __forceinline__ void* gradient_of(const Launch& launch, int row) {
    const int at = row - launch.first_told;
    if (at >= 0 && at < launch.num_told) return reinterpret_cast<void*>(launch.told[at]);
    return launch.rows[row].g;
}

__device__ __forceinline__ Row row_of(const Launch& launch, int index) {
    Row row = launch.rows[index];
    row.g = gradient_of(launch, index);
    return row;
}

__device__ __forceinline__ Group group_of(const Launch& launch, int index) {
    if (launch.num_group_words == 0) return launch.groups[index];
    const u64* words = launch.told + launch.num_told + index * (sizeof(Group) / sizeof(u64));
    Group group;
    group.lr = __longlong_as_double(words[0]);
    group.beta1 = __longlong_as_double(words[1]);
    group.beta2 = __longlong_as_double(words[2]);
    group.eps = __longlong_as_double(words[3]);
    group.weight_decay = __longlong_as_double(words[4]);
    group.lr_tensor = reinterpret_cast<const void*>(words[5]);
    group.flags = static_cast<u32>(words[6]);
    return group;
}

__device__ __forceinline__ u32 flags_of(const Launch& launch, int index) {
    if (launch.num_group_words == 0) return launch.groups[index].flags;
    return static_cast<u32>(launch.told[launch.num_told + index * (sizeof(Group) / sizeof(u64)) + 6]);
}

// Writes what the launch tells into the table, for the launches that follow: whoever is in this one takes it from the
// arguments, since other blocks may not have written yet. Every kernel calls it before all else.
__device__ __forceinline__ void keep_told(const Launch& launch) {
    const int first = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
    for (int k = first; k < launch.num_told; k += threads)
        launch.rows[launch.first_told + k].g = reinterpret_cast<void*>(launch.told[k]);
    for (int k = first; k < launch.num_group_words; k += threads)
        reinterpret_cast<u64*>(launch.groups)[k] = launch.told[launch.num_told + k];
}

__device__ __forceinline__ double learning_rate(const Group& group) {
    if (group.lr_tensor == nullptr) return group.lr;
    if (group.flags & LR_IS_F64) return *static_cast<const double*>(group.lr_tensor);
    return *static_cast<const float*>(group.lr_tensor);
}

// What every gradient is multiplied by before it is used, in torch's order: unscale, then clip. Those that are
// unscaled in memory too are divided, as torch's fused steps do it: only with flags, and by scale_gradient alone.
struct GradientScale {
    bool divides;
    float unscale;
    float coef;

    __device__ __forceinline__ explicit GradientScale(const Launch& launch, u32 flags = 0)
        : divides(MAY_HAVE<HAS_UNSCALE> && (flags & UNSCALE) != 0 && launch.grad_scale != nullptr),
          unscale(launch.grad_scale ? *launch.grad_scale : 1.0f),
          coef(launch.clip_coef ? *launch.clip_coef : 1.0f) {
        if (!divides) unscale = static_cast<float>(1.0 / static_cast<double>(unscale));
    }

    __device__ __forceinline__ float operator()(float g) const { return g * unscale * coef; }
};

__device__ __forceinline__ bool is_skipped(const Launch& launch) {
    return launch.found_inf != nullptr && *launch.found_inf != 0.0f;
}

__device__ __forceinline__ int num_items(const Launch& launch) {
    return launch.num_large + (launch.num_small + WARPS - 1) / WARPS;
}

// The chunks of one item: one large chunk for the block, or up to eight small ones, one for each warp.
struct Item {
    bool large;
    int first;
    int end;

    __device__ __forceinline__ Item(const Launch& launch, int item)
        : large(item < launch.num_large),
          first(large ? item : launch.num_large + (item - launch.num_large) * WARPS),
          end(large ? item + 1 : min(first + WARPS, launch.num_large + launch.num_small)) {}

    __device__ __forceinline__ int chunk() const { return large ? first : first + static_cast<int>(threadIdx.x) / LANES; }
    __device__ __forceinline__ int lane() const { return large ? threadIdx.x : threadIdx.x % LANES; }
    __device__ __forceinline__ int lanes() const { return large ? THREADS : LANES; }
};

// Whether this block is the last of the grid to come here; all that the others wrote before is then visible.
__device__ __forceinline__ bool is_last_block(u32* arrivals, u32* shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *shared = atomicAdd(arrivals, 1u) == gridDim.x - 1;
    __syncthreads();
    if (*shared == 0) return false;
    __threadfence();
    if (threadIdx.x == 0) *arrivals = 0;
    return true;
}

// Counts the step in every row that took part. Every block calls it, after its last read of `steps`.
__device__ __forceinline__ void count_step(const Launch& launch, u32* shared) {
    if (!is_last_block(&launch.control->step_arrivals, shared)) return;
    for (int row = threadIdx.x; row < launch.num_rows; row += THREADS)
        if (gradient_of(launch, row) != nullptr) launch.steps[row] += 1.0f;
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// The sum over the chunk's threads, in an order that depends on nothing but their number. Valid in the first of
// them. All of them call it.
__device__ __forceinline__ double chunk_sum(double x, bool large, double* shared) {
    x = warp_sum(x);
    if (!large) return x;
    __syncthreads();  // what the call before left has been read
    if (threadIdx.x % LANES == 0) shared[threadIdx.x / LANES] = x;
    __syncthreads();
    double sum = 0.0;
    if (threadIdx.x == 0)
        for (int warp = 0; warp < WARPS; ++warp) sum += shared[warp];
    return sum;
}
