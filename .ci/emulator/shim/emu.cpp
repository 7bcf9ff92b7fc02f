// The emulator's run time: fibers, scheduler, collectives, launch, race check.
#include "emu.h"

#include <pthread.h>
#include <sys/mman.h>

#include <array>
#include <deque>
#include <list>
#include <map>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMU_ASAN 1
#else
#define EMU_ASAN 0
#endif

#ifdef EMU_RACE
#define EMU_RACE_BUILD true
#else
#define EMU_RACE_BUILD false
#endif

extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");

namespace emu {

Fiber* self = nullptr;
uint3 block_index{};
dim3 block_dim, grid_dim;
unsigned char* dynamic_shared_memory = nullptr;
Order order = kForward;
uint64_t seed = 1;
int processors = 132;
int arch = 900;
bool exact = false;
std::vector<std::string> errors;
Counts counts{};
std::vector<std::string> launched;
bool trace = false;
const bool race_build = EMU_RACE_BUILD;

namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kStack = EMU_ASAN ? 512 * 1024 : 128 * 1024;  // lazily committed
constexpr size_t kPage = 4096;
constexpr size_t kStaticShared = 48 * 1024;

Fiber fibers[kMaxThreads];
int fibers_made = 0;
Fiber host;  // sp and stack of the host side
[[maybe_unused]] size_t host_stack_size = 0;
void (*kernel_call)(void*) = nullptr;
void* kernel_context = nullptr;
const char* kernel_name = "";
cudaError_t last_error = cudaSuccess;
bool aborted = false;
std::map<const void*, int> shared_limits;

// Of the running block.
int threads = 0, warps = 0;
uint32_t ready[32], live[32];
uint32_t ready_warps = 0;
int warp_now = 0, alive = 0, at_barrier = 0;
uint64_t launch_number = 0, block_number = 0;
uint32_t barrier_epoch = 0, warp_epoch[32];
uint32_t fences[kMaxThreads];                 // calls of fence_for_wgmma
uint32_t fences_before_barrier[kMaxThreads];  // up to the last __syncthreads
size_t dynamic_shared_bytes = 0;
// Addresses in shared memory: dynamic, then static memory, all below 256 KiB as wgmma needs it.
constexpr uint32_t kDynamicBase = 1024;
uint32_t static_base = 0;
int shared_limit = 0;  // 48 KiB, or all that a block may have if the kernel asked
alignas(128) unsigned char static_arena[kStaticShared];
std::map<int, std::pair<size_t, size_t>> static_offsets;
size_t static_used = 0;

uint64_t rng_state = 88172645463325252ull;
inline uint64_t rng() {
  rng_state ^= rng_state << 13;
  rng_state ^= rng_state >> 7;
  return rng_state ^= rng_state << 17;
}

inline int pick_bit(uint32_t set) {
  if (order == kForward) return __builtin_ctz(set);
  if (order == kReverse) return 31 - __builtin_clz(set);
  const int turn = rng() >> 40 & 31;
  return (__builtin_ctz(set >> turn | set << ((32 - turn) & 31)) + turn) & 31;
}

void switch_to(Fiber* from, Fiber* to, bool host_side) {
  ++counts.switches;
  self = host_side ? nullptr : to;
#if EMU_ASAN
  __sanitizer_start_switch_fiber(&from->fake, to->stack, host_side ? host_stack_size : kStack);
#endif
  emu_switch(&from->sp, to->sp);
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(from->fake, nullptr, nullptr);
#endif
}

std::string where() {
  if (self == nullptr) return "on the host";
  char text[300];
  snprintf(text, sizeof text, "%s, block (%u, %u, %u) of (%u, %u, %u), thread %d (warp %d lane %d)", kernel_name,
           block_index.x, block_index.y, block_index.z, grid_dim.x, grid_dim.y, grid_dim.z, self->index,
           self->index / 32, self->index % 32);
  return text;
}

void note(const std::string& message) {
  if (errors.size() < 20) errors.push_back(message + " [" + where() + "]");
}

const char* name_of(Kind kind) {
  static const char* const names[] = {"running", "shfl", "shfl_up", "shfl_down", "shfl_xor", "syncwarp", "ballot",
                                      "any", "all", "reduce_add", "syncthreads", "ldmatrix", "ldmatrix.trans", "stmatrix",
                                      "stmatrix.trans", "mma m16n8k16 f16", "mma m16n8k8 f16", "mma m16n8k16 bf16",
                                      "mma m16n8k8 bf16", "mma m16n8k8 tf32", "wgmma.fence", "wgmma.mma_async",
                                      "wgmma.commit_group", "wgmma.wait_group"};
  return names[kind];
}

[[noreturn]] void deadlock() {
  std::string text = "deadlock: threads wait for others that never come:";
  int shown = 0;
  for (int i = 0; i < threads && shown < 12; ++i) {
    const bool first = i == 0 || fibers[i].kind != fibers[i - 1].kind || fibers[i].mask != fibers[i - 1].mask ||
                       (live[i / 32] >> i % 32 & 1) != (live[(i - 1) / 32] >> (i - 1) % 32 & 1);
    if (!first) continue;
    char part[80];
    if (live[i / 32] >> i % 32 & 1) {
      snprintf(part, sizeof part, " from %d: %s mask %08x;", i, name_of(fibers[i].kind), fibers[i].mask);
    } else {
      snprintf(part, sizeof part, " from %d: exited;", i);
    }
    text += part;
    ++shown;
  }
  fail(text);
}

// Gives the processor to the next thread that can run; comes back when the caller is picked again.
void schedule(Fiber* from) {
  if (order == kRandom && ready_warps != 0 && (rng() >> 33 & 15) == 0) warp_now = pick_bit(ready_warps);
  if (ready[warp_now] == 0) {
    if (ready_warps == 0) {
      if (alive == 0) {
        switch_to(from, &host, true);
        return;
      }
      deadlock();
    }
    warp_now = pick_bit(ready_warps);
  }
  Fiber* const next = &fibers[warp_now * 32 + pick_bit(ready[warp_now])];
  if (next == from) {
    self = from;
    return;
  }
  switch_to(from, next, false);
}

void forget_copies();
void forget_wgmmas();
void end_wgmmas();
bool wgmmas_under_way(int warp);
bool play_tensor_core(Kind kind, Fiber* lanes, int warp);

inline void block_on(int index) {
  const int warp = index / 32;
  ready[warp] &= ~(1u << index % 32);
  if (ready[warp] == 0) ready_warps &= ~(1u << warp);
}

void fiber_main() {
  Fiber* me = self;
#if EMU_ASAN
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (host_stack_size == 0) {
    host.stack = static_cast<char*>(const_cast<void*>(bottom));
    host_stack_size = size;
  }
#endif
  for (;;) {
    kernel_call(kernel_context);
    me = self;
    const int warp = me->index / 32;
    live[warp] &= ~(1u << me->index % 32);
    --alive;
    if (wgmmas_under_way(warp)) fail("a thread exits while its warp's wgmma is under way");
    block_on(me->index);
    if (at_barrier > 0) fail("a thread exits while others wait at __syncthreads");
    schedule(me);
  }
}

void make_fiber(Fiber* fiber, int index) {
  if (fiber->stack == nullptr) {
    void* memory = mmap(nullptr, kStack + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    mprotect(memory, kPage, PROT_NONE);
    fiber->stack = static_cast<char*>(memory) + kPage;
  }
#if EMU_ASAN
  __asan_unpoison_memory_region(fiber->stack, kStack);
#endif
  fiber->index = index;
  fiber->fake = nullptr;
  void** top = reinterpret_cast<void**>(fiber->stack + kStack);
  *--top = nullptr;  // leaves the stack aligned as after a call
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber->sp = top;
}

void run_block() {
  barrier_epoch = 0;
  at_barrier = 0;
  alive = threads;
  ready_warps = 0;
  memset(warp_epoch, 0, sizeof warp_epoch);
  for (int w = 0; w < warps; ++w) {
    const int lanes = std::min(32, threads - 32 * w);
    ready[w] = live[w] = lanes == 32 ? ~0u : (1u << lanes) - 1;
    ready_warps |= 1u << w;
  }
  for (int i = 0; i < threads; ++i) fibers[i].kind = kNone;
  memset(dynamic_shared_memory, 0xFF, dynamic_shared_bytes);
  memset(static_arena, 0xFF, static_used);
  static_offsets.clear();
  static_used = 0;
  forget_copies();
  forget_wgmmas();
  ++block_number;
  ++counts.blocks;
  counts.threads += threads;
  warp_now = pick_bit(ready_warps);
  Fiber* const first = &fibers[warp_now * 32 + pick_bit(ready[warp_now])];
  switch_to(&host, first, false);
}

}  // namespace

void fail(const std::string& message) {
  note(message);
  if (self == nullptr) abort();
  aborted = true;
  Fiber* me = self;
  switch_to(me, &host, true);
  abort();  // never resumed
}

void barrier() {
  Fiber* const me = self;
  if (alive != threads) fail("__syncthreads after some threads have exited");
  ++counts.barriers;
  me->kind = kBarrier;
  if (++at_barrier == alive) {
    at_barrier = 0;
    ++barrier_epoch;
    if (race_build) memcpy(fences_before_barrier, fences, threads * sizeof fences[0]);
    for (int w = 0; w < warps; ++w) ready[w] = live[w];
    ready_warps = warps == 32 ? ~0u : (1u << warps) - 1;
    for (int i = 0; i < threads; ++i) fibers[i].kind = kNone;
    warp_now = pick_bit(ready_warps);
  } else {
    block_on(me->index);
  }
  schedule(me);
}

uint64_t collective(Kind kind, uint32_t mask, uint64_t value, int argument, int width, int bytes) {
  Fiber* const me = self;
  const int warp = me->index / 32;
  const int lane = me->index % 32;
  ++counts.collectives;
  const int lanes_here = std::min(32, threads - 32 * warp);
  if (lanes_here < 32) mask &= (1u << lanes_here) - 1;
  if (!(mask >> lane & 1)) fail(std::string(name_of(kind)) + ": the mask lacks the calling lane");
  if ((mask & live[warp]) != mask) fail(std::string(name_of(kind)) + ": the mask names lanes that have exited");
  me->kind = kind;
  me->mask = mask;
  me->value = value;
  me->argument = argument;
  me->width = width;
  me->bytes = bytes;
  block_on(me->index);
  if ((mask & ready[warp]) == 0) {  // the last to arrive does the exchange
    Fiber* const lanes = &fibers[warp * 32];
    bool barrier_first = false;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const Fiber& other = lanes[__builtin_ctz(rest)];
      if (other.kind == kBarrier) {
        barrier_first = true;
        break;
      }
      if (other.kind != kind || other.mask != mask || other.bytes != bytes || other.width != width) {
        char text[200];
        snprintf(text, sizeof text, "lanes of a warp meet in different collectives: lane %d %s mask %08x %d bytes, "
                 "lane %d %s mask %08x %d bytes", lane, name_of(kind), mask, bytes, __builtin_ctz(rest),
                 name_of(other.kind), other.mask, other.bytes);
        fail(text);
      }
    }
    if (barrier_first) fail("some lanes of a warp wait at __syncthreads, others in a warp collective");
    if (kind > kBarrier && !play_tensor_core(kind, lanes, warp)) {
      schedule(me);  // another warp wakes this one
      return me->result;
    }
    uint64_t whole = 0;
    if (kind >= kBallot && kind < kBarrier) {
      bool any = false, all = true;
      uint64_t sum = 0, ballot = 0;
      for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        any |= lanes[l].value != 0;
        all &= lanes[l].value != 0;
        sum += lanes[l].value;
        if (lanes[l].value != 0) ballot |= 1ull << l;
      }
      whole = kind == kBallot ? ballot : kind == kAny ? any : kind == kAll ? all : sum;
    }
    for (uint32_t rest = kind > kBarrier ? 0 : mask; rest != 0; rest &= rest - 1) {
      const int l = __builtin_ctz(rest);
      Fiber& to = lanes[l];
      const int base = l / width * width;
      int source = l;
      switch (kind) {
        case kShfl:
          source = base + (to.argument & (width - 1));
          break;
        case kShflUp:
          source = l - to.argument >= base ? l - to.argument : l;
          break;
        case kShflDown:
          source = l + to.argument < base + width ? l + to.argument : l;
          break;
        case kShflXor:
          source = (l ^ to.argument) < base + width ? l ^ to.argument : l;
          break;
        default:
          break;
      }
      if (kind < kSyncwarp && (source < 0 || source > 31)) fail("a shuffle from outside the warp");
      to.result = kind >= kBallot ? whole : mask >> source & 1 ? lanes[source].value : ~0ull;
    }
    if (kind == kSyncwarp && mask == live[warp]) ++warp_epoch[warp];
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) lanes[__builtin_ctz(rest)].kind = kNone;
    ready[warp] |= mask;
    ready_warps |= 1u << warp;
  }
  schedule(me);
  return me->result;
}

