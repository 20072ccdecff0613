// Kernels of the tests of the runtime. They use no header and no other source of this project.

struct Scale {
    const unsigned *in;
    unsigned *out;
    unsigned num;
    unsigned addend;
};

// out[i] = in[i] * FACTOR + addend. May run in place, and as a link of a chain of programmatic launches.
extern "C" __global__ void scale(const __grid_constant__ Scale p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < p.num; i += gridDim.x * blockDim.x) p.out[i] = p.in[i] * unsigned(FACTOR) + p.addend;
}

static __device__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

struct Meet {
    unsigned *mine;
    const unsigned *other;
    unsigned *met;
    unsigned long long bound_nanoseconds;
};

// Raises a flag and waits for another's, not longer than the bound; `met` says whether it came. Without another it is a kernel that takes this long.
extern "C" __global__ void meet(const __grid_constant__ Meet p) {
    if (threadIdx.x != 0) return;
    const unsigned long long start = now();
    if (p.mine) *(volatile unsigned *)p.mine = 1;
    __threadfence();
    unsigned met = 0;
    while (now() - start < p.bound_nanoseconds) {
        if (p.other && *(const volatile unsigned *)p.other) {
            met = 1;
            break;
        }
    }
    if (p.met) *p.met = met;
}

struct Hold {
    const unsigned *word;
    unsigned *ended;
    unsigned long long bound_nanoseconds;
};

// Blocks that stay, with all their threads, until a word is set, not longer than the bound; `ended` counts those that saw it set.
extern "C" __global__ void hold(const __grid_constant__ Hold p) {
    if (threadIdx.x == 0) {
        const unsigned long long start = now();
        unsigned seen = 0;
        do seen = *(const volatile unsigned *)p.word;
        while (seen == 0 && now() - start < p.bound_nanoseconds);
        if (seen != 0) atomicAdd(p.ended, 1);
    }
    __syncthreads();
}

struct Together {
    unsigned *sums;     // [blocks], 0 before
    unsigned *turned;   // [blocks], the sum of the next block, if COOPERATIVE
    unsigned *arrivals; // 0 before
};

// Fills its shared memory, adds up that of its neighbour in the cluster, and waits for all blocks if they all run at once.
extern "C" __global__ void together(const __grid_constant__ Together p) {
    extern __shared__ unsigned memory[];
    const unsigned WORDS = SMEM_BYTES / 4; // not constexpr: a comparison of an index with 0 would be warned of
    constexpr unsigned BLOCKS = CLUSTER;
    if constexpr (PROGRAMMATIC) asm volatile("griddepcontrol.wait;" ::: "memory");
    for (unsigned i = threadIdx.x; i < WORDS; i += blockDim.x) memory[i] = blockIdx.x * 1000003u + i;
    unsigned sum = 0;
    if constexpr (BLOCKS > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        unsigned rank;
        asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
        const unsigned neighbour = (rank + 1) % BLOCKS;
        for (unsigned i = threadIdx.x; i < WORDS; i += blockDim.x) {
            unsigned address, value;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(unsigned(__cvta_generic_to_shared(memory + i))), "r"(neighbour));
            asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
            sum += value;
        }
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else {
        __syncthreads();
        for (unsigned i = threadIdx.x; i < WORDS; i += blockDim.x) sum += memory[i];
    }
    atomicAdd(p.sums + blockIdx.x, sum);
    if constexpr (COOPERATIVE) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            atomicAdd(p.arrivals, 1);
            const unsigned long long start = now();
            // A second is more than any grid needs to arrive (arbitrary); after it the sums are wrong and the test says so.
            while (*(volatile unsigned *)p.arrivals < gridDim.x && now() - start < 1000000000ull) {
            }
            __threadfence();
            p.turned[blockIdx.x] = *(volatile unsigned *)(p.sums + (blockIdx.x + 1) % gridDim.x);
        }
    }
}

struct Nothing {
    unsigned long long words[16]; // as many bytes as the gate's parameters
};

// What a launch costs.
extern "C" __global__ void nothing(const __grid_constant__ Nothing p) {}
