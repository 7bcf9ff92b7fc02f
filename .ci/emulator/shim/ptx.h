// What the source's section "PTX in small named functions" holds, played on the host: emulate.py puts this include in
// the section's place, inside the source's namespaces. A function added there needs a definition here.

__device__ __forceinline__ uint32_t shared_address(const void* object) { return ::emu::shared_address(object); }
__device__ __forceinline__ void* shared_pointer(uint32_t address) { return ::emu::shared_pointer(address); }

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists) {
  ::emu::copy_async(to, from, exists);
}
__device__ __forceinline__ void commit_copies() { ::emu::commit_copies(); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  static_assert(kPending >= 0, "PTX counts groups from 0");
  ::emu::wait_for_copies(kPending);
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  ::emu::load_matrices(to, 4, false, address);
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
  ::emu::load_matrices(to, 4, true, address);
}
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&from)[4]) {
  ::emu::store_matrices(from, 4, false, address);
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const uint32_t (&from)[4]) {
  ::emu::store_matrices(from, 4, true, address);
}

template <typename Element>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ::emu::mma(::emu::mma_kind<Element>(16), c, a, b0, b1);
}
template <typename Element>
__device__ __forceinline__ void mma_16x8x8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  const uint32_t a[4] = {a0, a1, 0, 0};
  ::emu::mma(::emu::mma_kind<Element>(8), c, a, b, 0);
}
__device__ __forceinline__ void mma_16x8x8_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  const uint32_t words[4] = {__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[2]), __float_as_uint(a[3])};
  ::emu::mma(::emu::kMmaTf32, c, words, __float_as_uint(b0), __float_as_uint(b1));
}

// ---- Hopper.
__device__ __forceinline__ void fence_for_wgmma() { ::emu::fail("wgmma is not emulated"); }
__device__ __forceinline__ void wgmma_fence() { ::emu::fail("wgmma is not emulated"); }
__device__ __forceinline__ void wgmma_commit() { ::emu::fail("wgmma is not emulated"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  ::emu::fail("wgmma is not emulated");
}
__device__ __forceinline__ void wgmma_hold(uint32_t (&)[4]) {}
__device__ __forceinline__ void wgmma_hold(float (&)[4]) {}
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t, uint32_t) { return 0; }
template <typename Element, bool kTransposed, int kN>
__device__ __forceinline__ void wgmma_64x16(float (&)[kN][4], const uint32_t (&)[4], uint64_t, int) {
  ::emu::fail("wgmma is not emulated");
}
template <typename Element>
__device__ __forceinline__ void wgmma_64x16(float (&)[4][4], uint64_t, uint64_t, int) {
  ::emu::fail("wgmma is not emulated");
}
