// Adam, AdamW and amsgrad, all tensors of an optimizer in one launch.
//
// One thread updates 16 bytes' worth of neighbouring elements at a time (4 if all arrays are fp32, else 8).
// Bytes per element, fp32: reads p, g, m, v (16), writes p, m, v (12); all bf16: 14. With amsgrad 8 more (4 in
// bf16), with a low-precision copy 2 more, with ZERO_GRAD one more gradient. From sm_75.
#include "_update.cuh"

struct AdamW {
    static constexpr bool ORDERED = false;

    float decay, weight1, beta2, weight2, step_size, inverse_root, eps, weight_decay;
    u32 flags;
    GradientScale scale;
    Dice dice;

    __device__ static void prepare(const Group& group, float step, float* scalars) {
        const double lr = learning_rate(group);
        const u64 taken = static_cast<u64>(step);
        scalars[0] = static_cast<float>(1.0 - lr * group.weight_decay);
        scalars[1] = static_cast<float>(1.0 - group.beta1);
        scalars[2] = static_cast<float>(group.beta2);
        scalars[3] = static_cast<float>(1.0 - group.beta2);
        scalars[4] = static_cast<float>(lr / (1.0 - power(group.beta1, taken)));
        scalars[5] = static_cast<float>(1.0 / sqrt(1.0 - power(group.beta2, taken)));
        scalars[6] = static_cast<float>(group.eps);
        scalars[7] = static_cast<float>(group.weight_decay);
    }

    __device__ __forceinline__ AdamW(const Launch& launch, const Row& row, int index, const float* scalars)
        : decay(scalars[0]),
          weight1(scalars[1]),
          beta2(scalars[2]),
          weight2(scalars[3]),
          step_size(scalars[4]),
          inverse_root(scalars[5]),
          eps(scalars[6]),
          weight_decay(scalars[7]),
          flags(launch.groups[row.group].flags),
          scale(launch),
          dice{launch.control->seed, launch.control->offset, static_cast<u32>(index)} {}

    template <class P, class G, class S, int V, bool ALIGNED>
    __device__ __forceinline__ void update(const Row& row, long long i) const {
        float p[V], g[V], m[V], v[V];
        read<P, V, ALIGNED>(row.p, i, p);
        read<G, V, ALIGNED>(row.g, i, g);
        read<S, V, ALIGNED>(row.m, i, m);
        read<S, V, ALIGNED>(row.v, i, v);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            g[k] = scale(g[k]);
            if (flags & MAXIMIZE) g[k] = -g[k];
            if (flags & DECOUPLED)
                p[k] *= decay;
            else if (weight_decay != 0.0f)
                g[k] = fmaf(weight_decay, p[k], g[k]);
            m[k] = lerp(m[k], g[k], weight1);
            v[k] = fmaf(weight2 * g[k], g[k], v[k] * beta2);
        }
        write_rounded<S, V, ALIGNED>(row.m, i, m);
        write_rounded<S, V, ALIGNED>(row.v, i, v);
        if constexpr (MAY_HAVE<HAS_AMSGRAD>) {
            if (flags & AMSGRAD) {
                float v_max[V];
                read<S, V, ALIGNED>(row.v_max, i, v_max);
#pragma unroll
                for (int k = 0; k < V; ++k) v[k] = maximum(v_max[k], v[k]);
                write_rounded<S, V, ALIGNED>(row.v_max, i, v);
            }
        }
#pragma unroll
        for (int k = 0; k < V; ++k) p[k] -= step_size * m[k] / (sqrtf(v[k]) * inverse_root + eps);
        write_parameter<P, V, ALIGNED>(row, i, p, flags, dice);
        if constexpr (MAY_HAVE<HAS_ZERO_GRAD>) zero_gradient<G, V, ALIGNED>(row, i, flags);
    }

    __device__ __forceinline__ void finish(const Launch&, const Item&, double*) const {}
};

extern "C" __global__ void __launch_bounds__(THREADS) adamw(const __grid_constant__ Launch launch) {
    __shared__ float scalars[WARPS][NUM_SCALARS];
    __shared__ u32 last;
    if (is_skipped(launch)) return;
    update_all<AdamW>(launch, scalars, nullptr);
    count_step(launch, &last);
}