void* static_shared(int id, size_t bytes) {
  auto [place, added] = static_offsets.try_emplace(id, 0, bytes);
  if (added) {
    const size_t offset = (static_used + 127) / 128 * 128;
    if (offset + bytes > kStaticShared) fail("static shared memory beyond 48 KiB");
    if (offset + bytes + dynamic_shared_bytes > std::max(shared_limit, 48 * 1024))
      fail("static and dynamic shared memory together beyond the limit");
    place->second.first = offset;
    memset(static_arena + static_used, 0xFF, offset + bytes - static_used);
    static_used = offset + bytes;
  }
  return static_arena + place->second.first;
}

size_t most_shared_per_processor() {
  if (arch < 800) return 65536;
  if (arch == 800 || arch == 870) return 167936;
  return arch < 900 || arch >= 1200 ? 102400 : 233472;
}

void begin_race_launch();

void launch(const Config& config, const char* name, const char* full_name, const void* function,
            void (*call)(void*), void* context) {
  const dim3 grid = config.grid, block = config.block;
  const uint64_t count = static_cast<uint64_t>(block.x) * block.y * block.z;
  auto limit = shared_limits.find(function);
  const size_t most = limit == shared_limits.end() ? 48 * 1024 : limit->second;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || count == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535 || count > kMaxThreads || block.z > 64 || config.shared > most) {
    char text[300];
    snprintf(text, sizeof text, "invalid launch of %s: grid (%u, %u, %u), block (%u, %u, %u), %zu bytes of shared memory",
             name, grid.x, grid.y, grid.z, block.x, block.y, block.z, config.shared);
    note(text);
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (self != nullptr) abort();
  ++launch_number;
  ++counts.launches;
  kernel_call = call;
  kernel_context = context;
  kernel_name = name;
  grid_dim = grid;
  block_dim = block;
  threads = static_cast<int>(count);
  warps = (threads + 31) / 32;
  dynamic_shared_bytes = config.shared;
  static_base = static_cast<uint32_t>(kDynamicBase + (config.shared + 1023) / 1024 * 1024);
  shared_limit = static_cast<int>(limit == shared_limits.end() ? 48 * 1024 : most_shared_per_block());
  dynamic_shared_memory = static_cast<unsigned char*>(aligned_alloc(1024, (config.shared + 1023) / 1024 * 1024 + 1024));
#if EMU_ASAN
  __asan_poison_memory_region(dynamic_shared_memory + config.shared, (config.shared + 1023) / 1024 * 1024 + 1024 - config.shared);
#endif
  if (trace) {
    char text[200];
    snprintf(text, sizeof text, "grid (%u, %u, %u) block %u shared %zu ", grid.x, grid.y, grid.z, threads, config.shared);
    const char* with = strstr(full_name, "[with");
    launched.push_back(std::string(text) + name + " " + (with ? with : full_name));
  }
  rng_state = seed * 0x9E3779B97F4A7C15ull + launch_number * 0xD1B54A32D192ED03ull + 1;
  for (int i = 0; i < 8; ++i) rng();
  for (; fibers_made < threads; ++fibers_made) make_fiber(&fibers[fibers_made], fibers_made);
  for (int i = 0; i < threads; ++i) {
    const unsigned u = i;
    fibers[i].thread = {u % block.x, u / block.x % block.y, u / (block.x * block.y)};
  }
  begin_race_launch();
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  std::vector<uint64_t> places(blocks);
  for (uint64_t i = 0; i < blocks; ++i) places[i] = order == kReverse ? blocks - 1 - i : i;
  if (order == kRandom) {
    for (uint64_t i = blocks; i > 1; --i) std::swap(places[i - 1], places[rng() % i]);
  }
  aborted = false;
  for (uint64_t place : places) {
    block_index = {static_cast<unsigned>(place % grid.x), static_cast<unsigned>(place / grid.x % grid.y),
                   static_cast<unsigned>(place / grid.x / grid.y)};
    run_block();
    if (aborted) {
      for (int i = 0; i < fibers_made; ++i) make_fiber(&fibers[i], i);
      last_error = cudaErrorLaunchFailure;
      break;
    }
    end_wgmmas();
  }
#if EMU_ASAN
  __asan_unpoison_memory_region(dynamic_shared_memory, (config.shared + 1023) / 1024 * 1024 + 1024);
#endif
  free(dynamic_shared_memory);
  dynamic_shared_memory = nullptr;
}

