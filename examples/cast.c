/* FP8 copies of matrices with the scale of each: a list of two, then the same rows as a group with offsets. On the CPU; with -DUSE_CUDA -lcuda on GPU 0.
 *
 *   cc examples/cast.c -Iinclude -Ltarget/release -lmoe_kernels -Wl,-rpath,target/release -o cast && ./cast
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe_kernels.h"
#ifdef USE_CUDA
#include <cuda.h>
#define DRIVER(call) do { CUresult status = (call); if (status != CUDA_SUCCESS) { fprintf(stderr, "%s: %d\n", #call, (int)status); exit(1); } } while (0)
#endif

enum { FIRST = 3, SECOND = 5, ROWS = FIRST + SECOND, COLUMNS = 32 };

static void check(int32_t status, const char *what) {
    if (status == MOE_OK) return;
    fprintf(stderr, "%s: status %d: %s\n", what, (int)status, moe_last_error());
    exit(1);
}

static MoeTensor tensor(void *data, int32_t dtype, int32_t num_dims, size_t rows, size_t columns) {
    MoeTensor tensor = {0};
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.num_dims = num_dims;
    tensor.shape[0] = rows;
    tensor.shape[1] = columns;
    return tensor;
}

/* Memory of the backend: a copy of what is here. */
static void *to_backend(void *from, size_t bytes) {
#ifdef USE_CUDA
    CUdeviceptr at;
    DRIVER(cuMemAlloc(&at, bytes));
    DRIVER(cuMemcpyHtoD(at, from, bytes));
    return (void *)(uintptr_t)at;
#else
    (void)bytes;
    return from;
#endif
}

static void from_backend(void *to, void *at, size_t bytes) {
#ifdef USE_CUDA
    DRIVER(cuCtxSynchronize());
    DRIVER(cuMemcpyDtoH(to, (CUdeviceptr)(uintptr_t)at, bytes));
#else
    if (to != at) memcpy(to, at, bytes);
#endif
}

/* Powers of two: exact in FP8, whatever the rounding. The byte of 2^e is (e + 7) << 3. */
static float element(int row, int column) { return (float)(1 << (row + column) % 6); }
static uint8_t byte_of(int row, int column) { return (uint8_t)(((row + column) % 6 + 7) << 3); }

static void compare(const uint8_t *row, const uint8_t *column, const float *amax, const char *what) {
    int r, c;
    for (r = 0; r < ROWS; r++) {
        for (c = 0; c < COLUMNS; c++) {
            /* The transposed copy of each matrix is contiguous: the second begins behind the first. */
            const int in_first = r < FIRST;
            const uint8_t turned = in_first ? column[c * FIRST + r] : column[FIRST * COLUMNS + c * SECOND + r - FIRST];
            if (row[r * COLUMNS + c] != byte_of(r, c) || turned != byte_of(r, c)) {
                fprintf(stderr, "%s: row %d, column %d: %02x and %02x instead of %02x\n", what, r, c, row[r * COLUMNS + c], turned, byte_of(r, c));
                exit(1);
            }
        }
    }
    if (amax[0] != 32 || amax[1] != 32) {
        fprintf(stderr, "%s: amax %g and %g\n", what, (double)amax[0], (double)amax[1]);
        exit(1);
    }
}

