// AdamW whose moments take one byte each, all tensors of an optimizer in one launch.
//
// Blocks of 256 elements share one fp32 scale per moment. A code is a small float, so that coding and decoding are
// a few integer operations and no table: of m the sign, 7 binades of 16 steps and 16 even steps below; of the root
// of v 7 binades of 32 steps and 32 below, and what is above 0 stays above 0.
//
// A warp takes a block, a thread eight neighbouring elements. Bytes per element: fp32 p and g: reads p, g, m, v
// (10), writes p, m, v (6), scales 0.06; bf16 p and g: 10.06 in all. From sm_75.
#include "_adam.cuh"

constexpr int BLOCK = 256;
constexpr int EACH = BLOCK / LANES;
constexpr u32 BINADES = 7;
constexpr float SMALLEST = 7.52316384526264e-37f;  // 2^-120: what is less has no finite reciprocal scale

template <int FRACTION>
struct Code {  // with FRACTION bits in each of the binades from 2^-BINADES to 1
    static constexpr u32 STEPS = 1u << FRACTION;
    static constexpr u32 LAST = (BINADES + 1) * STEPS - 1;
    static constexpr u32 OFFSET = (126 - BINADES) * STEPS;
    static constexpr u32 SHIFT = 23 - FRACTION;
    static constexpr float FINEST = 1.0f / static_cast<float>(STEPS << BINADES);
    static constexpr float TOP = 1.0f - 0.5f / static_cast<float>(STEPS);  // what the last code stands for

    // Of 0 <= x <= TOP; to nearest, ties to even.
    __device__ __forceinline__ static u32 encode(float x) {
        const u32 bits = __float_as_uint(x);
        const u32 normal = ((bits + (1u << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1u)) >> SHIFT) - OFFSET;
        const u32 below = __float_as_uint(x * (1.0f / FINEST) + 8388608.0f) - 0x4b000000u;
        const u32 code = bits < (127 - BINADES) << 23 ? below : normal;
        return code < LAST ? code : LAST;
    }

    __device__ __forceinline__ static float decode(u32 code) {
        return code < STEPS ? static_cast<float>(code) * FINEST : __uint_as_float((code + OFFSET) << SHIFT);
    }
};

using CodeM = Code<4>;
using CodeV = Code<5>;

__device__ __forceinline__ float decode_m(u32 code, float scale) {
    const float size = CodeM::decode(code & 127u) * scale;
    return code & 128u ? -size : size;
}

__device__ __forceinline__ u32 encode_m(float m, float inverse) {
    return CodeM::encode(__uint_as_float(magnitude_bits(m)) * inverse) | __float_as_uint(m) >> 31 << 7;
}

__device__ __forceinline__ u32 encode_root(float root, float inverse) {
    const u32 code = CodeV::encode(root * inverse);
    return code == 0 && root > 0.0f ? 1 : code;
}

// The largest magnitude among a warp's; NaN is larger than all.
__device__ __forceinline__ float warp_largest(u32 bits) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        const u32 other = __shfl_xor_sync(0xffffffffu, bits, distance);
        bits = bits > other ? bits : other;
    }
    return __uint_as_float(bits);
}

template <class C>
struct Scale {
    float size;
    float inverse;

    __device__ __forceinline__ explicit Scale(float largest)
        : size(largest < SMALLEST ? 0.0f : largest / C::TOP), inverse(largest < SMALLEST ? 0.0f : C::TOP / largest) {}
};

__device__ __forceinline__ void read_codes(const void* array, long long i, u32 (&codes)[2]) {
    const unsigned char* source = static_cast<const unsigned char*>(array) + i;
    CHECK_ALIGNED(source, 8);
    const uint2 two = *reinterpret_cast<const uint2*>(source);
    codes[0] = two.x, codes[1] = two.y;
}

__device__ __forceinline__ void write_codes(void* array, long long i, const u32 (&codes)[2]) {
    unsigned char* target = static_cast<unsigned char*>(array) + i;
    CHECK_ALIGNED(target, 8);
    *reinterpret_cast<uint2*>(target) = make_uint2(codes[0], codes[1]);
}

struct AdamW8bit : Elementwise {
    static constexpr bool QUANTIZED = true;

    Adam adam;
    Dice dice;

    __device__ static void prepare(const Group& group, float step, float* scalars) { Adam::prepare(group, step, scalars); }

    __device__ __forceinline__ AdamW8bit(const Launch& launch, const Row& row, int index, const float* scalars)
        : adam(launch, row, scalars, GradientScale(launch)), dice(launch, row, index) {}

