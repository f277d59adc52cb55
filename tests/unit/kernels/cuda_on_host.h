// What CUDA C has and C++ has not, for tests/unit/kernels/host_kernels.py: device functions, and blocks whose threads
// are fibers. A thread runs until it meets others at a barrier or in a shuffle. Blocks run one after the other: a block
// that spins until another has written would never end. Included before a program, and again after it.
#ifndef ON_HOST
#define ON_HOST
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Shared memory is all that the linker puts between these two: what is static here is in a section of its own.
#define __shared__ static
#define NOT_SHARED __attribute__((section("not_shared")))
extern "C" char __bss_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

struct Index { unsigned int x, y, z; };
static thread_local Index blockIdx, blockDim, gridDim, threadIdx;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

namespace emulated {
constexpr unsigned int WARP = 32, NOTHING = 0xffffffffu;  // the latter are the bits of a NaN
constexpr size_t STACK = 1 << 17;
enum State { NOT_BEGUN, READY, AT_WARP, AT_BLOCK, ENDED };
enum Kind { SYNC, BALLOT, INDEXED, UP, DOWN, XOR };
struct Fiber;
struct Thread {
  State state;
  Fiber* fiber;
  Kind kind;
  unsigned int mask, argument, width;
  unsigned long long value, result;
};
struct Fiber {
  ucontext_t context;
  jmp_buf at;
  void* stack;
  bool begun;
};
static thread_local std::vector<Thread> threads;
static thread_local std::vector<std::unique_ptr<Fiber>> fibers;
static thread_local std::vector<Fiber*> idle;
static thread_local Fiber* current;
static thread_local jmp_buf scheduler;
static thread_local unsigned int begun;
static thread_local bool backwards;
static thread_local void (*kernel)();
static thread_local void** arguments;
static thread_local char message[300];
NOT_SHARED static std::mutex one_at_a_time;  // shared memory is static
NOT_SHARED static unsigned int launches;

__attribute__((noinline)) static void leave(int why) {
  if (!_setjmp(current->at)) _longjmp(scheduler, why);
}
__attribute__((noinline, cold)) static void fail(const char* what) {
  std::snprintf(message, sizeof message, "%s (block %u, %u, thread %u)", what, blockIdx.x, blockIdx.y, threadIdx.x);
  _longjmp(scheduler, 2);
}
template <class T> static inline void check_alignment(const T* at, size_t to = alignof(T)) {
  if ((size_t)at % to) fail("a misaligned address");
}
// A fiber takes the threads that have not begun one after the other, until one of them waits.
static void run_fiber() {
  for (;;) {
    while (begun < threads.size()) {
      unsigned int number = backwards ? threads.size() - 1 - begun : begun;
      ++begun;
      threadIdx = {number, 0, 0};
      threads[number].state = READY;
      threads[number].fiber = current;
      kernel();
      threads[threadIdx.x].state = ENDED;
    }
    idle.push_back(current);
    leave(1);
    if (begun == threads.size()) fail("the emulator resumed a fiber without a thread");
  }
}
__attribute__((noinline)) static int resume(Fiber* fiber) {
  current = fiber;
  int why = _setjmp(scheduler);
  if (!why) {
    if (current->begun) _longjmp(current->at, 1);
    current->begun = true;
    setcontext(&current->context);
  }
  return why;
}
static Fiber* an_idle_fiber() {
  if (idle.empty()) {
    fibers.push_back(std::make_unique<Fiber>());
    Fiber& made = *fibers.back();
    made.stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    made.begun = false;
    getcontext(&made.context);
    made.context.uc_stack.ss_sp = made.stack;
    made.context.uc_stack.ss_size = STACK;
    makecontext(&made.context, run_fiber, 0);
    return &made;
  }
  Fiber* found = idle.back();
  idle.pop_back();
  return found;
}
static void give_up() {  // fibers hang in the middle of a kernel
  for (auto& fiber : fibers) munmap(fiber->stack, STACK);
  fibers.clear();
  idle.clear();
}
static unsigned long long met(unsigned int warp, unsigned int lane, unsigned int ballot) {
  Thread* lanes = &threads[warp * WARP];
  const Thread& own = lanes[lane];
  unsigned int segment = lane & ~(own.width - 1), last = segment + own.width - 1, source = lane;
  switch (own.kind) {
    case SYNC: return 0;
    case BALLOT: return ballot;
    case INDEXED: source = segment + (own.argument & (own.width - 1)); break;
    case UP: source = own.argument <= lane - segment ? lane - own.argument : lane; break;
    case DOWN: source = own.argument <= last - lane ? lane + own.argument : lane; break;
    case XOR: source = (lane ^ own.argument) <= last ? lane ^ own.argument : lane; break;
  }
  bool is_there = warp * WARP + source < threads.size() && lanes[source].state != ENDED && (own.mask >> source & 1);
  return is_there ? lanes[source].value : ~0ull;
}
// Lets those lanes go on that have met; false if there are none.
static bool release_warp(unsigned int warp) {
  Thread* lanes = &threads[warp * WARP];
  unsigned int count = std::min<unsigned int>(WARP, threads.size() - warp * WARP), released = 0, live = 0;
  for (unsigned int lane = 0; lane < count; ++lane) live |= (lanes[lane].state != ENDED ? 1u : 0u) << lane;
  for (unsigned int lane = 0; lane < count; ++lane) {
    if (lanes[lane].state != AT_WARP || (released >> lane & 1)) continue;
    unsigned int mask = lanes[lane].mask, group = mask & live, ballot = 0;
    bool all = true;
    for (unsigned int other = 0; other < count; ++other)
      if (group >> other & 1) {
        const Thread& one = lanes[other];
        all = all && one.state == AT_WARP && one.mask == mask && one.kind == lanes[lane].kind;
        ballot |= (one.value ? 1u : 0u) << other;
      }
    if (!all) continue;
    for (unsigned int other = 0; other < count; ++other)
      if (group >> other & 1) lanes[other].result = met(warp, other, ballot);
    released |= group;
  }
  for (unsigned int lane = 0; lane < count; ++lane)
    if (released >> lane & 1) lanes[lane].state = READY;
  return released != 0;
}
static bool release() {
  bool any = false, all_wait = true;
  for (const Thread& thread : threads) all_wait = all_wait && (thread.state == AT_BLOCK || thread.state == ENDED);
  if (all_wait)
    for (Thread& thread : threads)
      if (thread.state == AT_BLOCK) thread.state = READY, any = true;
  if (!any)
    for (unsigned int warp = 0; warp * WARP < threads.size(); ++warp) any = release_warp(warp) || any;
  return any;
}
// Whether the block ended; otherwise there is a message.
static bool run_block(unsigned int size) {
  for (char* at = __bss_start; at < _end; ++at) *at = (char)0xff;
  threads.assign(size, Thread{NOT_BEGUN});
  begun = 0;
  while (begun < size)
    if (resume(an_idle_fiber()) == 2) return false;
  for (;;) {
    bool any = false;
    for (unsigned int place = 0; place < size; ++place) {
      unsigned int number = backwards ? size - 1 - place : place;
      if (threads[number].state != READY) continue;
      any = true;
      threadIdx = {number, 0, 0};
      if (resume(threads[number].fiber) == 2) return false;
    }
    if (any || release()) continue;
    unsigned int counts[ENDED + 1] = {};
    for (const Thread& thread : threads) ++counts[thread.state];
    if (counts[ENDED] == size) return true;
    std::snprintf(message, sizeof message,
      "a deadlock in block %u, %u: %u threads wait at __syncthreads, %u for lanes of their warp, %u have ended",
      blockIdx.x, blockIdx.y, counts[AT_BLOCK], counts[AT_WARP], counts[ENDED]);
    return false;
  }
}
static const char* run(void (*body)(), void** given, unsigned int x, unsigned int y, unsigned int block) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  kernel = body;
  arguments = given;
  gridDim = {x, y, 1};
  blockDim = {block, 1, 1};
  ++launches;
  for (unsigned int row = 0; row < y; ++row)
    for (unsigned int column = 0; column < x; ++column) {
      blockIdx = {column, row, 0};
      backwards = (launches + row + column) % 2;  // a missing barrier shows in one of the two orders
      if (!run_block(block)) {
        give_up();
        return message;
      }
    }
  return nullptr;
}
template <class... A, size_t... I> static void call(void (*body)(A...), std::index_sequence<I...>) {
  body(*(A*)arguments[I]...);
}
template <class... A> static void call(void (*body)(A...)) { call(body, std::index_sequence_for<A...>()); }
static unsigned long long meet(Kind kind, unsigned int mask, unsigned long long value, unsigned int argument, int width) {
  Thread& own = threads[threadIdx.x];
  if (!(mask >> threadIdx.x % WARP & 1)) fail("a lane that its own mask does not name");
  if (width < 1 || width > (int)WARP || (width & (width - 1))) fail("a width that is no power of two up to 32");
  own.state = AT_WARP;
  own.kind = kind;
  own.mask = mask;
  own.argument = argument;
  own.width = width;
  own.value = value;
  leave(1);
  return own.result;
}
template <class T> static T shuffled(Kind kind, unsigned int mask, T value, unsigned int argument, int width) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = meet(kind, mask, bits, argument, width);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace emulated