// ---- Race check: the build that defines EMU_RACE compiles the kernels with -fsanitize=thread and links
// these hooks instead of libtsan. Two accesses to a cell (2 bytes) by two threads, one of them a write, race
// unless a __syncthreads (same block) or a full-warp __syncwarp (same warp) lies between. Shuffles order no memory.

struct Access {
  uint64_t launch = 0, block = 0;  // block ~0: several
  uint32_t epoch = 0, warp_step = 0;
  uint32_t fence = 0;  // of a write: the thread's calls of fence_for_wgmma before
  int16_t warp = 0, lane = 0;  // -1: several
};
struct Cell {
  Access write, read;
};
struct Region {
  uintptr_t begin, end;
  std::string name;
  std::vector<Cell> cells;
};
namespace {
std::vector<Region> regions;
size_t last_region = 0;
Region shared_region{0, 0, "dynamic shared memory", {}};
Region static_region{0, 0, "static shared memory", {}};
uintptr_t main_low = 0, main_high = 0;
extern "C" char __executable_start, end;
}  // namespace

void track(const void* data, size_t bytes, const char* name) {
  if (!race_build) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  regions.push_back({begin, begin + bytes, name, std::vector<Cell>(bytes / 2 + 2)});
}
void untrack(const void* data) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  regions.erase(std::remove_if(regions.begin(), regions.end(), [&](const Region& r) { return r.begin == begin; }), regions.end());
  last_region = 0;
}
void untrack_all() {
  regions.clear();
  last_region = 0;
}

