// Tests the source's PTX functions against plain loops, on the emulator or (emulate.py ptx --print) on a GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

namespace gated_delta {
namespace {

// ============================== PTX in small named functions ==================================

// ========================================= Kernels ============================================

constexpr int kRow = 24;  // elements from one row in shared memory to the next: a multiple of 8

// out (16, 8) = in_c + a (16, depth) b (depth, 8), all row after row; b's fragments through the transposed load. One warp.
template <typename Element, int kDepth>
__global__ void multiply(const Element* a, const Element* b, const float* in_c, float* out) {
  __shared__ __align__(16) Element a_rows[16 * kRow];
  __shared__ __align__(16) Element b_rows[16 * kRow];
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * kRow; i += 32) a_rows[i] = b_rows[i] = Element(0.0f);
  __syncthreads();
  for (int i = lane; i < 16 * kDepth; i += 32) a_rows[i / kDepth * kRow + i % kDepth] = a[i];
  for (int i = lane; i < kDepth * 8; i += 32) b_rows[i / 8 * kRow + i % 8] = b[i];
  __syncthreads();
  float c[4];
  for (int n = 0; n < 4; ++n) c[n] = in_c[(lane / 4 + n / 2 * 8) * 8 + 2 * (lane % 4) + n % 2];
  // Matrices of a: rows 0 and 8 of columns 0, then of columns 8. Of b: rows 0 and 8, twice.
  uint32_t a_words[4], b_words[4];
  load_matrices(a_words, shared_address(&a_rows[lane % 16 * kRow + lane / 16 * 8]));
  load_matrices_transposed(b_words, shared_address(&b_rows[lane % 16 * kRow + lane / 16 * 8]));
  if (kDepth == 16) {
    mma_16x8x16<Element>(c, a_words, b_words[0], b_words[1]);
  } else {
    mma_16x8x8<Element>(c, a_words[0], a_words[1], b_words[0]);
  }
  for (int n = 0; n < 4; ++n) out[(lane / 4 + n / 2 * 8) * 8 + 2 * (lane % 4) + n % 2] = c[n];
}

__global__ void multiply_tf32(const float* a, const float* b, const float* in_c, float* out) {
  const int lane = threadIdx.x, row = lane / 4, place = lane % 4;
  float c[4];
  for (int n = 0; n < 4; ++n) c[n] = in_c[(row + n / 2 * 8) * 8 + 2 * place + n % 2];
  const float* const at = a + row * 8 + place;
  const float a_words[4] = {at[0], at[64], at[4], at[68]};
  mma_16x8x8_tf32(c, a_words, b[place * 8 + row], b[(place + 4) * 8 + row]);
  for (int n = 0; n < 4; ++n) out[(row + n / 2 * 8) * 8 + 2 * place + n % 2] = c[n];
}

// Four 8 x 8 matrices from `in`, loaded and stored (before sm_90: loaded transposed); out has the transposed matrices, and
// out + 256 the words that the plain load gives lane 0 ... 31.
__global__ void transpose(const uint16_t* in, uint16_t* out) {
  __shared__ __align__(16) uint16_t from[4 * 64];
  __shared__ __align__(16) uint16_t to[4 * 64];
  const int lane = threadIdx.x;
  for (int i = lane; i < 4 * 64; i += 32) from[i] = in[i];
  __syncthreads();
  uint32_t words[4];
  load_matrices(words, shared_address(from + 8 * lane));
  for (int n = 0; n < 4; ++n) {
    out[256 + (4 * lane + n) * 2] = static_cast<uint16_t>(words[n]);
    out[256 + (4 * lane + n) * 2 + 1] = static_cast<uint16_t>(words[n] >> 16);
  }
#if __CUDA_ARCH__ >= 900
  store_matrices_transposed(shared_address(to + 8 * lane), words);
#else
  load_matrices_transposed(words, shared_address(from + 8 * lane));
  for (int n = 0; n < 4; ++n) {
    to[64 * n + lane / 4 * 8 + 2 * (lane % 4)] = static_cast<uint16_t>(words[n]);
    to[64 * n + lane / 4 * 8 + 2 * (lane % 4) + 1] = static_cast<uint16_t>(words[n] >> 16);
  }
#endif
  __syncthreads();
  for (int i = lane; i < 4 * 64; i += 32) out[i] = to[i];
}

// Bits of the faults that copy() can be given.
constexpr int kNoBarrier = 1, kNoWait = 2, kWaitTooShort = 4, kNoCommit = 8, kBarrierFirst = 16;

// Stages of 128 words through two buffers of dynamic shared memory to `out`, words from `rows` on as zeros. Each thread of
// 32 copies four words and passes on others' ones.
__global__ void copy(const uint32_t* in, uint32_t* out, int rows, int stages, int fault) {
  extern __shared__ __align__(16) unsigned char memory[];
  uint32_t* const words = reinterpret_cast<uint32_t*>(memory);
  const int thread = threadIdx.x;
  const auto start = [&](int stage) {
    const int row = stage * 128 + 4 * thread;
    const uint32_t to = shared_address(words + stage % 2 * 128 + 4 * thread);
    if (stage < stages) copy_async(to, in + (row < rows ? row : 0), row < rows);
    if (!(fault & kNoCommit)) commit_copies();
  };
  start(0);
  for (int stage = 0; stage < stages; ++stage) {
    start(stage + 1);
    if (fault & kBarrierFirst) __syncthreads();
    if (fault & kWaitTooShort) {
      wait_for_copies<2>();
    } else if (!(fault & kNoWait)) {
      wait_for_copies<1>();
    }
    if (!(fault & (kNoBarrier | kBarrierFirst))) __syncthreads();
    for (int i = thread; i < 128; i += 32) out[stage * 128 + i] = words[stage % 2 * 128 + i];
    __syncthreads();
  }
}

// Faults that multiply_wgmma() can be given.
enum Fault {
  kNone, kNoFenceForWgmma, kNoWgmmaFence, kNoBarrierBefore, kEarlyRead, kEarlyWrite, kAccumulatorWritten, kLeftWritten,
  kOperandWritten, kOperandTouched, kLateFence, kNeverWaits, kWarpStaysAway, kWarpsDiffer
};

// Place of an element in rows of 64 whose 16-byte chunks are permuted.
__device__ int permuted(int row, int column) { return row * 64 + (column / 8 ^ row % 8) * 8 + column % 8; }

// out (64, n) = [in_c +] a (64, depth) b (depth, n), all row after row, n = 8 kEights, by one warpgroup. kTransposed: b lies in
// shared memory as here, in panels of 64 columns; else its transpose does. kShared: a comes from shared memory too.
template <typename Element, int kEights, bool kTransposed, bool kShared>
__global__ void multiply_wgmma(const Element* a, const Element* b, const float* in_c, float* out, int fault) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int n = 8 * kEights, depth = kTransposed ? 32 : 64;
  __shared__ __align__(1024) Element left[64 * 64];
  __shared__ __align__(1024) Element right[128 * 64];
  const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4, place = lane % 4;
  for (int i = thread; i < 64 * depth; i += 128) left[permuted(i / depth, i % depth)] = a[i];
  for (int i = thread; i < depth * n; i += 128) {
    const int k = i / n, column = i % n;
    right[kTransposed ? column / 64 * depth * 64 + permuted(k, column % 64) : permuted(column, k)] = b[i];
  }
  float c[kEights][4];
  for (int i = 0; i < 4 * kEights; ++i) {
    c[i / 4][i % 4] = in_c == nullptr ? 1.0f : in_c[(row + i % 4 / 2 * 8) * n + i / 4 * 8 + 2 * place + i % 2];
  }
  uint32_t words[depth / 16][4];
  for (int i = 0; i < depth / 4; ++i) {
    memcpy(&words[i / 4][i % 4], a + (row + i % 2 * 8) * depth + i / 4 * 16 + i % 4 / 2 * 8 + 2 * place, 4);
  }
  if (fault != kNoFenceForWgmma && fault != kLateFence) fence_for_wgmma();
  if (fault != kNoBarrierBefore) __syncthreads();
  if (fault == kLateFence) fence_for_wgmma();
  for (int k = 0; k < depth / 16; ++k) wgmma_hold(words[k]);
  for (int i = 0; i < kEights; ++i) wgmma_hold(c[i]);
  if (fault != kNoWgmmaFence) wgmma_fence();
  const uint64_t a_matrix = wgmma_matrix(shared_address(left), 0);
  const uint64_t b_matrix = wgmma_matrix(shared_address(right), depth * 128);
  for (int k = 0; k < depth / 16; ++k) {
    const int add = in_c != nullptr || k > 0;
    if (fault == kWarpStaysAway && k == 1 && thread / 32 == 2) break;
    const uint64_t other = fault == kWarpsDiffer && k == 1 && thread / 32 == 2 ? 2 : 0;
    if constexpr (kTransposed) {
      wgmma_64x16<Element, true>(c, words[k], b_matrix + k * 2048 / 16 + other, add);
    } else if constexpr (kShared) {
      wgmma_64x16<Element>(c, a_matrix + k * 2, b_matrix + k * 2 + other, add);
    } else {
      wgmma_64x16<Element, false>(c, words[k], b_matrix + k * 2 + other, add);
    }
    if (k == 0) wgmma_commit();  // a group of one product, then one of the others
  }
  wgmma_commit();
  if (fault == kEarlyRead) wgmma_wait<1>();
  if (fault == kEarlyRead) out[row * n + 2 * place] = c[0][0];
  if (fault == kAccumulatorWritten) c[kEights - 1][0] = 0;
  if (fault == kLeftWritten) words[1][0] ^= 1;
  if (fault == kOperandWritten && thread == 7) right[0] = Element(5.0f);
  volatile uint16_t* const touched = reinterpret_cast<volatile uint16_t*>(right);
  if (fault == kOperandTouched && thread == 7) *touched = *touched;
  if (fault == kEarlyWrite && thread == 7) copy_async(shared_address(right), a, true);
  if (fault == kNeverWaits) return;
  wgmma_wait<0>();
  for (int k = 0; k < depth / 16; ++k) wgmma_hold(words[k]);
  for (int i = 0; i < kEights; ++i) wgmma_hold(c[i]);
  if (fault == kEarlyRead) return;
  for (int i = 0; i < 4 * kEights; ++i) out[(row + i % 4 / 2 * 8) * n + i / 4 * 8 + 2 * place + i % 2] = c[i / 4][i % 4];
#endif
}