int main(void) {
    static float x[ROWS * COLUMNS];
    static uint8_t row[ROWS * COLUMNS], column[ROWS * COLUMNS];
    float amax[2] = {0, 0}, scale[2] = {1, 1};
    int32_t offsets[3] = {0, FIRST, ROWS};
    uint32_t status = 99;
    void *x_at, *row_at, *column_at, *amax_at, *scale_at, *offsets_at, *status_at;
    MoeBackend *backend = NULL;
    MoeCastOptions options;
    MoeCastOperands list[2], group;
    MoeTensor tensors[8], all_x, all_row, all_column, all_amax, all_scale, all_offsets, one_status;
    int i;

    for (i = 0; i < ROWS * COLUMNS; i++) x[i] = element(i / COLUMNS, i % COLUMNS);
#ifdef USE_CUDA
    {
        CUdevice device;
        CUcontext context;
        DRIVER(cuInit(0));
        DRIVER(cuDeviceGet(&device, 0));
        DRIVER(cuDevicePrimaryCtxRetain(&context, device));
        DRIVER(cuCtxSetCurrent(context));
    }
    check(moe_backend_cuda(0, NULL, &backend), "moe_backend_cuda");
#else
    check(moe_backend_cpu(&backend), "moe_backend_cpu");
#endif
    x_at = to_backend(x, sizeof x);
    row_at = to_backend(row, sizeof row);
    column_at = to_backend(column, sizeof column);
    amax_at = to_backend(amax, sizeof amax);
    scale_at = to_backend(scale, sizeof scale);
    offsets_at = to_backend(offsets, sizeof offsets);
    status_at = to_backend(&status, sizeof status);
    check(moe_cast_options_init(&options, sizeof options), "moe_cast_options_init");

    /* A list. Its tensors are parts of the same memory as those of the group below. */
    memset(list, 0, sizeof list);
    for (i = 0; i < 2; i++) {
        const size_t first = i == 0 ? 0 : FIRST, rows = i == 0 ? FIRST : SECOND;
        MoeTensor *t = tensors + 4 * i;
        t[0] = tensor((float *)x_at + first * COLUMNS, MOE_F32, 2, rows, COLUMNS);
        t[1] = tensor((uint8_t *)row_at + first * COLUMNS, MOE_E4M3, 2, rows, COLUMNS);
        t[2] = tensor((uint8_t *)column_at + first * COLUMNS, MOE_E4M3, 2, COLUMNS, rows);
        t[3] = tensor((float *)amax_at + i, MOE_F32, 1, 1, 0);
        list[i].size = sizeof list[i];
        list[i].x = &t[0];
        list[i].row = &t[1];
        list[i].column = &t[2];
        list[i].amax = &t[3]; /* no scale: 1 */
    }
    check(moe_cast(backend, list, 2, &options), "moe_cast");
    from_backend(row, row_at, sizeof row);
    from_backend(column, column_at, sizeof column);
    from_backend(amax, amax_at, sizeof amax);
    compare(row, column, amax, "moe_cast");

    /* A group. */
    memset(&group, 0, sizeof group);
    all_x = tensor(x_at, MOE_F32, 2, ROWS, COLUMNS);
    all_row = tensor(row_at, MOE_E4M3, 2, ROWS, COLUMNS);
    all_column = tensor(column_at, MOE_E4M3, 1, ROWS * COLUMNS, 0);
    all_amax = tensor(amax_at, MOE_F32, 1, 2, 0);
    all_scale = tensor(scale_at, MOE_F32, 1, 2, 0);
    all_offsets = tensor(offsets_at, MOE_I32, 1, 3, 0);
    one_status = tensor(status_at, MOE_U32, 1, 1, 0);
    group.size = sizeof group;
    group.x = &all_x;
    group.scale = &all_scale;
    group.row = &all_row;
    group.column = &all_column;
    group.amax = &all_amax;
    group.status = &one_status;
    options.reset_amax = 1;
    check(moe_cast_grouped(backend, &group, &all_offsets, &options), "moe_cast_grouped");
    from_backend(row, row_at, sizeof row);
    from_backend(column, column_at, sizeof column);
    from_backend(amax, amax_at, sizeof amax);
    from_backend(&status, status_at, sizeof status);
    compare(row, column, amax, "moe_cast_grouped");
    if (status != MOE_CAST_GOOD) return 1;

    /* A wrong argument is an error that names it, and nothing is written. */
    all_offsets.dtype = MOE_F32;
    if (moe_cast_grouped(backend, &group, &all_offsets, &options) != MOE_INVALID) return 1;
    printf("as it should be, refused: %s\n", moe_last_error());
    check(moe_backend_destroy(backend), "moe_backend_destroy");
    printf("cast: ok\n");
    return 0;
}
