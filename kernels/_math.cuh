// Number formats, rounding, powers and random bits. Every product that is added to something is an explicit
// fmaf, and the files are compiled with --fmad=false, so that a GPU and the CPU emulation of the tests give
// the same bits.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The emulation checks here that a wide access is aligned; on a GPU a wrong one is an error by itself.
#ifndef CHECK_ALIGNED
#define CHECK_ALIGNED(pointer, num_bytes)
#endif

// Tells the compiler that a pointer that came out of the table points into global memory: plain loads and stores
// instead of ones that look where they point to first.
#ifdef __CUDA_ARCH__
#define ASSUME_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))
#else
#define ASSUME_GLOBAL(pointer)
#endif

struct Bf16 {
    u16 bits;
};
struct F16 {
    u16 bits;
};

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ float widen(float x) { return x; }

__device__ __forceinline__ float widen(Bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

__device__ __forceinline__ float widen(F16 x) {
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
#else
    const u32 sign = static_cast<u32>(x.bits & 0x8000u) << 16;
    const u32 exponent = (x.bits >> 10) & 31u;
    const u32 fraction = x.bits & 1023u;
    if (exponent == 0) {  // below the normal numbers: a multiple of 2^-24
        const float size = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return __uint_as_float(__float_as_uint(size) | sign);
    }
    const u32 wide = exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23;
    return __uint_as_float(sign | wide | (fraction << 13));
#endif
}

template <class T>
__device__ __forceinline__ T narrow(float x);  // to nearest, ties to even, NaN stays NaN

template <>
__device__ __forceinline__ float narrow<float>(float x) {
    return x;
}

template <>
__device__ __forceinline__ Bf16 narrow<Bf16>(float x) {
    const u32 bits = __float_as_uint(x);
    if (is_nan(x)) return Bf16{0x7fc0};
    return Bf16{static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
__device__ __forceinline__ F16 narrow<F16>(float x) {
#ifdef __CUDA_ARCH__
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return F16{bits};
#else
    const u32 sign = (__float_as_uint(x) >> 16) & 0x8000u;
    const u32 size = magnitude_bits(x);
    if (size > 0x7f800000u) return F16{0x7fff};
    if (size >= 0x477ff000u) return F16{static_cast<u16>(sign | 0x7c00u)};  // rounds beyond 65504
    if (size < 0x38800000u) {  // below 2^-14: adding 0.5 lets the adder round to a multiple of 2^-24
        const float rounded = __uint_as_float(size) + 0.5f;
        return F16{static_cast<u16>(sign | (__float_as_uint(rounded) - 0x3f000000u))};
    }
    const u32 rounded = size - 0x38000000u + 0xfffu + ((size >> 13) & 1u);
    return F16{static_cast<u16>(sign | (rounded >> 13))};
#endif
}

// Up or down by chance, so that the mean of many roundings is x: `random` has 16 bits.
__device__ __forceinline__ Bf16 narrow_by_chance(float x, u32 random) {
    if (magnitude_bits(x) >= 0x7f800000u) return narrow<Bf16>(x);
    return Bf16{static_cast<u16>((__float_as_uint(x) + random) >> 16)};
}

// base^exponent by squaring: the same bits everywhere, which a library's pow does not promise.
__device__ __forceinline__ double power(double base, u64 exponent) {
    double result = 1.0;
    for (; exponent != 0; exponent >>= 1) {
        if (exponent & 1) result *= base;
        base *= base;
    }
    return result;
}

// torch.lerp: from `start` the share `weight` of the way to `end`, exact at both ends.
__device__ __forceinline__ float lerp(float start, float end, float weight) {
    const float way = end - start;
    return weight < 0.5f ? fmaf(weight, way, start) : fmaf(-way, 1.0f - weight, end);
}

// torch.maximum: NaN wins.
__device__ __forceinline__ float maximum(float a, float b) { return a > b || is_nan(a) ? a : b; }

struct Random {
    u32 words[4];
};

// Philox4x32-10 (Salmon et al. 2011): 128 random bits that depend on counter and key alone.
__device__ __forceinline__ Random philox(u32 c0, u32 c1, u32 c2, u32 c3, u64 key) {
    u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Random{{c0, c1, c2, c3}};
}
