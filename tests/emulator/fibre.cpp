#include "fibre.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {
namespace {

// Pages that are not touched cost nothing; the last in the way of a stack that grows too far ends
// the process.
class Stack {
 public:
  static constexpr size_t kBytes = 256 * 1024, kGuardBytes = 4096;

  Stack() {
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(memory);
    mprotect(begin_, kGuardBytes, PROT_NONE);
  }
  ~Stack() { munmap(begin_, kBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* data() const { return begin_ + kGuardBytes; }
  static constexpr size_t size() { return kBytes - kGuardBytes; }

 private:
  char* begin_ = nullptr;
};

}  // namespace

#if defined(__x86_64__)
// Saves what a function must preserve on the present stack, leaves its pointer in *save and
// continues on the stack `load`. It jumps, as a processor mistakes where `ret` goes.
extern "C" void kdt_switch_stack(void** save, void* load);
asm(R"(
.text
.globl kdt_switch_stack
.type kdt_switch_stack, @function
kdt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size kdt_switch_stack, .-kdt_switch_stack
)");
#endif

struct Fibre::State {
  Stack stack;
  void (*entry)() = nullptr;
#if defined(__x86_64__)
  void* inside = nullptr;
  void* outside = nullptr;
#else
  ucontext_t inside, outside;
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* inside_fake = nullptr;
  void* outside_fake = nullptr;
  const void* outside_stack = nullptr;
  size_t outside_bytes = 0;
#endif

  static thread_local State* starting;

  static void start() {
    State* state = starting;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &state->outside_stack, &state->outside_bytes);
#endif
    state->entry();
    state->to_outside(true);
  }

  void to_outside(bool for_good) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &inside_fake, outside_stack, outside_bytes);
#else
    static_cast<void>(for_good);
#endif
#if defined(__x86_64__)
    kdt_switch_stack(&inside, outside);
#else
    swapcontext(&inside, &outside);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(inside_fake, &outside_stack, &outside_bytes);
#endif
  }
};

thread_local Fibre::State* Fibre::State::starting = nullptr;

Fibre::Fibre() : state_(std::make_unique<State>()) {}
Fibre::~Fibre() = default;

void Fibre::prepare(void (*entry)()) {
  State& s = *state_;
  s.entry = entry;
#if defined(__SANITIZE_ADDRESS__)
  // What ran here before may have been left in the middle.
  __asan_unpoison_memory_region(s.stack.data(), s.stack.size());
#endif
#if defined(__x86_64__)
  // A frame as kdt_switch_stack leaves one: six registers and the address to return to. The stack
  // is a multiple of 16, less 8, when a function begins.
  auto top = reinterpret_cast<uintptr_t>(s.stack.data() + s.stack.size()) & ~uintptr_t{15};
  auto* frame = reinterpret_cast<void**>(top) - 8;
  for (int i = 0; i < 6; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(&State::start);
  frame[7] = nullptr;
  s.inside = frame;
#else
  getcontext(&s.inside);
  s.inside.uc_stack.ss_sp = s.stack.data();
  s.inside.uc_stack.ss_size = s.stack.size();
  s.inside.uc_link = nullptr;
  makecontext(&s.inside, &State::start, 0);
#endif
}

void Fibre::enter() {
  State& s = *state_;
  State::starting = &s;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&s.outside_fake, s.stack.data(), s.stack.size());
#endif
#if defined(__x86_64__)
  kdt_switch_stack(&s.outside, s.inside);
#else
  swapcontext(&s.outside, &s.inside);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(s.outside_fake, nullptr, nullptr);
#endif
}

void Fibre::leave() { state_->to_outside(false); }

}  // namespace emulator
