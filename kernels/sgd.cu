// SGD with momentum, dampening and nesterov, all tensors of an optimizer in one launch.
//
// One thread updates 16 bytes' worth of neighbouring elements at a time (4 if all arrays are fp32, else 8).
// Bytes per element, fp32: reads p, g, momentum (12), writes p, momentum (8); without momentum 12 in all; all
// bf16: half of that; with UNSCALE one more gradient. From sm_75.
#include "_update.cuh"

struct Sgd : Elementwise {
    float lr, momentum, keep, weight_decay;
    bool first;
    u32 flags;
    GradientScale scale;
    Dice dice;

    __device__ static void prepare(const Group& group, float step, float* scalars) {
        scalars[0] = static_cast<float>(learning_rate(group));
        scalars[1] = static_cast<float>(group.beta1);
        scalars[2] = static_cast<float>(1.0 - group.beta2);
        scalars[3] = static_cast<float>(group.weight_decay);
        scalars[4] = step;
    }

    __device__ __forceinline__ Sgd(const Launch& launch, const Row& row, int index, const float* scalars)
        : lr(scalars[0]),
          momentum(scalars[1]),
          keep(scalars[2]),
          weight_decay(scalars[3]),
          first(scalars[4] == 1.0f),
          flags(flags_of(launch, row.group)),
          scale(launch, flags),
          dice(launch, row, index) {}

    template <class P, class G, class S, int V, bool ALIGNED>
    __device__ __forceinline__ void update(const Row& row, long long i) const {
        float p[V], g[V], m[V];
        const bool has_buffer = row.m != nullptr;
        read<P, V, ALIGNED>(row.p, i, p);
        read<G, V, ALIGNED>(row.g, i, g);
        if (has_buffer && !first) read<S, V, ALIGNED>(row.m, i, m);
        scale_gradient<G, V, ALIGNED>(row, i, scale, g);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            if (flags & MAXIMIZE) g[k] = -g[k];
            if (weight_decay != 0.0f) g[k] = fmaf(weight_decay, p[k], g[k]);
        }
        if (has_buffer) {
#pragma unroll
            for (int k = 0; k < V; ++k) m[k] = first ? g[k] : fmaf(keep, g[k], m[k] * momentum);
            write_rounded<S, V, ALIGNED>(row.m, i, m);
#pragma unroll
            for (int k = 0; k < V; ++k) g[k] = flags & NESTEROV ? fmaf(momentum, m[k], g[k]) : m[k];
        }
#pragma unroll
        for (int k = 0; k < V; ++k) p[k] = fmaf(-lr, g[k], p[k]);
        write_parameter<P, V, ALIGNED>(row, i, p, flags, dice);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, PAIRS == 0xff ? 1 : RESIDENT) sgd(const __grid_constant__ Launch launch) {
    __shared__ float scalars[WARPS][NUM_SCALARS];
    __shared__ u32 last;
    keep_told(launch);
    if (is_skipped(launch)) return;
    update_all<Sgd>(launch, scalars, nullptr);
    count_step(launch, &last);
}
