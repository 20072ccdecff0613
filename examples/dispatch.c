/* Four ranks, threads of this process, send tokens to the ranks of their experts and bring the rows back: once in whole calls, once in halves,
 * once by replaying the routing of the call before, in halves too. Each expert returns the row that it got, so a token comes back as many times as large as
 * there were ranks that it went to. Beside it: rows of each expert, and their indices for a GEMM that gathers. On the CPU.
 *
 *   cc examples/dispatch.c -Iinclude -Ltarget/release -lmoe_kernels -Wl,-rpath,target/release -lpthread -o dispatch && ./dispatch
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe_kernels.h"

enum { RANKS = 4, TOKENS = 5, HIDDEN = 16, EXPERTS = 8, K = 2, LOCAL = EXPERTS / RANKS, ALIGN = 4 };

static void check(int32_t status, const char *what) {
    if (status == MOE_OK) return;
    fprintf(stderr, "%s: status %d: %s\n", what, (int)status, moe_last_error());
    exit(1);
}

static MoeTensor matrix(void *data, int32_t dtype, size_t rows, size_t columns) {
    MoeTensor tensor = {0};
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.num_dims = 2;
    tensor.shape[0] = rows;
    tensor.shape[1] = columns;
    return tensor;
}

/* The experts: y = x. The views of the arrival are in this rank's memory. */
static void run_experts(MoeEp *ep, MoeArrival *arrival) {
    MoeTensor x, y;
    size_t num_rows;
    check(moe_arrival_num_rows(ep, arrival, &num_rows), "moe_arrival_num_rows");
    check(moe_arrival_view(arrival, MOE_ARRIVAL_X, &x), "moe_arrival_view");
    check(moe_arrival_view(arrival, MOE_ARRIVAL_EXPERT_OUTPUT, &y), "moe_arrival_view");
    memcpy(y.data, x.data, num_rows * HIDDEN * sizeof(float));
}

/* The rows of each local expert, in segments of multiples of ALIGN, are those that name it. */
static void check_indices(MoeArrival *arrival, const uint32_t *counts, uint32_t first_expert) {
    int32_t gather[RANKS * TOKENS * K + LOCAL * (ALIGN - 1)];
    uint32_t start[LOCAL + 1], e, i;
    MoeTensor gather_view = matrix(gather, MOE_I32, sizeof gather / sizeof *gather, 0), start_view = matrix(start, MOE_U32, LOCAL + 1, 0), ids;
    gather_view.num_dims = start_view.num_dims = 1;
    check(moe_arrival_gather_idx(arrival, ALIGN, &gather_view, &start_view), "moe_arrival_gather_idx");
    check(moe_arrival_view(arrival, MOE_ARRIVAL_TOPK_IDX, &ids), "moe_arrival_view");
    for (e = 0; e < LOCAL; e++) {
        uint32_t num = 0;
        for (i = start[e]; i < start[e + 1]; i++) {
            const int32_t *row;
            if (gather[i] < 0) continue;
            row = (const int32_t *)ids.data + (size_t)gather[i] * ids.strides[0];
            if (row[0] != (int32_t)(first_expert + e) && row[1] != (int32_t)(first_expert + e)) exit(1);
            num++;
        }
        if (num != counts[e] || (start[e + 1] - start[e]) % ALIGN != 0) {
            fprintf(stderr, "expert %u: %u rows instead of %u\n", (unsigned)(first_expert + e), (unsigned)num, (unsigned)counts[e]);
            exit(1);
        }
    }
}

