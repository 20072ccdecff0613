// Streaming access to memory: for what is read once, or written and not read soon. After platform.cuh.
//
// 16 bytes at a 16-byte boundary in global memory. First to leave the caches, so that what others need stays.

DEVICE Vec16 load_streaming(const Vec16* at) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    return __builtin_bit_cast(Vec16, __builtin_nontemporal_load((const Native*)at));
#else
    uint4 v = __ldcs((const uint4*)at);
    return Vec16{{v.x, v.y, v.z, v.w}};
#endif
}

DEVICE void store_streaming(Vec16* at, Vec16 v) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    __builtin_nontemporal_store(__builtin_bit_cast(Native, v), (Native*)at);
#else
    __stcs((uint4*)at, make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
#endif
}