__global__ void has_wgmma(int* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  out[0] = 1;
#else
  out[0] = 0;
#endif
}

#ifdef EMU_ARCH
// One kind of misuse.
__global__ void misuse(int what, const unsigned char* in, float* out) {
  extern __shared__ __align__(16) uint16_t halves[];
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < 512; i += blockDim.x) halves[i] = 0;
  if (what != 7) __syncthreads();
  uint32_t words[4] = {0, 0, 0, 0};
  const uint32_t address = shared_address(halves) + 16 * lane;
  if (what == 0) load_matrices(words, address + (lane == 5 ? 8 : 0));
  if (what == 1) load_matrices(words, address + (lane == 31 ? 1024 : 0));
  if (what == 2) lane == 3 ? load_matrices_transposed(words, address) : load_matrices(words, address);
  if (what == 3 && lane < 16) load_matrices(words, address);
  if (what == 4) copy_async(address + 4, in, true);
  if (what == 5) copy_async(address, in + 8, true);
  if (what == 6) copy_async(address + 1024, in, true);
  if (what == 7) load_matrices(words, address);  // no barrier after the writes
  if (what == 8) {
    copy_async(address, in, true);
    load_matrices(words, address);
  }
  if (what == 9) {
    load_matrices(words, address);
    halves[8 * lane] = 1;  // others read this row: no __syncwarp
  }
