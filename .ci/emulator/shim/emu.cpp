// The emulator's run time: fibers, scheduler, collectives, launch, race check.
#include "emu.h"

#include <pthread.h>
#include <sys/mman.h>

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
size_t dynamic_shared_bytes = 0;
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
                                      "any", "all", "reduce_add", "syncthreads"};
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
    uint64_t whole = 0;
    if (kind >= kBallot) {
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
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
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
    place->second.first = offset;
    memset(static_arena + static_used, 0xFF, offset + bytes - static_used);
    static_used = offset + bytes;
  }
  return static_arena + place->second.first;
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

#ifdef EMU_RACE
namespace {
void check(Region& region, uintptr_t at, size_t bytes, bool write, bool shared) {
  const int16_t warp = self->index / 32, lane = self->index % 32;
  const Access now{launch_number, block_number, barrier_epoch, warp_epoch[warp], warp, lane};
  const auto clash = [&](const Access& before) {
    if (before.launch != now.launch) return false;
    if (before.block != now.block) return !shared;
    if (before.epoch != now.epoch) return false;
    if (before.warp != warp) return true;
    return before.warp_step == now.warp_step && before.lane != lane;
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
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    default:
      fprintf(stderr, "emu: device attribute %d is not emulated\n", static_cast<int>(attribute));
      return cudaErrorInvalidValue;
  }
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
    if (value > 232448) return cudaErrorInvalidValue;
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