void begin_race_launch() {
  if (!race_build) return;
  shared_region.begin = reinterpret_cast<uintptr_t>(dynamic_shared_memory);
  shared_region.end = shared_region.begin + dynamic_shared_bytes;
  shared_region.cells.assign(dynamic_shared_bytes / 2 + 2, Cell{});
  static_region.begin = reinterpret_cast<uintptr_t>(static_arena);
  static_region.end = static_region.begin + kStaticShared;
  static_region.cells.assign(kStaticShared / 2 + 2, Cell{});
  if (main_low == 0) {
    pthread_attr_t attributes;
    void* low;
    size_t size;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &low, &size);
    pthread_attr_destroy(&attributes);
    main_low = reinterpret_cast<uintptr_t>(low);
    main_high = main_low + size;
  }
}

// Copies under way to each 16 bytes of shared memory.
namespace {
uint8_t copies_to[256 * 1024 / 16];
int copies_under_way = 0;
uint16_t wgmmas_from[256 * 1024 / 16];  // likewise of wgmma that read them, counted for each warp
int wgmmas_reading = 0;
bool whole_warp = false;  // a collective of the tensor cores accesses memory
bool for_wgmma = false;

const void* at_address(uint32_t address) {
  return address >= static_base ? static_arena + (address - static_base) : dynamic_shared_memory + (address - kDynamicBase);
}
}  // namespace

#ifdef EMU_RACE
namespace {
// Has the thread that wrote, or each of its warp, called fence_for_wgmma since? In another warp: before the last barrier.
bool has_fenced(const Access& write) {
  const uint32_t* const now = write.warp == self->index / 32 ? fences : fences_before_barrier;
  for (int lane = std::max<int>(write.lane, 0); lane < (write.lane < 0 ? 32 : write.lane + 1); ++lane)
    if (now[32 * write.warp + lane] <= write.fence) return false;
  return true;
}

void check(Region& region, uintptr_t at, size_t bytes, bool write, bool shared) {
  const int16_t warp = self->index / 32, lane = whole_warp ? -1 : self->index % 32;
  const Access now{launch_number, block_number, barrier_epoch, warp_epoch[warp], fences[self->index], warp, lane};
  const auto clash = [&](const Access& before) {
    if (before.launch != now.launch) return false;
    if (before.block != now.block) return !shared;
    if (before.epoch != now.epoch) return false;
    if (before.warp != warp) return true;
    return before.warp_step == now.warp_step && (before.lane != lane || lane < 0);
  };
  for (uintptr_t a = at & ~1ull; a < at + bytes; a += 2) {
    Cell& cell = region.cells[(a - (region.begin & ~1ull)) / 2];
    const char* what = nullptr;
    const Access* before = &cell.write;
    if (clash(cell.write)) what = write ? "write after write" : "read after write";
    if (write && what == nullptr && clash(cell.read)) {
      what = "write after read";
      before = &cell.read;
    }
    if (what == nullptr && shared && !write && (cell.write.launch != now.launch || cell.write.block != now.block)) {
      what = "read of a word that this block has not written";
    }
    if (what == nullptr && for_wgmma && !has_fenced(cell.write)) what = "wgmma reads what fence_for_wgmma didn't follow";
    const uint32_t row = ((&region == &shared_region ? kDynamicBase : static_base) + (a - region.begin)) / 16;
    if (copies_under_way > 0 && shared && copies_to[row] > 0) {
      what = write ? "write where an asynchronous copy is under way" : "read where an asynchronous copy is under way";
    }
    if (wgmmas_reading > 0 && shared && write && wgmmas_from[row] > 0) what = "write where a wgmma under way reads";
    if (what != nullptr && errors.size() < 20) {
      char text[300];
      snprintf(text, sizeof text, "race check: %s, byte %zu of %s; the other access: %s block, warp %d lane %d, barrier epoch %u, now %u",
               what, static_cast<size_t>(a - region.begin), region.name.c_str(),
               before->block == now.block ? "same" : "other", before->warp, before->lane, before->epoch, now.epoch);
      note(text);
    }
    if (write) {
      cell.write = now;
    } else if (cell.read.launch != now.launch) {
      cell.read = now;
    } else if (cell.read.block != now.block) {
      if (shared) {
        cell.read = now;
      } else {
        cell.read = now;
        cell.read.block = ~0ull;
      }
    } else if (cell.read.epoch != now.epoch) {
      cell.read = now;
    } else if (cell.read.warp != warp) {
      cell.read.warp = -1;
    } else if (cell.read.warp_step != now.warp_step) {
      cell.read = now;
    } else if (cell.read.lane != lane) {
      cell.read.lane = -1;
    }
    if (what != nullptr) return;
  }
}

void access(const void* pointer, size_t bytes, bool write) {
  if (self == nullptr || bytes == 0) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t stack = reinterpret_cast<uintptr_t>(self->stack);
  if (at - stack < kStack) return;
  ++counts.accesses;
  if (at >= shared_region.begin && at < shared_region.end && at + bytes <= shared_region.end)
    return check(shared_region, at, bytes, write, true);
  if (at >= static_region.begin && at + bytes <= static_region.end) return check(static_region, at, bytes, write, true);
  const size_t n = regions.size();
  for (size_t i = 0, r = last_region; i < n; ++i, r = r + 1 == n ? 0 : r + 1) {
    if (at >= regions[r].begin && at + bytes <= regions[r].end) {
      last_region = r;
      return check(regions[r], at, bytes, write, false);
    }
  }
  if (at >= reinterpret_cast<uintptr_t>(&__executable_start) && at < reinterpret_cast<uintptr_t>(&end)) return;
  if (at >= main_low && at < main_high && !write) return;  // the kernel's arguments
  if (n == 0) return;
  char text[200];
  snprintf(text, sizeof text, "stray %s of %zu bytes at %p: in no operand, shared memory or own stack", write ? "write" : "read",
           bytes, pointer);
  fail(text);
}
}  // namespace

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, size_t n) { access(p, n, false); }
void __tsan_write_range(void* p, size_t n) { access(p, n, true); }
#define HOOKS(N)                                                        \
  void __tsan_read##N(void* p) { access(p, N, false); }                 \
  void __tsan_write##N(void* p) { access(p, N, true); }                 \
  void __tsan_unaligned_read##N(void* p) { access(p, N, false); }       \
  void __tsan_unaligned_write##N(void* p) { access(p, N, true); }       \
  void __tsan_volatile_read##N(void* p) { access(p, N, false); }        \
  void __tsan_volatile_write##N(void* p) { access(p, N, true); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void* __tsan_memcpy(void* to, const void* from, size_t n) { access(from, n, false); access(to, n, true); return memcpy(to, from, n); }