static inline void __syncthreads() {
  emulated::threads[threadIdx.x].state = emulated::AT_BLOCK;
  emulated::leave(1);
}
static inline void __syncwarp(unsigned int mask = ~0u) { emulated::meet(emulated::SYNC, mask, 0, 0, 32); }
static inline unsigned int __ballot_sync(unsigned int mask, int yes) {
  return emulated::meet(emulated::BALLOT, mask, yes != 0, 0, 32);
}
static inline int __any_sync(unsigned int mask, int yes) { return __ballot_sync(mask, yes) != 0; }
static inline int __all_sync(unsigned int mask, int yes) { return __ballot_sync(mask, !yes) == 0; }
template <class T> static inline T __shfl_sync(unsigned int mask, T value, int lane, int width = 32) {
  return emulated::shuffled(emulated::INDEXED, mask, value, lane, width);
}
template <class T> static inline T __shfl_up_sync(unsigned int mask, T value, unsigned int by, int width = 32) {
  return emulated::shuffled(emulated::UP, mask, value, by, width);
}
template <class T> static inline T __shfl_down_sync(unsigned int mask, T value, unsigned int by, int width = 32) {
  return emulated::shuffled(emulated::DOWN, mask, value, by, width);
}
template <class T> static inline T __shfl_xor_sync(unsigned int mask, T value, int with, int width = 32) {
  return emulated::shuffled(emulated::XOR, mask, value, with, width);
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <class T> static inline T __ldg(const T* at) { emulated::check_alignment(at); return *at; }
template <class T> static inline T __ldcg(const T* at) { emulated::check_alignment(at); return *at; }
template <class T> static inline T __ldcs(const T* at) { emulated::check_alignment(at); return *at; }
template <class T> static inline void __stcg(T* at, T value) { emulated::check_alignment(at); *at = value; }
template <class T> static inline void __stcs(T* at, T value) { emulated::check_alignment(at); *at = value; }
template <class T> static inline T atomicAdd(T* at, T by) { T before = *at; *at = before + by; return before; }
template <class T> static inline T atomicMax(T* at, T by) { T before = *at; *at = before < by ? by : before; return before; }
template <class T> static inline T atomicMin(T* at, T by) { T before = *at; *at = by < before ? by : before; return before; }
template <class T> static inline T atomicExch(T* at, T by) { T before = *at; *at = by; return before; }
static inline unsigned int atomicInc(unsigned int* at, unsigned int limit) {
  unsigned int before = *at;
  *at = before >= limit ? 0 : before + 1;
  return before;
}

static inline float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }
static inline float __int_as_float(int bits) { return __uint_as_float(bits); }
static inline int __float_as_int(float x) { return __float_as_uint(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
#define __expf(x) exp2f((x) * 1.4426950408889634f)  // the host's own __expf is hidden
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) {
  std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) {
  std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}
static inline int __popc(unsigned int x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned int __dp4a(unsigned int a, unsigned int b, unsigned int c) {
  for (int byte = 0; byte < 32; byte += 8) c += (a >> byte & 255u) * (b >> byte & 255u);
  return c;
}
static inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
  unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned int result = 0;
  for (int place = 0; place < 4; ++place) {
    unsigned int which = selector >> (4 * place) & 15u, byte = bytes >> (8 * (which & 7u)) & 255u;
    if (which & 8u) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * place);
  }
  return result;
}