#if __CUDA_ARCH__ >= 900
  if (what == 10) {
    store_matrices_transposed(address, words);
    words[0] = halves[8 * lane];
  }
  if (what == 11) store_matrices_transposed(shared_address(halves) + 16 * (lane / 2), words);
#endif
  if (what == 12) copy_async(address, in + 1024, true);
  out[threadIdx.x] = static_cast<float>(words[0]);
}

#endif

// The last word of much dynamic shared memory.
__global__ void much(int bytes, uint32_t* out) {
  extern __shared__ __align__(16) unsigned char memory[];
  uint32_t* const last = static_cast<uint32_t*>(shared_pointer(shared_address(memory) + bytes - 4));
  *last = 7;
  out[0] = *last;
}

// ========================================== Tests =============================================

int bad = 0, done = 0;

void expect(bool good, const std::string& what) {
  ++done;
  if (good) return;
  ++bad;
  printf("FAIL %s\n", what.c_str());
}

uint64_t random_state = 12345;
float number() {  // -1 ... 1
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<float>(static_cast<int32_t>(random_state >> 32)) * 0x1p-31f;
}

// Memory of the GPU with a copy of `host`.
template <typename T>
struct Device {
  T* data = nullptr;
  size_t size;
  explicit Device(const std::vector<T>& host) : size(host.size()) {
    cudaMalloc(reinterpret_cast<void**>(&data), size * sizeof(T));
    cudaMemcpy(data, host.data(), size * sizeof(T), cudaMemcpyHostToDevice);
  }
  Device(const Device&) = delete;
  ~Device() { cudaFree(data); }
  std::vector<T> host() const {
    cudaDeviceSynchronize();
    std::vector<T> out(size);
    cudaMemcpy(out.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost);
    return out;
  }
};