void* __tsan_memset(void* to, int x, size_t n) { access(to, n, true); return memset(to, x, n); }
}
#endif

// ---- PTX: asynchronous copies, matrices, tensor cores.

namespace {

void touch([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes, [[maybe_unused]] bool write) {
#ifdef EMU_RACE
  access(data, bytes, write);
#endif
}

std::string hex(uint64_t x) {
  char text[40];
  snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(x));
  return text;
}

void need(int least, const char* what) {
  if (arch < least) fail(std::string(what) + " on sm_" + std::to_string(arch / 10));
}

// 16 bytes of the block's shared memory.
unsigned char* row_at(uint32_t address, const char* what, int lane) {
  const auto bad = [&](const char* how) {
    fail(std::string(what) + ": lane " + std::to_string(lane) + ": address " + hex(address) + how);
  };
  if (address % 16 != 0) bad(" in shared memory is not a multiple of 16");
  const bool is_static = address >= static_base && address + 16ull <= static_base + static_used;
  const bool is_dynamic = address >= kDynamicBase && address + 16ull <= kDynamicBase + dynamic_shared_bytes;
  if (!is_static && !is_dynamic) bad(" is outside the block's shared memory");
  return static_cast<unsigned char*>(const_cast<void*>(at_address(address)));
}

struct Copy {
  uint32_t to, group;
  const void* from;  // null: zeros
  unsigned char data[16];
};
struct Copies {
  std::vector<Copy> list;
  uint32_t groups = 0;  // closed ones
} copies[kMaxThreads];

void forget_copies() {
  for (int i = 0; i < fibers_made; ++i) {
    copies[i].list.clear();
    copies[i].groups = 0;
  }
  if (copies_under_way > 0) memset(copies_to, 0, sizeof copies_to);
  copies_under_way = 0;
}

struct Matrices {
  uint32_t address;
  uint32_t* words;
  int count;
};

void move_matrices(Kind kind, Fiber* lanes) {
  const bool load = kind == kLoadMatrices || kind == kLoadMatricesTransposed;
  const bool transposed = kind == kLoadMatricesTransposed || kind == kStoreMatricesTransposed;
  const auto of = [&](int lane) -> const Matrices& { return *static_cast<const Matrices*>(lanes[lane].operands); };
  whole_warp = true;
  for (int n = 0; n < of(0).count; ++n) {
    unsigned char* rows[8];
    uint16_t matrix[8][8];
    for (int r = 0; r < 8; ++r) {
      const uint32_t address = of(8 * n + r).address;
      rows[r] = row_at(address, name_of(kind), 8 * n + r);
      if (copies_to[address / 16] > 0)
        fail(std::string(name_of(kind)) + " where an asynchronous copy is under way, lane " + std::to_string(8 * n + r) + "'s row");
      if (!load && wgmmas_from[address / 16] > 0) fail(std::string(name_of(kind)) + " where a wgmma under way reads");
      touch(rows[r], 16, !load);
      if (load) memcpy(matrix[r], rows[r], 16);
    }
    for (int l = 0; l < 32; ++l) {
      uint32_t& word = of(l).words[n];
      const int i = l / 4, j = 2 * (l % 4);
      uint16_t& low = transposed ? matrix[j][i] : matrix[i][j];
      uint16_t& high = transposed ? matrix[j + 1][i] : matrix[i][j + 1];
      if (load) {
        word = low | static_cast<uint32_t>(high) << 16;
      } else {
        low = static_cast<uint16_t>(word);
        high = static_cast<uint16_t>(word >> 16);
      }
    }
    if (!load)
      for (int r = 0; r < 8; ++r) memcpy(rows[r], matrix[r], 16);
  }
  whole_warp = false;
}

struct Mma {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

float half_of(uint16_t word) {
  static const std::vector<float> table = [] {
    std::vector<float> t(65536);
    for (int i = 0; i < 65536; ++i) {
      const uint16_t word = static_cast<uint16_t>(i);
      __half x;
      memcpy(static_cast<void*>(&x), &word, 2);
      t[i] = __half2float(x);
    }
    return t;
  }();
  return table[word];
}

// Products are exact, sums those of float64, rounded to float32 once.
void multiply(Kind kind, Fiber* lanes) {
  const int depth = kind == kMmaHalf16 || kind == kMmaBFloat16 ? 16 : 8;
  const auto value = [&](uint32_t word, int half) {
    const uint32_t bits = half ? word >> 16 : word & 0xFFFF;
    return kind == kMmaHalf16 || kind == kMmaHalf8 ? half_of(static_cast<uint16_t>(bits)) : unbits<float>(bits << 16);
  };
  double a[16][16], b[16][8], c[16][8];
  for (int l = 0; l < 32; ++l) {
    const Mma& x = *static_cast<const Mma*>(lanes[l].operands);
    const int row = l / 4, place = l % 4;
    for (int n = 0; n < 4; ++n) c[row + n / 2 * 8][2 * place + n % 2] = x.c[n];
    if (kind == kMmaTf32) {
      for (int n = 0; n < 4; ++n) a[row + n % 2 * 8][place + n / 2 * 4] = unbits<float>(x.a[n] & ~0x1FFFu);
      for (int n = 0; n < 2; ++n) b[place + n * 4][row] = unbits<float>(x.b[n] & ~0x1FFFu);
    } else {
      for (int n = 0; n < depth / 4; ++n)
        for (int half = 0; half < 2; ++half) a[row + n % 2 * 8][2 * place + half + n / 2 * 8] = value(x.a[n], half);
      for (int n = 0; n < depth / 8; ++n)
        for (int half = 0; half < 2; ++half) b[2 * place + half + n * 8][row] = value(x.b[n], half);
    }
  }
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < depth; ++k)
      for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
  for (int l = 0; l < 32; ++l) {
    const Mma& x = *static_cast<const Mma*>(lanes[l].operands);
    for (int n = 0; n < 4; ++n) x.c[n] = static_cast<float>(c[l / 4 + n / 2 * 8][2 * (l % 4) + n % 2]);
  }
}

// ---- wgmma. Each warp computes its 16 rows when it waits for them. From the issue to that wait its accumulators are
// NaN, and nobody may write them, a's registers, or a and b in shared memory.

struct Accumulators {
  std::array<float*, 32> at;  // by lane
  int words;                  // of a lane
  int products;               // under way
  std::vector<float> values;  // lane after lane
};

struct Product {
  Wgmma x;
  int64_t group;
  size_t place;  // in the warpgroup's order
  std::list<Accumulators>::iterator into;
  std::array<const uint32_t*, 32> a_at;
  uint32_t a[32][4];
  std::vector<std::array<uint16_t, 8>> rows[2];  // of a and b, 16 bytes each, as at the issue
};

struct WarpProducts {
  std::deque<Product> list;
  std::list<Accumulators> accumulators;
  int64_t groups = 0;  // closed ones
  size_t issued = 0;
  bool fenced = false;
  bool waits = false;
  int pending = 0;
} wgmmas[kMaxThreads / 32];

using Step = std::array<uint64_t, 4>;
std::vector<Step> wgmma_order[kMaxThreads / 128];  // what each warp of a warpgroup has to issue

bool wgmmas_under_way(int warp) { return !wgmmas[warp].list.empty(); }

void forget_wgmmas() {
  for (auto& order : wgmma_order) order.clear();
  for (WarpProducts& warp : wgmmas) {
    if (warp.issued > 0 || warp.groups > 0 || warp.fenced || !warp.accumulators.empty()) warp = WarpProducts();
  }
  if (wgmmas_reading > 0) memset(wgmmas_from, 0, sizeof wgmmas_from);
  wgmmas_reading = 0;
}

void end_wgmmas() {
  for (int w = 0; w < warps; ++w) {
    if (wgmmas[w].issued != wgmma_order[w / 4].size()) note("wgmma: the warps of a warpgroup issue different numbers of them");
  }
}

// A matrix of 16-byte chunks: address of one of them.
struct Matrix {
  uint32_t start, leading, stride;
  explicit Matrix(uint64_t bits)
      : start(static_cast<uint32_t>(bits & 0x3FFF) * 16), leading(static_cast<uint32_t>(bits >> 16 & 0x3FFF) * 16),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3FFF) * 16) {
    if (bits >> 62 != 1) fail("wgmma: matrix " + hex(bits) + ": only rows of 128 permuted bytes are emulated");
    if ((bits & 0x3FFF'C000'C000'C000ull) != 0) fail("wgmma: matrix " + hex(bits) + " has bits of no meaning");
  }
  static uint32_t permuted(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
  // 16 elements in a row; or, transposed, rows of 64 in panels.
  uint32_t at(int row, int chunk, bool transposed) const {
    const uint32_t panel = transposed ? chunk / 8 * leading : 0;
    return permuted(start + panel + row / 8 * stride + row % 8 * 128 + chunk % 8 * 16);
  }
};

// Calls `visit` with what the warp reads of a (0) or b (1), 16 bytes after 16 bytes.
template <class Visit>
void read_matrix(const Wgmma& x, int which, int warp, const Visit& visit) {
  if (which == 0 && x.a != nullptr) return;
  const Matrix matrix(which == 0 ? x.a_matrix : x.b_matrix);
  const bool transposed = which == 1 && x.transposed;
  const int first = which == 0 ? warp % 4 * 16 : 0;
  const int rows = which == 0 || transposed ? 16 : x.columns, chunks = transposed ? x.columns / 8 : 2;
  whole_warp = for_wgmma = true;
  for (int row = 0; row < rows; ++row)
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t address = matrix.at(first + row, chunk, transposed);
      const unsigned char* const data = row_at(address, name_of(kWgmma), 0);
      touch(data, 16, false);
      std::array<uint16_t, 8> bytes;
      memcpy(&bytes, data, 16);
      visit(address, bytes);
    }
  whole_warp = for_wgmma = false;
}

void enter_order(int warp, const Step& step) {
  std::vector<Step>& order = wgmma_order[warp / 4];
  const size_t place = wgmmas[warp].issued++;
  if (place == order.size()) {
    order.push_back(step);
  } else if (order[place] != step) {
    fail("wgmma: the warps of a warpgroup issue different ones");
  }
}

constexpr uint32_t kPoison = ~0u;

bool is_poisoned(const Accumulators& x) {
  for (int l = 0; l < 32; ++l)
    for (int n = 0; n < x.words; ++n)
      if (bits(x.at[l][n]) != kPoison) return false;
  return true;
}

void issue_wgmma(Fiber* lanes, int warp) {
  const auto of = [&](int lane) -> const Wgmma& { return *static_cast<const Wgmma*>(lanes[lane].operands); };
  WarpProducts& mine = wgmmas[warp];
  const Wgmma& x = of(0);
  if (!mine.fenced) fail("wgmma.mma_async: no wgmma.fence since the warp's last wait");
  for (int l = 1; l < 32; ++l)
    if (of(l).a_matrix != x.a_matrix || of(l).b_matrix != x.b_matrix || (of(l).add != 0) != (x.add != 0))
      fail("wgmma.mma_async: the lanes of a warp differ");
  Product product{x, mine.groups, mine.issued, {}, {}, {}, {}};
  const uint64_t kind = static_cast<uint64_t>(x.columns) << 8 | x.is_half << 3 | x.transposed << 2 | (x.a != nullptr) << 1 | (x.add != 0);
  enter_order(warp, {1, kind, x.a_matrix, x.b_matrix});
  auto into = mine.accumulators.begin();
  const int words = x.columns / 2;
  for (; into != mine.accumulators.end(); ++into) {
    if (into->at[0] == x.d && into->words == words) break;
    if (x.d < into->at[0] + into->words && into->at[0] < x.d + words) fail("wgmma.mma_async: accumulators under way overlap");
  }
  if (into == mine.accumulators.end()) {
    into = mine.accumulators.insert(into, Accumulators{{}, words, 0, std::vector<float>(32 * words)});
    for (int l = 0; l < 32; ++l) {
      into->at[l] = of(l).d;
      memcpy(&into->values[l * words], into->at[l], words * sizeof(float));
      memset(into->at[l], 0xFF, words * sizeof(float));
    }
  } else if (!is_poisoned(*into)) {
    fail("wgmma.mma_async: an accumulator was written while the product before was under way");
  }
  ++into->products;
  product.into = into;
  for (int l = 0; l < 32; ++l) {
    product.a_at[l] = of(l).a;
    if (x.a != nullptr) memcpy(product.a[l], of(l).a, 16);
  }
  for (int which = 0; which < 2; ++which) {
    read_matrix(x, which, warp, [&](uint32_t address, const std::array<uint16_t, 8>& bytes) {
      if (copies_to[address / 16] > 0) fail("wgmma.mma_async where an asynchronous copy is under way");
      ++wgmmas_from[address / 16];
      ++wgmmas_reading;
      product.rows[which].push_back(bytes);
    });
  }
  mine.list.push_back(std::move(product));
}

void finish_wgmma(const Product& product, int warp) {
  const Wgmma& x = product.x;
  for (int which = 0; which < 2; ++which) {
    size_t n = 0;
    read_matrix(x, which, warp, [&](uint32_t address, const std::array<uint16_t, 8>& bytes) {
      if (bytes != product.rows[which][n++]) fail("wgmma: an operand in shared memory changed before the wait");
      --wgmmas_from[address / 16];
      --wgmmas_reading;
    });
  }
  const auto value = [&](uint32_t bits) { return x.is_half ? half_of(static_cast<uint16_t>(bits)) : unbits<float>(bits << 16); };
  static double a[16][16], b[16][256], c[16][256];
  const auto& b_rows = product.rows[1];
  for (size_t n = 0; n < b_rows.size(); ++n)
    for (size_t e = 0; e < 8; ++e) {
      const size_t chunks = x.transposed ? x.columns / 8 : 2;
      const size_t row = n / chunks, column = n % chunks * 8 + e;
      (x.transposed ? b[row][column] : b[column][row]) = value(b_rows[n][e]);
    }
  for (size_t n = 0; n < product.rows[0].size(); ++n)
    for (size_t e = 0; e < 8; ++e) a[n / 2][n % 2 * 8 + e] = value(product.rows[0][n][e]);
  Accumulators& into = *product.into;
  for (int l = 0; l < 32; ++l) {
    const int row = l / 4, place = l % 4;
    if (x.a != nullptr) {
      if (memcmp(product.a[l], product.a_at[l], 16) != 0) fail("wgmma: a register of a changed before the wait");
      for (int n = 0; n < 4; ++n)
        for (int half = 0; half < 2; ++half)
          a[row + n % 2 * 8][2 * place + half + n / 2 * 8] = value(half ? product.a[l][n] >> 16 : product.a[l][n] & 0xFFFF);
    }
    for (int n = 0; n < into.words; ++n)
      c[row + n % 4 / 2 * 8][n / 4 * 8 + 2 * place + n % 2] = x.add ? into.values[l * into.words + n] : 0;
  }
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < x.columns; ++j) c[i][j] += a[i][k] * b[k][j];
  for (int l = 0; l < 32; ++l)
    for (int n = 0; n < into.words; ++n)
      into.values[l * into.words + n] = static_cast<float>(c[l / 4 + n % 4 / 2 * 8][n / 4 * 8 + 2 * (l % 4) + n % 2]);
  if (--into.products > 0) return;
  if (!is_poisoned(into)) fail("wgmma: an accumulator was written before the wait");
  for (int l = 0; l < 32; ++l) memcpy(into.at[l], &into.values[l * into.words], into.words * sizeof(float));
  wgmmas[warp].accumulators.erase(product.into);
}

