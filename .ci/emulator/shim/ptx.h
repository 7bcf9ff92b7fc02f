// What the source's section "PTX in small named functions" holds, played on the host: emulate.py puts this include in
// the section's place, inside the source's namespaces. A function added there needs a definition here.

__device__ __forceinline__ uint32_t shared_address(const void* object) { return ::emu::shared_address(object); }
__device__ __forceinline__ void* shared_pointer(uint32_t address) { return ::emu::shared_pointer(address); }

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists) {
  ::emu::copy_async(to, from, exists);
}
__device__ __forceinline__ void commit_copies() { ::emu::commit_copies(); }
__device__ __forceinline__ void let_next_launch_begin() {}
__device__ __forceinline__ void wait_for_last_launch() {}

__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) ::emu::fail("prefetch of bytes that aren't aligned");
}
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

// Row l / 4 of the transposed matrix is column l / 4 of the lanes' own.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t from) {
  const int row = threadIdx.x % 32 / 4;
  const int column = threadIdx.x % 4 * 2;
  const uint32_t first = __shfl_sync(~0u, from, column * 4 + row / 2);
  const uint32_t second = __shfl_sync(~0u, from, (column + 1) * 4 + row / 2);
  const int shift = row % 2 * 16;
  return (first >> shift & 0xffffu) | (second >> shift) << 16;
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
__device__ __forceinline__ void fence_for_wgmma() { ::emu::fence_for_wgmma(); }
__device__ __forceinline__ void wgmma_fence() { ::emu::wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit() { ::emu::wgmma_commit(); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  static_assert(kPending >= 0, "PTX counts groups from 0");
  ::emu::wgmma_wait(kPending);
}
// The compiler must not know what is in them, and keep them alive.
__device__ __forceinline__ void wgmma_hold(uint32_t (&a)[4]) { asm volatile("" ::"r"(&a) : "memory"); }
__device__ __forceinline__ void wgmma_hold(float (&d)[4]) { asm volatile("" ::"r"(&d) : "memory"); }
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address, uint32_t panel) {
  return (uint64_t{1} << 62) | (uint64_t{1024 / 16} << 32) | (static_cast<uint64_t>(panel / 16) << 16) |
         ((address & 0x3ffff) / 16);
}
template <typename Element, bool kTransposed, int kEights>
__device__ __forceinline__ void wgmma_64x16(float (&d)[kEights][4], const uint32_t (&a)[4], uint64_t b, int add) {
  static_assert(kEights == 2 || kEights == 4 || kEights == 8 || kEights == 16, "the source has no other");
  constexpr bool kHalf = ::emu::mma_kind<Element>(16) == ::emu::kMmaHalf16;
  ::emu::wgmma({kHalf, 8 * kEights, kTransposed, d[0], a, 0, b, add});
}
template <typename Element>
__device__ __forceinline__ void wgmma_64x16(float (&d)[4][4], uint64_t a, uint64_t b, int add) {
  constexpr bool kHalf = ::emu::mma_kind<Element>(16) == ::emu::kMmaHalf16;
  ::emu::wgmma({kHalf, 32, false, d[0], nullptr, a, b, add});
}
