// LAMB (You et al. 2020), as apex computes it: Adam's update plus weight_decay * p, scaled for each parameter by
// |p| / |update|. Two launches; the gradients' norm (norm.cu) comes before them where gradients are clipped.
//
// One thread updates 16 bytes' worth of neighbouring elements at a time (4 if all arrays are fp32, else 8).
// Bytes per element, fp32: lamb_moments reads p, g, m, v (16), writes m, v (8); lamb_update computes the update
// again instead of keeping it: reads p, m, v (12), writes p (4). From sm_75.
//
// Workspace: two doubles per chunk, |p|^2 and |update|^2, then one double per row, the ratio.
#include "_update.cuh"

struct LambScalars {
    float weight1, beta2, weight2, inverse_correction1, inverse_root, eps, weight_decay, lr;

    __device__ static void prepare(const Group& group, float step, float* scalars) {
        const u64 taken = static_cast<u64>(step);
        const bool corrects = !(group.flags & NO_BIAS_CORRECTION);
        scalars[0] = static_cast<float>(1.0 - group.beta1);
        scalars[1] = static_cast<float>(group.beta2);
        scalars[2] = static_cast<float>(1.0 - group.beta2);
        scalars[3] = corrects ? static_cast<float>(1.0 / (1.0 - power(group.beta1, taken))) : 1.0f;
        scalars[4] = corrects ? static_cast<float>(1.0 / sqrt(1.0 - power(group.beta2, taken))) : 1.0f;
        scalars[5] = static_cast<float>(group.eps);
        scalars[6] = static_cast<float>(group.weight_decay);
        scalars[7] = static_cast<float>(learning_rate(group));
    }

    __device__ __forceinline__ explicit LambScalars(const float* scalars)
        : weight1(scalars[0]),
          beta2(scalars[1]),
          weight2(scalars[2]),
          inverse_correction1(scalars[3]),
          inverse_root(scalars[4]),
          eps(scalars[5]),
          weight_decay(scalars[6]),
          lr(scalars[7]) {}

    __device__ __forceinline__ float way(float p, float m, float v) const {
        return fmaf(weight_decay, p, m * inverse_correction1 / (sqrtf(v) * inverse_root + eps));
    }
};

struct LambMoments : Elementwise {
    static constexpr bool ORDERED = true;

    LambScalars with;
    u32 flags;
    GradientScale scale;
    float squared_p = 0.0f, squared_way = 0.0f;

    __device__ static void prepare(const Group& group, float step, float* scalars) {
        LambScalars::prepare(group, step, scalars);
    }

    __device__ __forceinline__ LambMoments(const Launch& launch, const Row& row, int, const float* scalars)
        : with(scalars), flags(flags_of(launch, row.group)), scale(launch) {}

    template <class P, class G, class S, int V, bool ALIGNED>
    __device__ __forceinline__ void update(const Row& row, long long i) {
        float p[V], g[V], m[V], v[V];
        read<P, V, ALIGNED>(row.p, i, p);
        read<G, V, ALIGNED>(row.g, i, g);
        read<S, V, ALIGNED>(row.m, i, m);
        read<S, V, ALIGNED>(row.v, i, v);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            g[k] = scale(g[k]);
            if (flags & MAXIMIZE) g[k] = -g[k];
            m[k] = flags & NO_GRAD_AVERAGING ? m[k] * (1.0f - with.weight1) + g[k] : lerp(m[k], g[k], with.weight1);
            v[k] = fmaf(with.weight2 * g[k], g[k], v[k] * with.beta2);
            // lamb_update will see the states as they are stored
            const float way = with.way(p[k], widen(narrow<S>(m[k])), widen(narrow<S>(v[k])));
            squared_p = fmaf(p[k], p[k], squared_p);
            squared_way = fmaf(way, way, squared_way);
        }
        write_rounded<S, V, ALIGNED>(row.m, i, m);
        write_rounded<S, V, ALIGNED>(row.v, i, v);
    }

    __device__ __forceinline__ void finish(const Launch& launch, const Item& item, double* shared) const {
        const double sum_p = chunk_sum(squared_p, item.large, shared);
        const double sum_way = chunk_sum(squared_way, item.large, shared);
        if (item.lane() == 0) {
            launch.workspace[2 * item.chunk()] = sum_p;
            launch.workspace[2 * item.chunk() + 1] = sum_way;
        }
    }
};

struct LambUpdate : Elementwise {
    LambScalars with;
    float step_size;
    u32 flags;
    Dice dice;

    __device__ static void prepare(const Group& group, float step, float* scalars) {
        LambScalars::prepare(group, step, scalars);
    }

    __device__ __forceinline__ LambUpdate(const Launch& launch, const Row& row, int index, const float* scalars)
        : with(scalars),
          step_size(with.lr * static_cast<float>(launch.workspace[2 * (launch.num_large + launch.num_small) + index])),
          flags(flags_of(launch, row.group)),
          dice(launch, row, index) {}

    template <class P, class G, class S, int V, bool ALIGNED>
    __device__ __forceinline__ void update(const Row& row, long long i) const {
        float p[V], m[V], v[V];
        read<P, V, ALIGNED>(row.p, i, p);
        read<S, V, ALIGNED>(row.m, i, m);
        read<S, V, ALIGNED>(row.v, i, v);
#pragma unroll
        for (int k = 0; k < V; ++k) p[k] = fmaf(-step_size, with.way(p[k], m[k], v[k]), p[k]);
        write_parameter<P, V, ALIGNED>(row, i, p, flags, dice);
    }
};

__device__ __forceinline__ float trust_ratio(const Group& group, double squared_p, double squared_way) {
    if (group.weight_decay == 0.0 && !(group.flags & ALWAYS_ADAPT)) return 1.0f;
    if (!(squared_p > 0.0) || !(squared_way > 0.0)) return 1.0f;
    return static_cast<float>(sqrt(squared_p) / sqrt(squared_way));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) lamb_moments(const __grid_constant__ Launch launch) {
    __shared__ float scalars[WARPS][NUM_SCALARS];
    __shared__ double sums[WARPS];
    __shared__ u32 last;
    keep_told(launch);
    if (is_skipped(launch)) return;
    update_all<LambMoments>(launch, scalars, sums);
    if (!is_last_block(&launch.control->norm_arrivals, &last)) return;
    // One warp per row sums its chunks in their order.
    const int lane = threadIdx.x % LANES;
    double* ratios = launch.workspace + 2 * (launch.num_large + launch.num_small);
    for (int index = threadIdx.x / LANES; index < launch.num_rows; index += WARPS) {
        const Row& row = launch.rows[index];
        double squared_p = 0.0, squared_way = 0.0;
        for (int k = lane; k < row.num_chunks; k += LANES) {
            squared_p += launch.workspace[2 * (row.first_chunk + k)];
            squared_way += launch.workspace[2 * (row.first_chunk + k) + 1];
        }
        squared_p = warp_sum(squared_p);
        squared_way = warp_sum(squared_way);
        if (lane == 0) ratios[index] = trust_ratio(group_of(launch, row.group), squared_p, squared_way);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) lamb_update(const __grid_constant__ Launch launch) {
    __shared__ float scalars[WARPS][NUM_SCALARS];
    __shared__ u32 last;
    keep_told(launch);
    if (is_skipped(launch)) return;
    update_all<LambUpdate>(launch, scalars, nullptr);
    count_step(launch, &last);
}