// Lets a warp past its wait once all four warps have issued what it waits for.
bool finish_wait(int warp) {
  WarpProducts& mine = wgmmas[warp];
  const auto done = [&](const Product& x) { return x.group < mine.groups - mine.pending; };
  for (const Product& product : mine.list) {
    if (!done(product)) break;
    for (int w = warp / 4 * 4; w < warp / 4 * 4 + 4; ++w)
      if (wgmmas[w].issued <= product.place) return false;
  }
  Fiber* const caller = self;
  self = &fibers[32 * warp];
  while (!mine.list.empty() && done(mine.list.front())) {
    finish_wgmma(mine.list.front(), warp);
    mine.list.pop_front();
  }
  self = caller;
  mine.fenced = false;
  return true;
}

// False: the warp has to wait.
bool play_wgmma(Kind kind, Fiber* lanes, int warp) {
  WarpProducts& mine = wgmmas[warp];
  if (kind == kWgmmaFence) mine.fenced = true;
  if (kind == kWgmmaCommit) {
    enter_order(warp, {2, 0, 0, 0});
    ++mine.groups;
  }
  if (kind == kWgmmaWait) {
    mine.pending = *static_cast<const int*>(lanes[0].operands);
    mine.waits = !finish_wait(warp);
    return !mine.waits;
  }
  if (kind == kWgmma) {
    ++counts.products;
    issue_wgmma(lanes, warp);
    for (int w = warp / 4 * 4; w < warp / 4 * 4 + 4; ++w) {
      if (!wgmmas[w].waits || !finish_wait(w)) continue;
      wgmmas[w].waits = false;
      for (int l = 0; l < 32; ++l) fibers[32 * w + l].kind = kNone;
      ready[w] = ~0u;
      ready_warps |= 1u << w;
    }
  }
  return true;
}

