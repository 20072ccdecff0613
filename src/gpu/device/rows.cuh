// Copies of rows in vectors of 16 bytes: read once, written to several places. Needs platform.cuh.

// What is written for somebody else: not kept longer than needed.
DEVICE void store16_streaming(void* at, Vec16 v) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    __builtin_nontemporal_store(__builtin_bit_cast(Native, v), (Native*)at);
#else
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory");
#endif
}

// What is written for somebody else, past the first-level cache.
DEVICE void store16_once(void* at, Vec16 v) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    __builtin_nontemporal_store(__builtin_bit_cast(Native, v), (Native*)at);
#else
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory");
#endif
}

// What is read once and by nobody after: past the first-level cache, first to leave the second.
DEVICE Vec16 load16_streaming(const void* at) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    return __builtin_bit_cast(Vec16, __builtin_nontemporal_load((const Native*)at));
#else
    Vec16 v;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(at) : "memory");
    return v;
#endif
}

// What an earlier kernel wrote.
DEVICE Vec16 load16(const void* at) {
#if PLATFORM_AMD
    return *(const Vec16*)at;
#else
    Vec16 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(at) : "memory");
    return v;
#endif
}

// The same, past the first-level cache.
DEVICE Vec16 load16_once(const void* at) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    return __builtin_bit_cast(Vec16, __builtin_nontemporal_load((const Native*)at));
#else
    Vec16 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(at) : "memory");
    return v;
#endif
}

DEVICE void store16(void* at, Vec16 v) {
#if PLATFORM_AMD
    *(Vec16*)at = v;
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory");
#endif
}
