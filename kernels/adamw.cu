// Adam, AdamW and amsgrad, all tensors of an optimizer in one launch.
//
// One thread updates 16 bytes' worth of neighbouring elements at a time (4 if all arrays are fp32, else 8).
// Bytes per element, fp32: reads p, g, m, v (16), writes p, m, v (12); all bf16: 14. With amsgrad 8 more (4 in
// bf16), with a low-precision copy 2 more, with UNSCALE one more gradient. From sm_75.
#include "_adam.cuh"

struct AdamW : Elementwise {
    Adam adam;
    Dice dice;

    __device__ static void prepare(const Group& group, float step, float* scalars) { Adam::prepare(group, step, scalars); }

    __device__ __forceinline__ AdamW(const Launch& launch, const Row& row, int index, const float* scalars)
        : adam(launch, row, scalars, GradientScale(launch, flags_of(launch, row.group))), dice(launch, row, index) {}

    template <class P, class G, class S, int V, bool ALIGNED>
    __device__ __forceinline__ void update(const Row& row, long long i) const {
        float p[V], g[V], m[V], v[V];
        read<P, V, ALIGNED>(row.p, i, p);
        read<G, V, ALIGNED>(row.g, i, g);
        read<S, V, ALIGNED>(row.m, i, m);
        read<S, V, ALIGNED>(row.v, i, v);
        scale_gradient<G, V, ALIGNED>(row, i, adam.scale, g);
#pragma unroll
        for (int k = 0; k < V; ++k) adam.advance(p[k], g[k], m[k], v[k]);
        write_rounded<S, V, ALIGNED>(row.m, i, m);
        write_rounded<S, V, ALIGNED>(row.v, i, v);
        if constexpr (MAY_HAVE<HAS_AMSGRAD>) {
            if (adam.flags & AMSGRAD) {
                float v_max[V];
                read<S, V, ALIGNED>(row.v_max, i, v_max);
#pragma unroll
                for (int k = 0; k < V; ++k) v[k] = maximum(v_max[k], v[k]);
                write_rounded<S, V, ALIGNED>(row.v_max, i, v);
            }
        }
#pragma unroll
        for (int k = 0; k < V; ++k) p[k] = adam.moved(p[k], m[k], sqrtf(v[k]));
        write_parameter<P, V, ALIGNED>(row, i, p, adam.flags, dice);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, PAIRS == 0xff ? 1 : RESIDENT) adamw(const __grid_constant__ Launch launch) {
    __shared__ float scalars[WARPS][NUM_SCALARS];
    __shared__ u32 last;
    keep_told(launch);
    if (is_skipped(launch)) return;
    update_all<AdamW>(launch, scalars, nullptr);
    count_step(launch, &last);
}