// False: the warp has to wait for others.
bool play_tensor_core(Kind kind, Fiber* lanes, int warp) {
  if (kind >= kWgmmaFence) return play_wgmma(kind, lanes, warp);
  if (kind >= kMmaHalf16) {
    ++counts.products;
    multiply(kind, lanes);
  } else {
    move_matrices(kind, lanes);
  }
  return true;
}

void meet(Kind kind, int count, const void* operands) {
  if (self->index / 32 * 32 + 32 > threads) fail(std::string(name_of(kind)) + " in a warp of fewer than 32 lanes");
  self->operands = operands;
  collective(kind, ~0u, 0, 0, 32, 4 * count);
}

}  // namespace

uint32_t shared_address(const void* object) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(object);
  const uintptr_t in_static = at - reinterpret_cast<uintptr_t>(static_arena);
  const uintptr_t in_dynamic = at - reinterpret_cast<uintptr_t>(dynamic_shared_memory);
  if (in_dynamic <= dynamic_shared_bytes) return kDynamicBase + static_cast<uint32_t>(in_dynamic);
  if (in_static <= static_used) return static_base + static_cast<uint32_t>(in_static);
  fail("shared_address of an object outside the block's shared memory");
}

void* shared_pointer(uint32_t address) {
  const bool is_static = address >= static_base && address <= static_base + static_used;
  const bool is_dynamic = address >= kDynamicBase && address <= kDynamicBase + dynamic_shared_bytes;
  if (!is_static && !is_dynamic) fail("shared_pointer: address " + hex(address) + " is outside the block's shared memory");
  return const_cast<void*>(at_address(address));
}