    template <class P, class G>
    __device__ __forceinline__ void chunk(const Row& row, const Chunk& chunk, int lane, int lanes) const {
        ASSUME_GLOBAL(row.p);
        ASSUME_GLOBAL(row.g);
        ASSUME_GLOBAL(row.m);
        ASSUME_GLOBAL(row.v);
        ASSUME_GLOBAL(row.v_max);
        ASSUME_GLOBAL(row.v_scales);
        u64 low = reinterpret_cast<u64>(row.p) | reinterpret_cast<u64>(row.g) | reinterpret_cast<u64>(row.copy);
        low |= (reinterpret_cast<u64>(row.m) | reinterpret_cast<u64>(row.v)) * 2;  // 8 bytes at a time
        const bool aligned = low % 16 == 0;
        for (int at = lane / LANES * BLOCK; at < chunk.count; at += lanes / LANES * BLOCK) {
            const int mine = at + lane % LANES * EACH;
            if (aligned && chunk.count - at >= BLOCK)
                block<P, G, true>(row, chunk.start + mine, EACH);
            else
                block<P, G, false>(row, chunk.start + mine, max(0, min(EACH, chunk.count - mine)));
        }
    }

    // A thread's part of a block: eight elements from i, of which the first `valid` exist.
    template <class P, class G, bool ALIGNED>
    __device__ __forceinline__ void block(const Row& row, long long i, int valid) const {
        float p[EACH] = {}, g[EACH] = {}, m[EACH], root[EACH];
        u32 codes_m[2] = {}, codes_v[2] = {};
        if constexpr (ALIGNED) {
            read<P, EACH, true>(row.p, i, p);
            read<G, EACH, true>(row.g, i, g);
            read_codes(row.m, i, codes_m);
            read_codes(row.v, i, codes_v);
        } else {
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                if (k >= valid) continue;
                p[k] = widen(static_cast<const P*>(row.p)[i + k]);
                g[k] = widen(static_cast<const G*>(row.g)[i + k]);
                codes_m[k / 4] |= static_cast<u32>(static_cast<const unsigned char*>(row.m)[i + k]) << (k % 4 * 8);
                codes_v[k / 4] |= static_cast<u32>(static_cast<const unsigned char*>(row.v)[i + k]) << (k % 4 * 8);
            }
        }
        float* const scale_m = static_cast<float*>(row.v_max) + i / BLOCK;
        float* const scale_v = static_cast<float*>(row.v_scales) + i / BLOCK;
        const float old_m = *scale_m, old_v = *scale_v;
        u32 largest_m = 0, largest_root = 0;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            m[k] = decode_m(codes_m[k / 4] >> (k % 4 * 8) & 255u, old_m);
            const float old_root = CodeV::decode(codes_v[k / 4] >> (k % 4 * 8) & 255u) * old_v;
            float v = old_root * old_root;
            if (k < valid) adam.advance(p[k], adam.scale(g[k]), m[k], v);
            root[k] = sqrtf(v);
            p[k] = adam.moved(p[k], m[k], root[k]);
            if (k >= valid) continue;
            largest_m = largest_m > magnitude_bits(m[k]) ? largest_m : magnitude_bits(m[k]);
            largest_root = largest_root > magnitude_bits(root[k]) ? largest_root : magnitude_bits(root[k]);
        }
        // All lanes have read the scales once they have met here.
        const Scale<CodeM> new_m(warp_largest(largest_m));
        const Scale<CodeV> new_v(warp_largest(largest_root));
        codes_m[0] = codes_m[1] = codes_v[0] = codes_v[1] = 0;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            codes_m[k / 4] |= encode_m(m[k], new_m.inverse) << (k % 4 * 8);
            codes_v[k / 4] |= encode_root(root[k], new_v.inverse) << (k % 4 * 8);
        }
        if (i % BLOCK == 0 && valid > 0) {
            *scale_m = new_m.size;
            *scale_v = new_v.size;
        }
        if constexpr (ALIGNED) {
            write_codes(row.m, i, codes_m);
            write_codes(row.v, i, codes_v);
            write_parameter<P, EACH, true>(row, i, p, adam.flags, dice);
        } else {
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                if (k >= valid) continue;
                static_cast<unsigned char*>(row.m)[i + k] = static_cast<unsigned char>(codes_m[k / 4] >> (k % 4 * 8));
                static_cast<unsigned char*>(row.v)[i + k] = static_cast<unsigned char>(codes_v[k / 4] >> (k % 4 * 8));
                const float one[1] = {p[k]};
                write_parameter<P, 1, false>(row, i + k, one, adam.flags, dice);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) adamw_8bit(const __grid_constant__ Launch launch) {
    __shared__ float scalars[WARPS][NUM_SCALARS];
    __shared__ u32 last;
    keep_told(launch);
    if (is_skipped(launch)) return;
    update_all<AdamW8bit>(launch, scalars, nullptr);
    count_step(launch, &last);
}