// The first of the emulator's messages since the last call, empty without one; on a GPU an error of CUDA.
std::string message() {
  std::string text;
#ifdef EMU_ARCH
  if (!::emu::errors.empty()) text = ::emu::errors[0];
  ::emu::errors.clear();
  cudaGetLastError();
#else
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) text = cudaGetErrorString(error);
#endif
  return text;
}

float round_to(float x, __half*) { return __half2float(__float2half_rn(x)); }
float round_to(float x, __nv_bfloat16*) { return __bfloat162float(__float2bfloat16_rn(x)); }
__half element(float x, __half*) { return __float2half_rn(x); }
__nv_bfloat16 element(float x, __nv_bfloat16*) { return __float2bfloat16_rn(x); }

// a (m, depth) b (depth, n) + c.
void compare(const char* name, int depth, const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& c,
             const std::vector<float>& got, int m = 16, int n = 8, double bar = 4e-6) {
  double most = 0;
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = c[i * n + j];
      for (int k = 0; k < depth; ++k) sum += static_cast<double>(a[i * depth + k]) * b[k * n + j];
      const double error = std::fabs(sum - got[i * n + j]);
      most = error <= most ? most : error;
    }
  const std::string wrong = message();
  expect(wrong.empty(), std::string(name) + ": " + wrong);
  char text[120];
  snprintf(text, sizeof text, "%s depth %d: error %.1e", name, depth, most);
  expect(most < bar, text);
}