// The destination is poisoned until the bytes arrive, at the wait.
void copy_async(uint32_t to, const void* from, bool exists) {
  need(800, "cp.async");
  unsigned char* const row = row_at(to, "cp.async", self->index % 32);
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("cp.async: the address in global memory is not a multiple of 16");
  if (wgmmas_from[to / 16] > 0) fail("cp.async to where a wgmma under way reads");
  touch(row, 16, true);
  Copies& mine = copies[self->index];
  Copy copy{to, mine.groups, exists ? from : nullptr, {}};
  if (exists) {
    touch(from, 16, false);
    memcpy(copy.data, from, 16);
  }
  memset(row, 0xFF, 16);
  mine.list.push_back(copy);
  ++copies_to[to / 16];
  ++copies_under_way;
}

void commit_copies() {
  need(800, "cp.async");
  ++copies[self->index].groups;
}

void wait_for_copies(int pending) {
  need(800, "cp.async");
  Copies& mine = copies[self->index];
  size_t arrived = 0;
  for (; arrived < mine.list.size(); ++arrived) {
    const Copy& copy = mine.list[arrived];
    if (static_cast<int64_t>(copy.group) >= static_cast<int64_t>(mine.groups) - pending) break;
    --copies_to[copy.to / 16];
    --copies_under_way;
    unsigned char* const row = row_at(copy.to, "cp.async", self->index % 32);
    touch(row, 16, true);
    if (copy.from != nullptr && memcmp(copy.from, copy.data, 16) != 0) fail("cp.async: the source changed before the copy's wait");
    if (copies_to[copy.to / 16] == 0) memcpy(row, copy.data, 16);  // else another copy's poison stays
  }
  mine.list.erase(mine.list.begin(), mine.list.begin() + arrived);
}

void load_matrices(uint32_t* to, int count, bool transposed, uint32_t address) {
  const Matrices matrices{address, to, count};
  meet(transposed ? kLoadMatricesTransposed : kLoadMatrices, count, &matrices);
}

void store_matrices(const uint32_t* from, int count, bool transposed, uint32_t address) {
  need(900, "stmatrix");
  const Matrices matrices{address, const_cast<uint32_t*>(from), count};
  meet(transposed ? kStoreMatricesTransposed : kStoreMatrices, count, &matrices);
}

void mma(Kind kind, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  need(kind == kMmaHalf8 ? 750 : 800, name_of(kind));
  const Mma operands{c, a, {b0, b1}};
  meet(kind, 4, &operands);
}

namespace {
void meet_wgmma(Kind kind, int count, const void* operands) {
  if (arch != 900 || !exact) fail(std::string(name_of(kind)) + " needs sm_90a");
  if (self->index / 128 * 128 + 128 > threads) fail(std::string(name_of(kind)) + " in a warpgroup of fewer than 128 threads");
  meet(kind, count, operands);
}
}  // namespace

void wgmma(const Wgmma& product) { meet_wgmma(kWgmma, product.columns, &product); }
void wgmma_fence() { meet_wgmma(kWgmmaFence, 0, nullptr); }
void wgmma_commit() { meet_wgmma(kWgmmaCommit, 0, nullptr); }
void wgmma_wait(int pending) { meet_wgmma(kWgmmaWait, pending, &pending); }
void fence_for_wgmma() {
  need(900, "fence.proxy.async");
  ++fences[self->index];
}

}  // namespace emu

cudaError_t cudaPeekAtLastError() { return emu::last_error; }
cudaError_t cudaGetLastError() {
  const cudaError_t error = emu::last_error;
  emu::last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  static char text[40];
  snprintf(text, sizeof text, "CUDA error %d", static_cast<int>(error));
  return text;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = emu::processors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(emu::most_shared_per_block()); break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(emu::most_shared_per_processor()); break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emu::arch / 100; break;
    case cudaDevAttrComputeCapabilityMinor: *value = emu::arch / 10 % 10; break;
    default:
      fprintf(stderr, "emu: device attribute %d is not emulated\n", static_cast<int>(attribute));
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = aligned_alloc(256, std::max<size_t>((bytes + 255) / 256 * 256, 256));
#if EMU_ASAN
  __asan_poison_memory_region(static_cast<char*>(*data) + bytes, (bytes + 255) / 256 * 256 - bytes);
#endif
  emu::track(*data, bytes, "an allocation");
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  emu::untrack(data);
  free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t emu_set_attribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > static_cast<int>(emu::most_shared_per_block())) return cudaErrorInvalidValue;
    emu::shared_limits[function] = std::max(value, 48 * 1024);
  }
  return cudaSuccess;
}

#if EMU_ASAN
namespace {
extern "C" void emu_context() __attribute__((weak));
void died() {
  fprintf(stderr, "emu: died %s\n", emu::where().c_str());
  if (emu_context) emu_context();
}
struct Install {
  Install() { __sanitizer_set_death_callback(died); }
} install;
}  // namespace
#endif
