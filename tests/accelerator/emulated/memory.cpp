// SPDX-License-Identifier: Apache-2.0
//
// The allocators. A block is given out for the size that it was made for, by the stream that it was made for; 0xFF is written over it,
// in the order of that stream, when it comes back. Address space is reserved once, and no block is ever returned to the system.
#include "accelerator/emulated/memory.hpp"

#include <ATen/Context.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "accelerator/emulated/event.hpp"
#include "accelerator/emulated/pinned.hpp"
#include "base/text.hpp"

namespace emulated {

using stratagem::concat;

namespace {

constexpr size_t space_bytes = size_t{16} << 30;  // of addresses, per device
constexpr size_t block_alignment = 512;
constexpr size_t page_bytes = 4096;
constexpr int poison = 0xFF;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Pending {
  Block* block;
  std::vector<std::shared_ptr<Record>> uses;
};

// The blocks of one device, or of pinned memory.
struct Heap {
  size_t taken_bytes = 0;
  size_t used_bytes = 0;
  size_t limit_bytes = 0;
  std::map<const char*, Block*> blocks;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free;
  std::vector<Pending> pending;
};

struct Spaces {
  char* addresses;
  char* memory;
  std::array<Heap, max_devices + 1> heaps;  // the last one is pinned memory

  Spaces() {
    const auto reserve = [] {
      void* at = mmap(nullptr, space_bytes * max_devices, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "emulated: no address space for devices");
      return static_cast<char*>(at);
    };
    addresses = reserve();
    memory = reserve();
  }
};

Spaces& spaces() {
  static auto* instance = new Spaces;
  return *instance;
}

Heap& heap_of(int device) { return spaces().heaps[device < 0 ? max_devices : device]; }

// Once all streams that used a block are done with it, it is its owner's again, as if it were new.
void reclaim(Heap& heap) {
  std::erase_if(heap.pending, [&](const Pending& pending) {
    if (!std::all_of(pending.uses.begin(), pending.uses.end(), [](const auto& use) { return use->is_done(); })) return false;
    Block& block = *pending.block;
    block.traces.clear();
    if (block.owner == nullptr) {
      guard(block);
      std::memset(block.memory, poison, block.bytes);
    } else {
      block.owner->push({[at = block.memory, bytes = block.bytes] { std::memset(at, poison, bytes); }, true, "free"});
    }
    heap.free[{block.owner, block.bytes}].push_back(&block);
    return true;
  });
}

Block* from_driver(int device, Queue* owner, size_t bytes) {
  Heap& heap = heap_of(device);
  Block* block = nullptr;
  const size_t pages = round_up(bytes, page_bytes);
  if (device < 0) {
    const PinnedViews views = take_pinned(pages);
    block = new Block{views.host, views.device, bytes, device, owner};
  } else {
    const size_t at = device * space_bytes + heap.taken_bytes;
    if (heap.taken_bytes + pages > space_bytes || mprotect(spaces().memory + at, pages, PROT_READ | PROT_WRITE) != 0)
      return nullptr;
    heap.taken_bytes += pages;
    block = new Block{spaces().addresses + at, spaces().memory + at, bytes, device, owner};
    std::memset(block->memory, poison, bytes);
  }
  ++count.new_blocks;
  heap.blocks[block->address] = block;
  return block;
}

Block* take(int device, Queue* owner, size_t wanted_bytes) {
  const size_t bytes = round_up(wanted_bytes, device < 0 ? page_bytes : block_alignment);
  const std::lock_guard lock(world());
  Heap& heap = heap_of(device);
  reclaim(heap);
  if (heap.limit_bytes != 0 && heap.used_bytes + bytes > heap.limit_bytes) return nullptr;
  std::vector<Block*>& free = heap.free[{owner, bytes}];
  Block* block = free.empty() ? from_driver(device, owner, bytes) : free.back();
  if (block == nullptr) return nullptr;
  if (!free.empty()) free.pop_back();
  block->is_used = true;
  block->users.clear();
  heap.used_bytes += bytes;
  if (owner == nullptr) return block;
  static const auto* name = new auto(std::make_shared<const std::string>("allocation"));
  touch(*owner, advance(*owner), *name, *block, 0, wanted_bytes, true);
  return block;
}

void give_back(void* context) {
  auto& block = *static_cast<Block*>(context);
  const std::lock_guard lock(world());
  Heap& heap = heap_of(block.device);
  heap.used_bytes -= block.bytes;
  if (block.owner != nullptr) check_free(block);
  block.is_used = false;
  block.users.erase(block.owner);
  if (block.users.empty() && block.owner != nullptr) {
    static const auto* name = new auto(std::make_shared<const std::string>("free"));
    Queue& owner = *block.owner;
    block.traces = {{0, block.bytes, true, &owner, advance(owner), *name}};
    owner.push({[at = block.memory, bytes = block.bytes] { std::memset(at, poison, bytes); }, true, "free"});
    heap.free[{&owner, block.bytes}].push_back(&block);
    return;
  }
  Pending pending{&block, {}};
  for (Queue* user : block.users) pending.uses.push_back(record_now(*user));
  heap.pending.push_back(std::move(pending));
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    if (bytes == 0) return {nullptr, device_of(device)};
    Queue& owner = current_queue(device);
    Block* block = take(device, &owner, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, name_of(device), " is out of memory: ", bytes, " bytes more than the ",
                     used_bytes(device), " in use are wanted");
    return {block->address, block, &give_back, device_of(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "emulated: copy_data isn't there"); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    Block* block = take(-1, nullptr, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "emulated: no pinned memory for ", bytes, " bytes");
    return {block->address, block, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator& device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return *allocator;
}

c10::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

int device_of_address(const void* address) {
  const auto offset = static_cast<const char*>(address) - spaces().addresses;
  return offset < 0 || offset >= static_cast<ptrdiff_t>(space_bytes * max_devices) ? -1 : static_cast<int>(offset / space_bytes);
}

bool is_pinned(const void* address) { return device_view(address) != nullptr; }

void* memory_of(const void* address) {
  if (device_of_address(address) >= 0) return spaces().memory + (static_cast<const char*>(address) - spaces().addresses);
  void* pinned = device_view(address);
  return pinned != nullptr ? pinned : const_cast<void*>(address);
}

Block* find_block(const void* address) {
  const int device = device_of_address(address);
  if (device < 0 && !is_pinned(address)) return nullptr;
  const auto& blocks = heap_of(device).blocks;
  auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return address < block->address + block->bytes ? block : nullptr;
}

void record_use(const void* address, Queue& queue) {
  const std::lock_guard lock(world());
  if (Block* block = find_block(address)) block->users.insert(&queue);
}

uint64_t used_bytes(int device) {
  const std::lock_guard lock(world());
  return heap_of(device).used_bytes;
}

void limit_memory(int device, uint64_t bytes) {
  const std::lock_guard lock(world());
  heap_of(device).limit_bytes = bytes;
}

}  // namespace emulated