template <typename Element, int kDepth>
void test_multiply(const char* name) {
  std::vector<Element> a, b;
  std::vector<float> a_float, b_float, c;
  for (int i = 0; i < 16 * kDepth; ++i) {
    a_float.push_back(round_to(number(), static_cast<Element*>(nullptr)));
    a.push_back(element(a_float.back(), static_cast<Element*>(nullptr)));
  }
  for (int i = 0; i < 8 * kDepth; ++i) {
    b_float.push_back(round_to(number(), static_cast<Element*>(nullptr)));
    b.push_back(element(b_float.back(), static_cast<Element*>(nullptr)));
  }
  for (int i = 0; i < 128; ++i) c.push_back(number());
  Device<Element> a_device(a), b_device(b);
  Device<float> c_device(c), out(std::vector<float>(128));
  multiply<Element, kDepth><<<1, 32>>>(a_device.data, b_device.data, c_device.data, out.data);
  compare(name, kDepth, a_float, b_float, c, out.host());
}

template <typename Element, int kEights, bool kTransposed, bool kShared>
std::vector<float> run_wgmma(const char* name, bool adds, int fault) {
  constexpr int n = 8 * kEights, depth = kTransposed ? 32 : 64;
  std::vector<Element> a, b;
  std::vector<float> a_float, b_float, c;
  for (int i = 0; i < 64 * depth; ++i) {
    a_float.push_back(round_to(number(), static_cast<Element*>(nullptr)));
    a.push_back(element(a_float.back(), static_cast<Element*>(nullptr)));
  }
  for (int i = 0; i < depth * n; ++i) {
    b_float.push_back(round_to(number(), static_cast<Element*>(nullptr)));
    b.push_back(element(b_float.back(), static_cast<Element*>(nullptr)));
  }
  for (int i = 0; i < 64 * n; ++i) c.push_back(adds ? number() : 0.0f);
  Device<Element> a_device(a), b_device(b);
  Device<float> c_device(c), out(std::vector<float>(64 * n));
  multiply_wgmma<Element, kEights, kTransposed, kShared>
      <<<1, 128>>>(a_device.data, b_device.data, adds ? c_device.data : nullptr, out.data, fault);
  const std::vector<float> got = out.host();
  if (fault == kNone) compare(name, depth, a_float, b_float, c, got, 64, n, 2e-5);
  return got;
}

template <typename Element>
void test_wgmma(const char* name) {
  for (bool adds : {false, true}) {
    run_wgmma<Element, 2, false, false>(name, adds, kNone);
    run_wgmma<Element, 4, false, false>(name, adds, kNone);
    run_wgmma<Element, 8, false, false>(name, adds, kNone);
    run_wgmma<Element, 16, false, false>(name, adds, kNone);
    run_wgmma<Element, 4, true, false>(name, adds, kNone);
    run_wgmma<Element, 8, true, false>(name, adds, kNone);
    run_wgmma<Element, 16, true, false>(name, adds, kNone);
    run_wgmma<Element, 4, false, true>(name, adds, kNone);
  }
}

bool wgmma_exists() {
  Device<int> out(std::vector<int>(1));
  has_wgmma<<<1, 1>>>(out.data);
  return out.host()[0] == 1;
}

void test_tf32() {
  std::vector<float> a, b, c, a_seen, b_seen;
  const auto seen = [](float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    word &= 0xFFFFE000u;
    memcpy(&x, &word, 4);
    return x;
  };
  for (int i = 0; i < 128; ++i) a.push_back(number()), a_seen.push_back(seen(a.back()));
  for (int i = 0; i < 64; ++i) b.push_back(number()), b_seen.push_back(seen(b.back()));
  for (int i = 0; i < 128; ++i) c.push_back(number());
  Device<float> a_device(a), b_device(b), c_device(c), out(std::vector<float>(128));
  multiply_tf32<<<1, 32>>>(a_device.data, b_device.data, c_device.data, out.data);
  compare("tf32", 8, a_seen, b_seen, c, out.host());
}

