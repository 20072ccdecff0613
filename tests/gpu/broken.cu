// Does not compile: two errors, far apart.
extern "C" __global__ void broken(const unsigned *in) {
    unknown_type value = in[0];
}
static __device__ void other() {
    undeclared_function(1);
}
