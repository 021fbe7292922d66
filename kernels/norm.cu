// The norm of all gradients, the factor that clips them, and whether one of them is not finite.
//
// Every chunk's sum of squares goes into the workspace; the last block to finish adds them up in a fixed order,
// so the result has the same bits for every grid. One thread reads 16 bytes at a time. Bytes per element: reads
// g (4 in fp32, 2 in 16 bits). From sm_75.
#include "_update.cuh"

struct Squares {
    float sum[4] = {};
    float finite = 0.0f;  // NaN once something was infinite or NaN

    template <class G, int V, bool ALIGNED>
    __device__ __forceinline__ void add(const Row& row, long long i) {
        float g[V];
        read<G, V, ALIGNED>(row.g, i, g);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            sum[k % 4] = fmaf(g[k], g[k], sum[k % 4]);
            finite = fmaf(g[k], 0.0f, finite);
        }
    }

    // The split among threads does not depend on alignment, or the sum would.
    template <class G>
    __device__ __forceinline__ void add_chunk(const Row& row, const Chunk& chunk, int lane, int lanes) {
        constexpr int V = 16 / sizeof(G);
        const bool aligned = (reinterpret_cast<u64>(row.g) + static_cast<u64>(chunk.start) * sizeof(G)) % 16 == 0;
        const int vectors = chunk.count / V;
        if (aligned) {
            // One load is not enough to keep the memory busy, and nothing else is done here.
#pragma unroll 4
            for (int k = lane; k < vectors; k += lanes) add<G, V, true>(row, chunk.start + k * V);
        } else
            for (int k = lane; k < vectors; k += lanes) add<G, V, false>(row, chunk.start + k * V);
        for (int k = vectors * V + lane; k < chunk.count; k += lanes) add<G, 1, false>(row, chunk.start + k);
    }
};

__device__ __forceinline__ void write_outcome(const Launch& launch, double squares, bool nonfinite) {
    const float inverse = GradientScale(launch).unscale;
    const float norm = static_cast<float>(sqrt(squares)) * inverse;
    // As torch computes max_norm / (norm + eps): by the reciprocal. NaN stays NaN.
    const float coef = 1.0f / (norm + launch.clip_epsilon) * launch.max_norm;
    launch.outcome[0] = norm;
    launch.outcome[1] = coef > 1.0f ? 1.0f : coef;
    launch.outcome[2] = nonfinite ? 1.0f : 0.0f;
    launch.outcome[3] = 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_norm(const __grid_constant__ Launch launch) {
    __shared__ double sums[WARPS];
    __shared__ u32 last;
    keep_told(launch);
    bool nonfinite = false;
    for (int at = blockIdx.x; at < num_items(launch); at += gridDim.x) {
        const Item item(launch, at);
        if (item.chunk() >= item.end) continue;
        const Chunk chunk = launch.chunks[item.chunk()];
        const Row row = row_of(launch, chunk.row);
        Squares squares;
        if (row.g != nullptr) {
            if (row.pair == 0 || row.pair == 7)
                squares.add_chunk<float>(row, chunk, item.lane(), item.lanes());
            else if (row.pair == 1 || row.pair == 2 || row.pair == 5)
                squares.add_chunk<Bf16>(row, chunk, item.lane(), item.lanes());
            else
                squares.add_chunk<F16>(row, chunk, item.lane(), item.lanes());
        }
        nonfinite = nonfinite || is_nan(squares.finite);
        const double sum = static_cast<double>(squares.sum[0]) + squares.sum[1] + squares.sum[2] + squares.sum[3];
        const double total = chunk_sum(sum, item.large, sums);
        if (item.lane() == 0) launch.workspace[item.chunk()] = total;
    }
    if (nonfinite) atomicOr(&launch.control->nonfinite, 1u);
    if (!is_last_block(&launch.control->norm_arrivals, &last)) return;
    const int num_chunks = launch.num_large + launch.num_small;
    double sum = 0.0;
    for (int chunk = threadIdx.x; chunk < num_chunks; chunk += THREADS) sum += launch.workspace[chunk];
    sum = chunk_sum(sum, true, sums);
    if (threadIdx.x == 0) {
        write_outcome(launch, sum, launch.control->nonfinite != 0);
        launch.control->nonfinite = 0;
    }
}
