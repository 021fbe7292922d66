// What `_math.cuh` makes of numbers, one element per thread.
#include "_math.cuh"

extern "C" __global__ void __launch_bounds__(256) widen_f16(const u16* from, float* to) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    to[i] = widen(F16{from[i]});
}

extern "C" __global__ void __launch_bounds__(256) narrow_f16(const float* from, u16* to) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    to[i] = narrow<F16>(from[i]).bits;
}

extern "C" __global__ void __launch_bounds__(256) narrow_bf16(const float* from, u16* to) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    to[i] = narrow<Bf16>(from[i]).bits;
}

extern "C" __global__ void __launch_bounds__(256) four_words(const u32* counter, u64 key, u32* to) {
    if (threadIdx.x != 0) return;
    const Random random = philox(counter[0], counter[1], counter[2], counter[3], key);
    for (int k = 0; k < 4; ++k) to[k] = random.words[k];
}

extern "C" __global__ void __launch_bounds__(256) powers(double base, const u64* exponents, double* to) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    to[i] = power(base, exponents[i]);
}
