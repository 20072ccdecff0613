// A library for `moe bench cast --peer`: the one C function that the bench calls, here with a plain kernel (a tile of 64 x 64 elements a block). Put the
// cast of another library in its place to have it measured beside ours, in the same process and on the same memory.
//
//   nvcc -O3 -arch=sm_90 -shared -Xcompiler -fPIC examples/cast_peer.cu -o libcast_peer.so
//   moe bench cast --peer ./libcast_peer.so
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace {

constexpr int TILE = 64; // arbitrary: 4 KB of e4m3 in shared memory
constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) cast(const __nv_bfloat16 *x, const int64_t *offsets, uint64_t num_columns, const float *scales,
                                                uint8_t *row, uint8_t *column, float *amax, float *scale_inv) {
    __shared__ uint8_t tile[TILE][TILE + 1];
    __shared__ float block_amax;
    const int64_t first_row = offsets[blockIdx.z], num_rows = offsets[blockIdx.z + 1] - first_row;
    if (threadIdx.x == 0) block_amax = 0;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) scale_inv[blockIdx.z] = 1.0f / scales[blockIdx.z];
    const float scale = scales[blockIdx.z];
    const uint64_t from_column = uint64_t(blockIdx.x) * TILE;
    for (int64_t from_row = int64_t(blockIdx.y) * TILE; from_row < num_rows; from_row += int64_t(gridDim.y) * TILE) {
        float most = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
            const int64_t r = from_row + i / TILE;
            const uint64_t c = from_column + i % TILE;
            if (r >= num_rows || c >= num_columns) continue;
            const float value = __bfloat162float(x[(first_row + r) * num_columns + c]);
            most = fmaxf(most, fabsf(value));
            const uint8_t byte = __nv_cvt_float_to_fp8(value * scale, __NV_SATFINITE, __NV_E4M3);
            row[(first_row + r) * num_columns + c] = byte;
            tile[i / TILE][i % TILE] = byte;
        }
        atomicMax(reinterpret_cast<int *>(&block_amax), __float_as_int(most)); // not negative: ordered as integers
        __syncthreads();
        uint8_t *copy = column + first_row * num_columns; // [num_columns, num_rows]
        for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
            const int64_t r = from_row + i % TILE;
            const uint64_t c = from_column + i / TILE;
            if (r < num_rows && c < num_columns) copy[c * num_rows + r] = tile[i % TILE][i / TILE];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<int *>(amax + blockIdx.z), __float_as_int(block_amax));
}

} // namespace

extern "C" int moe_peer_cast(const void *x, const int64_t *offsets, const int64_t *device_offsets, uint64_t n, uint64_t num_columns, const float *scale,
                             void *row, void *column, float *amax, float *scale_inv, void *stream) {
    int64_t most_rows = 1;
    for (uint64_t i = 0; i < n; ++i) most_rows = offsets[i + 1] - offsets[i] > most_rows ? offsets[i + 1] - offsets[i] : most_rows;
    const dim3 grid((num_columns + TILE - 1) / TILE, unsigned((most_rows + TILE - 1) / TILE), unsigned(n)); // up to 65535 matrices
    cast<<<grid, THREADS, 0, cudaStream_t(stream)>>>(static_cast<const __nv_bfloat16 *>(x), device_offsets, num_columns, scale,
                                                     static_cast<uint8_t *>(row), static_cast<uint8_t *>(column), amax, scale_inv);
    return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
