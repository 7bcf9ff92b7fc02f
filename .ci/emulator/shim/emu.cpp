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
int arch = 900;
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
                                      "mma m16n8k8 bf16", "mma m16n8k8 tf32"};
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
void play_tensor_core(Kind kind, Fiber* lanes);

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
  forget_copies();
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
    if (kind > kBarrier) play_tensor_core(kind, lanes);
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

// Copies under way to each 16 bytes of shared memory.
namespace {
constexpr uint32_t kStaticBase = 1024, kDynamicBase = 65536;  // addresses in shared memory
uint8_t copies_to[(kDynamicBase + 256 * 1024) / 16];
int copies_under_way = 0;
bool whole_warp = false;  // a collective of the tensor cores accesses memory

const void* at_address(uint32_t address) {
  return address >= kDynamicBase ? dynamic_shared_memory + (address - kDynamicBase) : static_arena + (address - kStaticBase);
}
}  // namespace

#ifdef EMU_RACE
namespace {
void check(Region& region, uintptr_t at, size_t bytes, bool write, bool shared) {
  const int16_t warp = self->index / 32, lane = whole_warp ? -1 : self->index % 32;
  const Access now{launch_number, block_number, barrier_epoch, warp_epoch[warp], warp, lane};
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
    const uint32_t base = &region == &shared_region ? kDynamicBase : kStaticBase;
    if (copies_under_way > 0 && shared && copies_to[(base + (a - region.begin)) / 16] > 0) {
      what = write ? "write where an asynchronous copy is under way" : "read where an asynchronous copy is under way";
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
  const bool is_static = address >= kStaticBase && address + 16ull <= kStaticBase + static_used;
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

void play_tensor_core(Kind kind, Fiber* lanes) {
  if (kind >= kMmaHalf16) {
    ++counts.products;
    multiply(kind, lanes);
  } else {
    move_matrices(kind, lanes);
  }
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
  if (in_static <= static_used) return kStaticBase + static_cast<uint32_t>(in_static);
  fail("shared_address of an object outside the block's shared memory");
}

void* shared_pointer(uint32_t address) {
  const bool is_static = address >= kStaticBase && address <= kStaticBase + static_used;
  const bool is_dynamic = address >= kDynamicBase && address <= kDynamicBase + dynamic_shared_bytes;
  if (!is_static && !is_dynamic) fail("shared_pointer: address " + hex(address) + " is outside the block's shared memory");
  return const_cast<void*>(at_address(address));
}

// The destination is poisoned until the bytes arrive, at the wait.
void copy_async(uint32_t to, const void* from, bool exists) {
  need(800, "cp.async");
  unsigned char* const row = row_at(to, "cp.async", self->index % 32);
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("cp.async: the address in global memory is not a multiple of 16");
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
