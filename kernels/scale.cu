// Multiplies gradients in place: exact clipping. Writes nothing where the factor is 1, so that a step that needs no
// clipping costs no traffic and leaves every bit as it was.
//
// One thread updates 16 bytes at a time. Bytes per element: reads and writes g (8 in fp32, 4 in 16 bits), or
// none. From sm_75.
#include "_update.cuh"

template <class G, int V, bool ALIGNED>
__device__ __forceinline__ void scale_elements(const Row& row, long long i, float coef) {
    float g[V];
    read<G, V, ALIGNED>(row.g, i, g);
#pragma unroll
    for (int k = 0; k < V; ++k) g[k] *= coef;
    write_rounded<G, V, ALIGNED>(row.g, i, g);
}

template <class G>
__device__ __forceinline__ void scale_chunk(const Row& row, const Chunk& chunk, const Item& item, float coef) {
    constexpr int V = 16 / sizeof(G);
    const u64 misaligned = (reinterpret_cast<u64>(row.g) + static_cast<u64>(chunk.start) * sizeof(G)) % 16;
    const int head = min(static_cast<int>((16 - misaligned) % 16 / sizeof(G)), chunk.count);
    const int vectors = (chunk.count - head) / V;
    const int lane = item.lane(), lanes = item.lanes();
    for (int k = lane; k < head; k += lanes) scale_elements<G, 1, false>(row, chunk.start + k, coef);
    for (int k = lane; k < vectors; k += lanes) scale_elements<G, V, true>(row, chunk.start + head + k * V, coef);
    for (int k = head + vectors * V + lane; k < chunk.count; k += lanes)
        scale_elements<G, 1, false>(row, chunk.start + k, coef);
}

extern "C" __global__ void __launch_bounds__(THREADS) scale(const __grid_constant__ Launch launch) {
    keep_told(launch);
    const float coef = GradientScale(launch).coef;
    if (coef == 1.0f) return;
    for (int at = blockIdx.x; at < num_items(launch); at += gridDim.x) {
        const Item item(launch, at);
        if (item.chunk() >= item.end) continue;
        const Chunk chunk = launch.chunks[item.chunk()];
        const Row row = row_of(launch, chunk.row);
        if (row.g == nullptr) continue;
        if (row.pair == 0 || row.pair == 7)
            scale_chunk<float>(row, chunk, item, coef);
        else if (row.pair == 1 || row.pair == 2 || row.pair == 5)
            scale_chunk<Bf16>(row, chunk, item, coef);
        else
            scale_chunk<F16>(row, chunk, item, coef);
    }
}