void test_transpose() {
  std::vector<uint16_t> in;
  for (int i = 0; i < 256; ++i) in.push_back(static_cast<uint16_t>(1000 + 7 * i));
  Device<uint16_t> from(in), to(std::vector<uint16_t>(512));
  transpose<<<1, 32>>>(from.data, to.data);
  const std::vector<uint16_t> got = to.host();
  const std::string wrong = message();
  expect(wrong.empty(), "transpose: " + wrong);
  bool plain = true, transposed = true;
  for (int n = 0; n < 4; ++n)
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < 8; ++j) {
        transposed &= got[64 * n + 8 * i + j] == in[64 * n + 8 * j + i];
        const int lane = 4 * i + j / 2;
        plain &= got[256 + (4 * lane + n) * 2 + j % 2] == in[64 * n + 8 * i + j];
      }
  expect(plain, "load_matrices");
  expect(transposed, "transposed matrices");
}

struct Copied {
  bool right;
  bool poisoned;  // the third stage, whose buffer has had the first
  std::string message;
};

Copied run_copy(int rows, int stages, int fault) {
  std::vector<uint32_t> in;
  for (int i = 0; i < rows; ++i) in.push_back(0x10000u + i);
  Device<uint32_t> from(in), to(std::vector<uint32_t>(128 * stages, 0xABABABABu));
  copy<<<1, 32, 1024>>>(from.data, to.data, rows, stages, fault);
  const std::vector<uint32_t> got = to.host();
  Copied result{true, true, message()};
  for (int i = 256; i < 384; ++i) result.poisoned &= got[i] == ~0u;
  for (int i = 0; i < 128 * stages; ++i) result.right &= got[i] == (i < rows ? in[i] : 0u);
  return result;
}

#ifdef EMU_ARCH
bool holds(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void test_wgmma_faults() {
  const bool race = ::emu::race_build;
  struct Case {
    int fault;
    const char* part;
    bool race_only;
  };
  const Case cases[] = {
      {kNoFenceForWgmma, "what fence_for_wgmma didn't follow", true},
      {kLateFence, "what fence_for_wgmma didn't follow", true},
      {kNoWgmmaFence, "no wgmma.fence", false},
      {kNoBarrierBefore, "race check: read", true},
      {kEarlyWrite, "cp.async to where a wgmma under way reads", false},
      {kAccumulatorWritten, "an accumulator was written", false},
      {kLeftWritten, "a register of a changed", false},
      {kOperandWritten, race ? "write where a wgmma under way reads" : "an operand in shared memory changed", false},
      {kOperandTouched, "write where a wgmma under way reads", true},
      {kNeverWaits, "exits while its warp's wgmma is under way", false},
      {kWarpStaysAway, "wgmma", false},
      {kWarpsDiffer, "the warps of a warpgroup issue different ones", false},
  };
  for (const Case& c : cases) {
    if (c.race_only && !race) continue;
    run_wgmma<__half, 8, false, false>("", true, c.fault);
    const std::string found = message();
    expect(holds(found, c.part), "wgmma fault " + std::to_string(c.fault) + " expects '" + c.part + "', found '" + found + "'");
  }
  const std::vector<float> early = run_wgmma<__half, 8, false, false>("", true, kEarlyRead);
  message();
  expect(early[0] != early[0], "an accumulator read before the wait is NaN");
}

void test_faults() {
  const bool race = ::emu::race_build;
  if (race) {  // found whatever the schedule
    expect(holds(run_copy(512, 4, kNoBarrier).message, "race check: read"), "a missing barrier is a race");
    expect(holds(run_copy(512, 4, kBarrierFirst).message, "race check: read"), "a barrier before the wait is a race");
    expect(holds(run_copy(512, 4, kNoWait).message, "copy is under way"), "a missing wait is a race");
    expect(holds(run_copy(512, 4, kWaitTooShort).message, "copy is under way"), "a short wait is a race");
    expect(holds(run_copy(512, 4, kNoCommit).message, "copy is under way"), "a missing commit is a race");
  } else {  // the poison
    expect(run_copy(512, 4, kNoWait).poisoned, "a missing wait leaves poison");
    expect(run_copy(512, 4, kWaitTooShort).poisoned, "a short wait leaves poison");
    expect(run_copy(512, 4, kNoCommit).poisoned, "a missing commit leaves poison");
  }
  struct Misuse {
    int what;
    const char* part;
    bool race_only;
  };
  const Misuse cases[] = {
      {0, "lane 5: address", false},
      {1, "outside the block's shared memory", false},
      {2, "different collectives", false},
      {3, "exited", false},
      {4, "in shared memory is not a multiple of 16", false},
      {5, "in global memory is not a multiple of 16", false},
      {6, "outside the block's shared memory", false},
      {7, "read after write", true},
      {8, "copy is under way", false},
      {9, "write after read", true},
      {10, "read after write", true},
      {11, "write after write", true},
      {12, "stray read", true},
  };
  for (const Misuse& c : cases) {
    if ((c.race_only && !race) || (EMU_ARCH < 900 && (c.what == 10 || c.what == 11))) continue;
    Device<unsigned char> in(std::vector<unsigned char>(1024));
    Device<float> out(std::vector<float>(32));
    misuse<<<1, 32, 1024>>>(c.what, in.data, out.data);
    const std::string found = message();
    expect(holds(found, c.part), "misuse " + std::to_string(c.what) + " expects '" + c.part + "', found '" + found + "'");
  }
}
#endif

void test_much_memory() {
  int most = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  Device<uint32_t> out(std::vector<uint32_t>(1));
#ifdef EMU_ARCH
  static bool asked = false;
  if (!asked) {
    much<<<1, 1, 49152 + 16>>>(49152 + 16, out.data);
    expect(holds(message(), "invalid launch"), "more than 48 KiB without cudaFuncSetAttribute");
  }
  asked = true;
  expect(cudaFuncSetAttribute(much, cudaFuncAttributeMaxDynamicSharedMemorySize, most + 16) != cudaSuccess, "too much memory");
#endif
  expect(cudaFuncSetAttribute(much, cudaFuncAttributeMaxDynamicSharedMemorySize, most) == cudaSuccess, "cudaFuncSetAttribute");
  much<<<1, 1, most>>>(most, out.data);
  const std::vector<uint32_t> got = out.host();
  const std::string wrong = message();
  expect(wrong.empty() && got[0] == 7, "all the shared memory of a block: " + wrong);
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, much, 32, most);
  expect(blocks == 1, "one block with all the memory");
}