static void *rank_main(void *argument) {
    MoeWorld *world = argument;
    MoeEp *ep = NULL;
    MoeRouting *routing = NULL;
    MoeEpConfig config;
    float *x = NULL, *out = NULL;
    int32_t ids[TOKENS * K];
    uint32_t rank, counts[LOCAL];
    int64_t statistics[LOCAL] = {0};
    int way, t, i;

    check(moe_world_rank(world, &rank), "moe_world_rank");
    check(moe_ep_config_init(&config, sizeof config, HIDDEN, MOE_F32, EXPERTS, K, TOKENS), "moe_ep_config_init");
    check(moe_ep_create(world, &config, &ep), "moe_ep_create");
    check(moe_routing_create(ep, &routing), "moe_routing_create");

    /* Rows start at multiples of 16 bytes: so does what malloc gives on every 64-bit system. */
    x = malloc(TOKENS * HIDDEN * sizeof *x);
    out = malloc(TOKENS * HIDDEN * sizeof *out);
    if (x == NULL || out == NULL) exit(1);

    for (way = 0; way < 3; way++) {
        MoeTensor x_view = matrix(x, MOE_F32, TOKENS, HIDDEN), id_view = matrix(ids, MOE_I32, TOKENS, K);
        MoeTensor out_view = matrix(out, MOE_F32, TOKENS, HIDDEN);
        MoeDispatchInput input = {0};
        MoeCombineInput rows = {0};
        MoeCombineOutput result = {0};
        MoeTensor counts_view = matrix(counts, MOE_U32, LOCAL, 0), statistics_view = matrix(statistics, MOE_I64, LOCAL, 0);
        MoeDispatchOutputs outputs = {0};
        MoeArrival *arrival = NULL;
        const int halves = way > 0;

        for (i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)(1000 * (int)rank + i + way);
        for (t = 0; t < TOKENS && way < 2; t++) {
            /* Expert e is on rank e / 2: an even token has both experts on one rank, an odd one on two. */
            ids[t * K] = (int32_t)((2 * t + 2 * (int)rank) % EXPERTS);
            ids[t * K + 1] = (ids[t * K] + (t % 2 == 0 ? 1 : 2)) % EXPERTS;
        }
        input.size = sizeof input;
        input.x = &x_view;
        input.topk_idx = &id_view;
        input.num_tokens = -1;
        counts_view.num_dims = statistics_view.num_dims = 1;
        outputs.size = sizeof outputs;
        outputs.counts_host = &counts_view;
        outputs.expert_statistics = &statistics_view;
        rows.size = sizeof rows; /* y is null: the experts wrote into the arrival */
        result.size = sizeof result;
        result.out = &out_view;

        if (halves) {
            MoeDispatchSent *sent = NULL;
            MoeCombineSent *back = NULL;
            if (way == 1) {
                check(moe_dispatch_send(ep, routing, &input, &sent), "moe_dispatch_send");
                check(moe_dispatch_receive(ep, routing, &sent, &outputs, &arrival), "moe_dispatch_receive");
            } else {
                check(moe_replay_send(ep, routing, &x_view, NULL, &sent), "moe_replay_send");
                check(moe_replay_receive(ep, routing, &sent, &arrival), "moe_replay_receive");
            }
            check_indices(arrival, counts, rank * LOCAL);
            run_experts(ep, arrival);
            check(moe_combine_send(ep, routing, &arrival, &rows, &back), "moe_combine_send");
            check(moe_combine_receive(ep, routing, &back, &result), "moe_combine_receive");
        } else {
            check(moe_dispatch(ep, routing, &input, &outputs, &arrival), "moe_dispatch");
            check_indices(arrival, counts, rank * LOCAL);
            run_experts(ep, arrival);
            check(moe_combine(ep, routing, &arrival, &rows, &result), "moe_combine");
        }
        for (i = 0; i < TOKENS * HIDDEN; i++) {
            const float want = x[i] * (float)(i / HIDDEN % 2 == 0 ? 1 : 2);
            if (out[i] != want) {
                fprintf(stderr, "rank %u, token %d, element %d: %g instead of %g\n", (unsigned)rank, i / HIDDEN, i % HIDDEN, (double)out[i], (double)want);
                exit(1);
            }
        }
    }
    /* Two calls were counted, of the same routes. */
    for (i = 0; i < LOCAL; i++) {
        if (statistics[i] != 2 * (int64_t)counts[i]) return argument;
    }
    check(moe_routing_destroy(routing), "moe_routing_destroy");
    check(moe_ep_destroy(ep), "moe_ep_destroy");
    check(moe_world_destroy(world), "moe_world_destroy");
    free(x);
    free(out);
    return NULL;
}

int main(void) {
    MoeBackend *backend = NULL;
    const MoeBackend *backends[RANKS];
    MoeWorld *worlds[RANKS];
    pthread_t threads[RANKS];
    int r;
    check(moe_backend_cpu(&backend), "moe_backend_cpu");
    for (r = 0; r < RANKS; r++) {
        backends[r] = backend;
        worlds[r] = NULL;
    }
    check(moe_world_threads(backends, worlds, RANKS), "moe_world_threads");
    for (r = 0; r < RANKS; r++) {
        if (pthread_create(&threads[r], NULL, rank_main, worlds[r]) != 0) return 1;
    }
    for (r = 0; r < RANKS; r++) {
        void *failed = NULL;
        if (pthread_join(threads[r], &failed) != 0 || failed != NULL) return 1;
    }
    check(moe_backend_destroy(backend), "moe_backend_destroy");
    printf("dispatch: ok\n");
    return 0;
}