// The device functions of prelude.cuh.
typedef unsigned short u16;
struct Word16;
static inline float from_f16(u16 bits) { _Float16 x; std::memcpy(&x, &bits, 2); return (float)x; }
static inline u16 to_f16(float x) { _Float16 y = (_Float16)x; u16 bits; std::memcpy(&bits, &y, 2); return bits; }
static inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
static inline float add_flushed(float a, float b) { return flushed(flushed(a) + flushed(b)); }
static inline float multiply_flushed(float a, float b) { return flushed(flushed(a) * flushed(b)); }
static inline float fma_flushed(float a, float b, float c) {
  return flushed(fmaf(flushed(a), flushed(b), flushed(c)));
}
static inline int add_bytes(unsigned int a, unsigned int b, int sum) {
  for (int byte = 0; byte < 32; byte += 8) sum += (int)(signed char)(a >> byte) * (int)(signed char)(b >> byte);
  return sum;
}
static inline void wait_for_kernel_before() {}
static inline void let_next_kernel_begin() {}
static inline void fetch_ahead(const void*) {}
static inline Word16 load_once(const void* at);
static inline unsigned int pair_bf16(float low, float high);
static inline unsigned int pair_f16(float low, float high);
static inline unsigned int multiply_pairs_bf16(unsigned int a, unsigned int b);
static inline unsigned int multiply_pairs_f16(unsigned int a, unsigned int b);

#else  // what needs the prelude's own functions

static inline Word16 load_once(const void* at) {
  emulated::check_alignment((const char*)at, sizeof(Word16));
  return *(const Word16*)at;
}
static inline unsigned int pair_bf16(float low, float high) {
  return to_bf16(round_bf16(low)) | (unsigned int)to_bf16(round_bf16(high)) << 16;
}
static inline unsigned int pair_f16(float low, float high) { return to_f16(low) | (unsigned int)to_f16(high) << 16; }
static inline unsigned int multiply_pairs_bf16(unsigned int a, unsigned int b) {
  return pair_bf16(from_bf16(a & 0xffffu) * from_bf16(b & 0xffffu), from_bf16(a >> 16) * from_bf16(b >> 16));
}
static inline unsigned int multiply_pairs_f16(unsigned int a, unsigned int b) {
  return pair_f16(from_f16(a & 0xffffu) * from_f16(b & 0xffffu), from_f16(a >> 16) * from_f16(b >> 16));
}
#endif