void test() {
  test_multiply<__half, 16>("float16");
  test_multiply<__half, 8>("float16");
  test_multiply<__nv_bfloat16, 16>("bfloat16");
  test_multiply<__nv_bfloat16, 8>("bfloat16");
  test_tf32();
  test_transpose();
  for (int rows : {512, 500, 4}) {
    const Copied copied = run_copy(rows, 4, 0);
    expect(copied.message.empty() && copied.right, "copy of " + std::to_string(rows) + " words: " + copied.message);
  }
  test_much_memory();
  if (wgmma_exists()) {
    test_wgmma<__half>("wgmma float16");
    test_wgmma<__nv_bfloat16>("wgmma bfloat16");
  }
}

}  // namespace
}  // namespace gated_delta

int main() {
#ifdef EMU_ARCH
  for (int schedule = 0; schedule < 5; ++schedule) {
    ::emu::order = schedule == 0 ? ::emu::kForward : schedule == 1 ? ::emu::kReverse : ::emu::kRandom;
    ::emu::seed = schedule;
    gated_delta::test();
    gated_delta::test_faults();
    if (gated_delta::wgmma_exists()) gated_delta::test_wgmma_faults();
  }
#else
  gated_delta::test();
#endif
  printf("ptx: %d of %d checks failed%s\n", gated_delta::bad, gated_delta::done,
         gated_delta::wgmma_exists() ? "" : " (without wgmma, which needs code for sm_90a)");
  return gated_delta::bad != 0;
}
