// SPDX-License-Identifier: Apache-2.0
//
// The host's view of pinned memory is protected from when a copy of it is queued until a thread of the host has waited for that copy: from
// all access where the copy writes it, from writing where the copy reads it. A touch before is a fault, which is reported and then let
// go on. So the host's side of a race is seen with any delay, and where LibTorch's CPU kernels or memcpy do the touching, too. A system
// call that is given such memory fails with EFAULT instead.
#include "accelerator/emulated/pinned.hpp"

#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <set>

#include "accelerator/emulated/memory.hpp"
#include "base/text.hpp"

namespace emulated {

using stratagem::concat;

namespace {

constexpr size_t pinned_bytes = size_t{8} << 30;  // of addresses
constexpr size_t page_bytes = 4096;

struct Pinned {
  char* host;
  char* device;
  size_t taken_bytes = 0;
  std::set<Block*> guarded;

  Pinned() {
    const int file = memfd_create("emulated pinned memory", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, pinned_bytes) == 0, "emulated: no file for pinned memory");
    const auto view = [&] {
      void* at = mmap(nullptr, pinned_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "emulated: no address space for pinned memory");
      return static_cast<char*>(at);
    };
    host = view();
    device = view();
    close(file);
  }
};

Pinned& pinned() {
  static auto* instance = new Pinned;
  return *instance;
}

size_t pages_of(const Block& block) { return (block.bytes + page_bytes - 1) / page_bytes * page_bytes; }

void protect(Block& block, int protection) {
  block.is_guarded = protection != (PROT_READ | PROT_WRITE);
  if (block.is_guarded) {
    pinned().guarded.insert(&block);
  } else {
    pinned().guarded.erase(&block);
  }
  TORCH_CHECK(mprotect(block.address, pages_of(block), protection) == 0, "emulated: pinned memory can't be protected");
}

struct sigaction next_handler;

void hand_on(int signal, siginfo_t* info, void* context) {
  if ((next_handler.sa_flags & SA_SIGINFO) != 0) {
    next_handler.sa_sigaction(signal, info, context);
  } else if (next_handler.sa_handler != SIG_DFL && next_handler.sa_handler != SIG_IGN) {
    next_handler.sa_handler(signal);
  } else {  // the fault comes again, and ends the process
    ::signal(signal, SIG_DFL);
  }
}

bool is_write(const void* context) {
#if defined(__x86_64__)
  return (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
  return context != nullptr;  // not told; a protected page is most often one that a copy writes
#endif
}

// A thread of the host that doesn't hold the world's lock: under it none of this memory is touched.
void on_fault(int signal, siginfo_t* info, void* context) {
  if (!is_pinned(info->si_addr)) return hand_on(signal, info, context);
  const std::lock_guard lock(world());
  Block* block = find_block(info->si_addr);
  if (block == nullptr) return hand_on(signal, info, context);
  const auto at = static_cast<size_t>(static_cast<char*>(info->si_addr) - block->address);
  const bool writes = is_write(context);
  for (const Trace& trace : block->traces) {
    if (trace.begin > at || at >= trace.end || is_known_done(trace, all_hosts()) || !(trace.is_write || writes)) continue;
    report(concat("race: the host ", writes ? "writes" : "reads", " pinned memory while ", describe(trace),
                  " it and nobody has waited for that"));
  }
  protect(*block, PROT_READ | PROT_WRITE);
}

// Test frameworks set handlers of their own for each test.
void see_to_handler() {
  struct sigaction current {};
  sigaction(SIGSEGV, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == &on_fault) return;
  next_handler = current;
  struct sigaction ours {};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | (current.sa_flags & SA_ONSTACK);
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace

PinnedViews take_pinned(size_t bytes) {
  Pinned& all = pinned();
  if (all.taken_bytes + bytes > pinned_bytes) TORCH_CHECK_WITH(OutOfMemoryError, false, "emulated: out of pinned memory");
  const size_t at = all.taken_bytes;
  all.taken_bytes += (bytes + page_bytes - 1) / page_bytes * page_bytes;
  return {all.host + at, all.device + at};
}

void* device_view(const void* host) {
  const auto offset = static_cast<const char*>(host) - pinned().host;
  return offset < 0 || offset >= static_cast<ptrdiff_t>(pinned_bytes) ? nullptr : pinned().device + offset;
}

void guard(Block& block) {
  int protection = PROT_READ | PROT_WRITE;
  for (const Trace& trace : block.traces) {
    if (is_known_done(trace, all_hosts())) continue;
    protection = trace.is_write ? PROT_NONE : std::min(protection, PROT_READ);
    if (trace.is_write) break;
  }
  if (!block.is_guarded && protection == (PROT_READ | PROT_WRITE)) return;
  see_to_handler();
  protect(block, protection);
}

void unguard_done() {
  const std::set<Block*> guarded = pinned().guarded;
  for (Block* block : guarded) guard(*block);
}

}  // namespace emulated
