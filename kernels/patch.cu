// Writes words that arrive in the kernel's arguments into the table: pointers of new gradients, learning rates.
// No pinned memory and no copy, hence in the stream's order and safe in a captured graph.
//
// One thread writes one word of 8 bytes. From sm_75; arguments beyond 4 KB (VALUES above 510) need sm_70, CUDA
// 12.1 and driver 530.
#include "_math.cuh"

#ifndef VALUES
#define VALUES 510
#endif

struct Patch {
    u64* target;
    int stride;  // in words
    int count;
    u64 values[VALUES];
};
static_assert(sizeof(Patch) == 16 + 8 * VALUES, "the layout that the host writes");

extern "C" __global__ void __launch_bounds__(256) patch(const __grid_constant__ Patch patch) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < patch.count) patch.target[static_cast<long long>(i) * patch.stride] = patch.values[i];
}
