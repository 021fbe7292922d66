// Lion (Chen et al. 2023): moves by the sign of an interpolated momentum.
//
// One thread updates 16 bytes' worth of neighbouring elements at a time (4 if all arrays are fp32, else 8).
// Bytes per element, fp32: reads p, g, m (12), writes p, m (8); all bf16: 10. From sm_75.
#include "_update.cuh"

struct Lion : Elementwise {
    float decay, weight1, weight2, lr;
    u32 flags;
    GradientScale scale;
    Dice dice;

    __device__ static void prepare(const Group& group, float, float* scalars) {
        const double lr = learning_rate(group);
        scalars[0] = static_cast<float>(1.0 - lr * group.weight_decay);
        scalars[1] = static_cast<float>(1.0 - group.beta1);
        scalars[2] = static_cast<float>(1.0 - group.beta2);
        scalars[3] = static_cast<float>(lr);
    }

    __device__ __forceinline__ Lion(const Launch& launch, const Row& row, int index, const float* scalars)
        : decay(scalars[0]),
          weight1(scalars[1]),
          weight2(scalars[2]),
          lr(scalars[3]),
          flags(flags_of(launch, row.group)),
          scale(launch),
          dice(launch, row, index) {}

    template <class P, class G, class S, int V, bool ALIGNED>
    __device__ __forceinline__ void update(const Row& row, long long i) const {
        float p[V], g[V], m[V];
        read<P, V, ALIGNED>(row.p, i, p);
        read<G, V, ALIGNED>(row.g, i, g);
        read<S, V, ALIGNED>(row.m, i, m);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            g[k] = scale(g[k]);
            if (flags & MAXIMIZE) g[k] = -g[k];
            const float way = lerp(m[k], g[k], weight1);
            const float sign = is_nan(way) ? way : static_cast<float>((way > 0.0f) - (way < 0.0f));
            p[k] = fmaf(-lr, sign, p[k] * decay);
            m[k] = lerp(m[k], g[k], weight2);
        }
        write_rounded<S, V, ALIGNED>(row.m, i, m);
        write_parameter<P, V, ALIGNED>(row, i, p, flags, dice);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MAY_HAVE<HAS_STOCHASTIC> ? 2 : RESIDENT) lion(const __grid_constant__ Launch launch) {
    __shared__ float scalars[WARPS][NUM_SCALARS];
    __shared__ u32 last;
    keep_told(launch);
    if (is_skipped(launch)) return;
    update_all<Lion>(launch, scalars, nullptr);
    count_step(launch, &last);
}
