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

// a (16, depth) b (depth, 8) + c.
void compare(const char* name, int depth, const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& c,
             const std::vector<float>& got) {
  double most = 0;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      double sum = c[i * 8 + j];
      for (int k = 0; k < depth; ++k) sum += static_cast<double>(a[i * depth + k]) * b[k * 8 + j];
      const double error = std::fabs(sum - got[i * 8 + j]);
      most = error <= most ? most : error;
    }
  const std::string wrong = message();
  expect(wrong.empty(), std::string(name) + ": " + wrong);
  char text[120];
  snprintf(text, sizeof text, "%s depth %d: error %.1e", name, depth, most);
  expect(most < 4e-6, text);
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
  }
#else
  gated_delta::test();
#endif
  printf("ptx: %d of %d checks failed\n", gated_delta::bad, gated_delta::done);
  return gated_delta::bad != 0;
}
