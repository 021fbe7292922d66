// Adam's formula for one element, shared by the kernels that keep its moments in different ways.
#pragma once
#include "_update.cuh"

struct Adam {
    float decay, weight1, beta2, weight2, step_size, inverse_root, eps, weight_decay;
    u32 flags;
    GradientScale scale;

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

    __device__ __forceinline__ Adam(const Launch& launch, const Row& row, const float* scalars, const GradientScale& scale)
        : decay(scalars[0]),
          weight1(scalars[1]),
          beta2(scalars[2]),
          weight2(scalars[3]),
          step_size(scalars[4]),
          inverse_root(scalars[5]),
          eps(scalars[6]),
          weight_decay(scalars[7]),
          flags(flags_of(launch, row.group)),
          scale(scale) {}

    // Decays p and brings the moments up to date, with a gradient that is scaled already.
    __device__ __forceinline__ void advance(float& p, float g, float& m, float& v) const {
        if (flags & MAXIMIZE) g = -g;
        if (flags & DECOUPLED)
            p *= decay;
        else if (weight_decay != 0.0f)
            g = fmaf(weight_decay, p, g);
        m = lerp(m, g, weight1);
        v = fmaf(weight2 * g, g, v * beta2);
    }

    __device__ __forceinline__ float moved(float p, float m, float root) const {
        return p - step_size * m / (root * inverse_root + eps);
    }
};
