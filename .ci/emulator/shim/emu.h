// Host-side stand-in for the CUDA runtime: every thread of a block is a fiber. See ../README.md.
#pragma once
// CUDA's own headers serve as plain C++ for __half, __nv_bfloat16, float4, dim3, cudaError_t, enums.
#include <cuda_runtime_api.h>
#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#undef __restrict__
#undef __cluster_dims__
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __restrict__
#define __shared__ static_assert(false, "emulate.py did not rewrite this __shared__");

namespace emu {

enum Kind : uint32_t {
  kNone, kShfl, kShflUp, kShflDown, kShflXor, kSyncwarp, kBallot, kAny, kAll, kReduceAdd, kBarrier,
  // Tensor cores: all lanes of a warp.
  kLoadMatrices, kLoadMatricesTransposed, kStoreMatrices, kStoreMatricesTransposed,
  kMmaHalf16, kMmaHalf8, kMmaBFloat16, kMmaBFloat8, kMmaTf32,
  // Likewise, and of the four warps of a warpgroup in the same order.
  kWgmmaFence, kWgmma, kWgmmaCommit, kWgmmaWait
};
enum Order : int { kForward, kReverse, kRandom };

struct Fiber {
  uint3 thread{};
  int index = 0;  // in the block
  // What it waits for.
  Kind kind = kNone;
  uint32_t mask = 0;
  int argument = 0, width = 0, bytes = 0;
  uint64_t value = 0, result = 0;
  const void* operands = nullptr;  // of a kind of the tensor cores
  // Its stack.
  void* sp = nullptr;
  char* stack = nullptr;
  void* fake = nullptr;
};

extern Fiber* self;  // the running thread, null on the host
extern uint3 block_index;
extern dim3 block_dim, grid_dim;
extern unsigned char* dynamic_shared_memory;

uint64_t collective(Kind kind, uint32_t mask, uint64_t value, int argument, int width, int bytes);
void barrier();

// PTX. Addresses in shared memory are 32-bit numbers that only these functions understand.
uint32_t shared_address(const void* object);
void* shared_pointer(uint32_t address);
void copy_async(uint32_t to, const void* from, bool exists);  // 16 bytes
void commit_copies();
void wait_for_copies(int pending);
void load_matrices(uint32_t* to, int matrices, bool transposed, uint32_t address);
void store_matrices(const uint32_t* from, int matrices, bool transposed, uint32_t address);
void mma(Kind kind, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <class Element>
constexpr Kind mma_kind(int depth) {
  static_assert(std::is_same<Element, __half>::value || std::is_same<Element, __nv_bfloat16>::value, "a 16-bit float");
  return std::is_same<Element, __half>::value ? (depth == 16 ? kMmaHalf16 : kMmaHalf8)
                                              : (depth == 16 ? kMmaBFloat16 : kMmaBFloat8);
}


struct Wgmma {
  bool is_half;  // float16, else bfloat16
  int columns;
  bool transposed;    // b, with its columns in a row
  float* d;           // the lane's columns / 2 numbers
  const uint32_t* a;  // the lane's four words; null: a_matrix
  uint64_t a_matrix, b_matrix;
  int add;
};
void wgmma(const Wgmma& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
void fence_for_wgmma();

[[noreturn]] void fail(const std::string& message);  // ends the launch

// Settings, and what the driver reads.
extern Order order;
extern uint64_t seed;
extern int processors;
extern int arch;  // the chip: 900 for sm_90
extern bool exact;  // code for this very chip: sm_90a
#ifdef EMU_ARCH
static const int set_arch [[maybe_unused]] = arch = EMU_ARCH;
#endif
#ifdef EMU_ARCH_FEAT_SM90_ALL
static const bool set_exact [[maybe_unused]] = exact = true;
#endif
size_t most_shared_per_processor();
inline size_t most_shared_per_block() { return most_shared_per_processor() - 1024; }
extern std::vector<std::string> errors;  // of the emulator: deadlocks, races, strays
struct Counts { uint64_t launches, blocks, threads, switches, collectives, barriers, accesses, products; };
extern Counts counts;
extern std::vector<std::string> launched;  // one line per launch when `trace` is set
extern bool trace;
void track(const void* data, size_t bytes, const char* name);  // race build: an operand in global memory
void untrack(const void* data);
void untrack_all();
extern const bool race_build;

struct Config { dim3 grid, block; size_t shared; cudaStream_t stream; };
inline Config config(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr) {
  return {grid, block, shared, stream};
}
// cudaLaunchConfig_t, whose names are macros here.
struct LaunchConfig { dim3 grid, block; size_t dynamicSmemBytes; cudaStream_t stream; const void* attrs; unsigned numAttrs; };
void launch(const Config& config, const char* name, const char* full_name, const void* function,
            void (*call)(void*), void* context);

template <class Body, class... Args>
void run(const Config& config, const char* name, const void* function, const Body& body, Args... args) {
  const auto thunk = [&] { body(args...); };
  using Thunk = decltype(thunk);
  launch(config, name, __PRETTY_FUNCTION__, function, [](void* c) { (*static_cast<Thunk*>(c))(); },
         const_cast<void*>(static_cast<const void*>(&thunk)));
}

template <class F>
const void* address(F* function) { return reinterpret_cast<const void*>(function); }

inline void* dynamic_shared() { return dynamic_shared_memory; }
void* static_shared(int id, size_t bytes);

template <class T>
uint64_t bits(T x) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves up to 8 bytes");
  uint64_t word = 0;
  memcpy(&word, &x, sizeof(T));
  return word;
}
template <class T>
T unbits(uint64_t word) {
  T x;
  memcpy(&x, &word, sizeof(T));
  return x;
}
}  // namespace emu

#define threadIdx (::emu::self->thread)
#define blockIdx (::emu::block_index)
#define blockDim (::emu::block_dim)
#define gridDim (::emu::grid_dim)
#define warpSize 32

inline void __syncthreads() { ::emu::barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { ::emu::collective(::emu::kSyncwarp, mask, 0, 0, 32, 0); }
template <class T> T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  return ::emu::unbits<T>(::emu::collective(::emu::kShfl, mask, ::emu::bits(x), lane, width, sizeof(T)));
}
template <class T> T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32) {
  return ::emu::unbits<T>(::emu::collective(::emu::kShflUp, mask, ::emu::bits(x), delta, width, sizeof(T)));
}
template <class T> T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32) {
  return ::emu::unbits<T>(::emu::collective(::emu::kShflDown, mask, ::emu::bits(x), delta, width, sizeof(T)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32) {
  return ::emu::unbits<T>(::emu::collective(::emu::kShflXor, mask, ::emu::bits(x), lanes, width, sizeof(T)));
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return static_cast<unsigned>(::emu::collective(::emu::kBallot, mask, p != 0, 0, 32, 4));
}
inline int __any_sync(unsigned mask, int p) { return static_cast<int>(::emu::collective(::emu::kAny, mask, p != 0, 0, 32, 4)); }
inline int __all_sync(unsigned mask, int p) { return static_cast<int>(::emu::collective(::emu::kAll, mask, p != 0, 0, 32, 4)); }
inline unsigned __reduce_add_sync(unsigned mask, unsigned x) {
  return static_cast<unsigned>(::emu::collective(::emu::kReduceAdd, mask, x, 0, 32, 4));
}
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T x) { *p = x; }
template <class T> void __stcg(T* p, T x) { *p = x; }
template <class T> __attribute__((no_sanitize("thread"), noinline)) T atomicAdd(T* p, T x) {
  const T old = *p;
  *p = old + x;
  return old;
}
[[noreturn]] inline void __trap() {
  std::fprintf(stderr, "emu: a kernel trapped\n");
  std::abort();
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
// Byte n of the result is the one of a (0 to 3) and b (4 to 7) that the selector's nibble n names.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  unsigned result = 0;
  for (int n = 0; n < 4; ++n) result |= static_cast<unsigned>(bytes >> (selector >> 4 * n & 7) * 8 & 0xff) << 8 * n;
  return result;
}
inline float __fmul_rz(float a, float b) { const double x = static_cast<double>(a) * b; float y = static_cast<float>(x); if (std::fabs(static_cast<double>(y)) > std::fabs(x)) y = std::nextafter(y, 0.0f); return y; }
inline float __expf(float x) { return expf(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __uint_as_float(unsigned x) { return ::emu::unbits<float>(x); }
inline float __int_as_float(int x) { return ::emu::unbits<float>(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(::emu::bits(x)); }
inline int __float_as_int(float x) { return static_cast<int>(::emu::bits(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(b) < static_cast<C>(a) ? static_cast<C>(b) : static_cast<C>(a);
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

// The runtime's own functions are declared in cuda_runtime_api.h and defined in emu.cpp.
cudaError_t emu_set_attribute(const void* function, cudaFuncAttribute attribute, int value);
template <class F> cudaError_t cudaFuncSetAttribute(F* function, cudaFuncAttribute attribute, int value) {
  return emu_set_attribute(reinterpret_cast<const void*>(function), attribute, value);
}
// Enough for a launcher that asks how many blocks fit.
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F*, int threads, size_t shared) {
  const size_t by_threads = 2048 / std::max(threads, 1), by_shared = emu::most_shared_per_processor() / (shared + 1024);
  *blocks = static_cast<int>(std::min<size_t>(std::min<size_t>(by_threads, by_shared), 32));
  return cudaSuccess;
}
