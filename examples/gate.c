/* The shared expert's gate: out = sigmoid(x . w) * s for three tokens, on the CPU; with -DUSE_CUDA -lcuda on GPU 0.
 *
 *   cc examples/gate.c -Iinclude -Ltarget/release -lmoe_kernels -Wl,-rpath,target/release -lm -o gate && ./gate
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "moe_kernels.h"
#ifdef USE_CUDA
#include <cuda.h>
#define DRIVER(call) do { CUresult status = (call); if (status != CUDA_SUCCESS) { fprintf(stderr, "%s: %d\n", #call, (int)status); exit(1); } } while (0)
#endif

enum { TOKENS = 3, K = 64, N = 8 };

static void check(int32_t status, const char *what) {
    if (status == MOE_OK) return;
    fprintf(stderr, "%s: status %d: %s\n", what, (int)status, moe_last_error());
    exit(1);
}

/* A contiguous matrix of f32. */
static MoeTensor matrix(void *data, size_t rows, size_t columns) {
    MoeTensor tensor = {0};
    tensor.data = data;
    tensor.dtype = MOE_F32;
    tensor.num_dims = 2;
    tensor.shape[0] = rows;
    tensor.shape[1] = columns;
    return tensor;
}

int main(void) {
    static float x[TOKENS * K], w[K], s[TOKENS * N], out[TOKENS * N];
    void *memory[4] = {x, w, s, out};
    MoeBackend *backend = NULL;
    MoeTensor tensors[4];
    MoeGateOptions options;
    int t, i;

    for (i = 0; i < TOKENS * K; i++) x[i] = (float)(i % 7 - 3) / 8;
    for (i = 0; i < K; i++) w[i] = (float)(i % 5 - 2) / 4;
    for (i = 0; i < TOKENS * N; i++) s[i] = (float)i;

#ifdef USE_CUDA
    {
        CUdevice device;
        CUcontext context;
        CUdeviceptr at[4];
        const size_t bytes[4] = {sizeof x, sizeof w, sizeof s, sizeof out};
        DRIVER(cuInit(0));
        DRIVER(cuDeviceGet(&device, 0));
        DRIVER(cuDevicePrimaryCtxRetain(&context, device));
        DRIVER(cuCtxSetCurrent(context));
        for (i = 0; i < 4; i++) {
            DRIVER(cuMemAlloc(&at[i], bytes[i]));
            DRIVER(cuMemcpyHtoD(at[i], memory[i], bytes[i]));
            memory[i] = (void *)(uintptr_t)at[i];
        }
    }
    check(moe_backend_cuda(0, NULL, &backend), "moe_backend_cuda");
#else
    check(moe_backend_cpu(&backend), "moe_backend_cpu");
#endif

    tensors[0] = matrix(memory[0], TOKENS, K);
    tensors[1] = matrix(memory[1], K, 1);
    tensors[1].num_dims = 1;
    tensors[2] = matrix(memory[2], TOKENS, N);
    tensors[3] = matrix(memory[3], TOKENS, N);
    check(moe_gate_options_init(&options, sizeof options), "moe_gate_options_init");
    check(moe_gate_mul(backend, &tensors[0], &tensors[1], &tensors[2], &options, &tensors[3]), "moe_gate_mul");

#ifdef USE_CUDA
    DRIVER(cuCtxSynchronize());
    DRIVER(cuMemcpyDtoH(out, (CUdeviceptr)(uintptr_t)memory[3], sizeof out));
#endif
    for (t = 0; t < TOKENS; t++) {
        double logit = 0, gate;
        for (i = 0; i < K; i++) logit += (double)x[t * K + i] * (double)w[i];
        gate = 1 / (1 + exp(-logit));
        for (i = 0; i < N; i++) {
            const double want = gate * (double)s[t * N + i];
            if (fabs((double)out[t * N + i] - want) > 1e-5 * (1 + fabs(want))) {
                fprintf(stderr, "token %d, column %d: %g instead of %g\n", t, i, (double)out[t * N + i], want);
                return 1;
            }
        }
    }
    /* A wrong argument is an error that names it, and nothing is written. */
    tensors[1].dtype = MOE_I32;
    if (moe_gate_mul(backend, &tensors[0], &tensors[1], &tensors[2], &options, &tensors[3]) != MOE_INVALID) return 1;
    printf("as it should be, refused: %s\n", moe_last_error());
    check(moe_backend_destroy(backend), "moe_backend_destroy");
    printf("gate: ok\n");
    return 0;
}
