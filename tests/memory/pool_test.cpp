// pool_test.cpp -- blocks of a pool lie apart and merge again, its figures are those of a simple model, and a dry pool places as a real one.
#include "memory/pool.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "memory/buffer.h"
#include "memory/cuda_memory.h"
#include "memory/stack.h"
#include "tests/support/catch.h"

namespace moetrain {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

struct Held {
  std::int64_t place, bytes;
  Area area;
};

// Takes and gives back at random, the same for every pool that has room; half the blocks are small, and of the last ones taken the
// stacks give back the last. `tell` hears of each block after it was taken (true) and before it is given back. Was there room?
template <class Tell>
bool random_run(Pool& pool, int turns, Tell tell) {
  std::mt19937_64 random(5);
  std::vector<Held> held;
  const auto give_back = [&](std::size_t i) {
    if (held[i].area != Area::blocks)
      for (std::size_t j = i + 1; j < held.size(); ++j)
        if (held[j].area == held[i].area) i = j;
    tell(held[i], false);
    pool.give_back(held[i].place, held[i].bytes, held[i].area);
    held.erase(held.begin() + std::ptrdiff_t(i));
  };
  for (int i = 0; i < turns; ++i) {
    const bool grows = i / 100 % 2 == 0;
    const std::int64_t bytes = 1 + std::int64_t(random() % (random() % 2 ? 3000 : 90000));
    const Area area = Area(random() % 3);
    if (random() % 4 < (grows ? 1 : 3) && !held.empty()) {
      give_back(random() % held.size());
      continue;
    }
    const auto place = pool.take(bytes, area);
    if (!place) return false;
    held.push_back({*place, bytes, area});
    tell(held.back(), true);
  }
  while (!held.empty()) give_back(random() % held.size());
  return true;
}

TEST_CASE("blocks lie aligned and apart whatever is taken and given back, and merge with all that is free", "[memory][cpu]") {
  constexpr std::int64_t kAll = 64 * kMiB;
  Pool pool(Device::cpu, kAll);
  std::map<const std::byte*, std::int64_t> model;  // what is held, by address
  std::int64_t used[3] = {}, most_blocks = 0, most_stacks = 0, holes = 0;
  int turn = 0;
  CHECK(random_run(pool, 20000, [&](const Held& h, bool taken) {
    auto* data = static_cast<std::byte*>(pool.address(h.place, h.area));
    const std::int64_t size = (h.bytes + 511) / 512 * 512;
    if (taken) {
      REQUIRE(reinterpret_cast<std::uintptr_t>(data) % 512 == 0);
      REQUIRE(model.emplace(data, size).second);
      std::memset(data, ++turn % 251, std::size_t(h.bytes));
      used[int(h.area)] += size;
    } else {
      REQUIRE(std::all_of(data, data + h.bytes, [&](std::byte b) { return b == *data; }));
    }
    const std::int64_t stacks = used[1] + used[2];
    most_stacks = std::max(most_stacks, stacks);
    if (taken && turn % 16 == 0) {
      // Blocks lie from the first address on, the stacks elsewhere: gaps between blocks are the holes.
      const auto* at = static_cast<const std::byte*>(pool.address(0, Area::blocks));
      const std::byte* const end = static_cast<const std::byte*>(pool.address(0, Area::scratch));
      const std::byte* const first = at;
      std::int64_t largest = 0, blocks = 0;
      for (const auto& [begin, bytes] : model) {
        REQUIRE(at <= begin);
        if (begin >= end) break;
        largest = std::max(largest, std::int64_t(begin - at));
        at = begin + bytes;
        blocks += bytes;
      }
      REQUIRE(blocks == used[0]);
      REQUIRE(pool.used() == used[0] + stacks);
      REQUIRE(pool.reach() == at - first + stacks);
      REQUIRE(pool.room(Area::blocks) == std::max(largest, kAll - pool.reach()));
      REQUIRE(pool.room(Area::scratch) == kAll - pool.blocks_most() - stacks);
      REQUIRE(pool.room(Area::kept) == pool.room(Area::scratch));
      REQUIRE(pool.fragmentation() == 1 - double(std::max(largest, kAll - pool.reach())) / double(kAll - pool.used()));
      holes += largest > 0;
    }
    if (h.area == Area::blocks) most_blocks = std::max(most_blocks, h.place + size);
    for (auto at = model.begin(); turn % 64 == 0 && std::next(at) != model.end(); ++at) REQUIRE(at->first + at->second <= std::next(at)->first);
    if (!taken) used[int(h.area)] -= size, model.erase(data);
  }));
  CHECK(holes > 100);
  CHECK(pool.used() == 0);
  CHECK(pool.reach() == 0);
  CHECK(pool.blocks_most() == most_blocks);
  CHECK(pool.high_water() == most_blocks + most_stacks);
  CHECK(pool.fragmentation() == 0);
}

TEST_CASE("a dry pool places blocks as a real one, and its high-water mark is the least that one must have", "[memory][cpu]") {
  const auto places = [](Device device, std::int64_t limit) {
    Pool pool(device, limit);
    std::vector<std::int64_t> found;
    bool room = true;
    for (int step = 0; step < 2; ++step) room = room && random_run(pool, 5000, [&](const Held& h, bool) { found.push_back(h.place); });
    found.push_back(pool.high_water());
    return std::pair(room, found);
  };
  const auto dry = places(Device::dry, 0);
  const std::int64_t least = dry.second.back();
  CHECK(dry.first);
  CHECK(places(Device::cpu, 0) == dry);
  CHECK(places(Device::cpu, least) == dry);
  CHECK(!places(Device::cpu, least - Pool::kAlign).first);
}

TEST_CASE("a block is cut from the first hole that has room, else from what is behind the last", "[memory][cpu]") {
  Pool pool(Device::dry, 0);
  const auto take = [&](std::int64_t bytes) { return *pool.take(bytes, Area::blocks); };
  const auto give_back = [&](std::int64_t place, std::int64_t bytes) { pool.give_back(place, bytes, Area::blocks); };
  CHECK(take(1000) == 0);
  CHECK(take(3000) == 1024);
  CHECK(take(1) == 4096);
  CHECK(take(1024) == 4608);
  CHECK(take(512) == 5632);
  CHECK(pool.used() == 6144);
  give_back(1024, 3000);
  give_back(4608, 1024);
  CHECK(pool.reach() == 6144);
  CHECK(pool.used() == 1024 + 512 + 512);
  CHECK(take(600) == 1024);
  CHECK(take(2049) == 6144);  // 2048 are left of the first hole
  CHECK(take(2048) == 2048);
  CHECK(take(600) == 4608);
  give_back(6144, 2049);
  CHECK(pool.reach() == 6144);  // it was the last
  give_back(1024, 600);
  give_back(4096, 1);
  give_back(2048, 2048);
  CHECK(take(3500) == 1024);  // three neighbours are one hole
  CHECK(pool.blocks_most() == 6144 + 2560);
  CHECK(take(0) == 0);
  give_back(0, 0);
  CHECK(pool.used() == 1024 + 3584 + 1024 + 512);
}

TEST_CASE("stacks share what is above the most that blocks took", "[memory][cpu]") {
  Pool pool(Device::cpu, 16 * 512 + 100);
  const auto address = [&](Area area, std::int64_t place) { return static_cast<std::byte*>(pool.address(place, area)); };
  CHECK(pool.take(4 * 512, Area::blocks) == 0);
  CHECK(pool.capacity() == 16 * 512);
  CHECK(pool.take(512, Area::scratch) == 0);
  CHECK(pool.take(512, Area::scratch) == 512);
  CHECK(pool.take(512, Area::kept) == 0);
  CHECK(pool.take(512, Area::kept) == 512);
  for (const Area area : {Area::scratch, Area::kept}) CHECK(address(area, 512) == address(area, 0) + 512);
  CHECK(pool.room(Area::scratch) == 8 * 512);
  CHECK(!pool.take(8 * 512 + 1, Area::kept).has_value());
  pool.give_back(0, 4 * 512, Area::blocks);
  CHECK(pool.room(Area::scratch) == 8 * 512);  // blocks will want as much again
  CHECK(pool.room(Area::blocks) == 12 * 512);
  CHECK(pool.take(8 * 512, Area::kept) == 1024);
  CHECK(!pool.take(1, Area::scratch).has_value());
  CHECK(pool.high_water() == 16 * 512);
  CHECK(pool.take(4 * 512, Area::blocks) == 0);
  CHECK(pool.fragmentation() == 0);
}

TEST_CASE("fragmentation is the share of the free bytes outside the largest free block", "[memory][cpu]") {
  Pool pool(Device::cpu, 10 * 512);
  for (int i = 0; i < 5; ++i) CHECK(pool.take(1024, Area::blocks).has_value());
  CHECK(!pool.take(1, Area::blocks).has_value());
  CHECK(pool.fragmentation() == 0);
  pool.give_back(0, 1024, Area::blocks);
  CHECK(pool.fragmentation() == 0);
  pool.give_back(2048, 1024, Area::blocks);
  CHECK(pool.fragmentation() == 0.5);
  CHECK(!pool.take(1025, Area::blocks).has_value());
  pool.give_back(4096, 1024, Area::blocks);
  CHECK(pool.fragmentation() == 1 - 1.0 / 3);
  pool.give_back(3072, 1024, Area::blocks);
  CHECK(pool.fragmentation() == 0.25);
  CHECK(pool.room(Area::blocks) == 3072);
}

TEST_CASE("the system is asked for memory until the high-water mark is reached, and never for what was used before", "[memory][cpu]") {
  Pool pool(Device::cpu, 0);
  CHECK(pool.system_calls() == 0);
  std::int64_t before = 0;
  for (int step = 0; step < 5; ++step) {
    std::vector<Held> held;
    for (const std::int64_t bytes : {5, 3000000, 700, 9000000, 64})
      for (const Area area : {Area::blocks, Area::scratch, Area::kept}) {
        held.push_back({*pool.take(bytes, area), bytes, area});
        std::memset(pool.address(held.back().place, area), 1, std::size_t(bytes));
      }
    for (const Held& h : held) pool.give_back(h.place, h.bytes, h.area);
    if (step == 0) before = pool.system_calls();
  }
  CHECK(before > 3);
  CHECK(pool.system_calls() == before);
  CHECK(Pool(Device::dry, 0).take(1 << 30, Area::blocks) == 0);
}

TEST_CASE("out of memory says what was asked for, who holds what and what to change, and costs nothing", "[memory][cpu]") {
  Memory memory(Device::cpu, 8 * kMiB);
  const Buffer weights(memory, Category::weights, 5 * kMiB + 1);
  Buffer loss(memory, Category::loss, kMiB);
  const Buffer cache(memory, Category::cache, kMiB / 2);
  loss = {};
  std::string text;
  try {
    const Buffer more(memory, Category::activations, 3 * kMiB);
  } catch (const Error& e) {
    text = e.what();
    CHECK(e.code() == ExitCode::run_failed);
  }
  CHECK(text.starts_with("out of host memory: 3.00 MiB asked for activations of a pool of 8.00 MiB; held: weights 5.00 MiB, cache 512.00 KiB, "
                         "5.50 MiB in all, and 511 bytes by rounding; free: 2.50 MiB, at most 1.50 MiB in one piece. Less is held with "));
  CHECK(text.find("training.micro_batch_size") != std::string::npos);
  CHECK(text.find("memory.device_limit") != std::string::npos);
  CHECK(memory.total() == 5 * kMiB + 1 + kMiB / 2);
  CHECK(memory.pool().used() == memory.total() + 511);
  CHECK(Buffer(memory, Category::loss, 3 * kMiB / 2 - 512).bytes() > 0);
}

TEST_CASE("a table says who holds what", "[memory][cpu]") {
  Memory memory(Device::dry);
  const Buffer weights(memory, Category::weights, 3 * kMiB / 2);
  { const Buffer loss(memory, Category::loss, 100); }
  const std::vector<std::string> want = {"weights           1.50 MiB   at most     1.50 MiB", "loss               0 bytes   at most    100 bytes",
                                         "in all            1.50 MiB   at most     1.50 MiB", "of the pool       1.50 MiB   at most     1.50 MiB"};
  CHECK(memory.table() == want);
}

// Bytes of each area in turn, more than the capacity has together: each has to give up what the others need.
void take_turns(Device device, std::int64_t limit) {
  Pool pool(device, limit);
  std::vector<std::uint8_t> host(1 << 16);
  for (int turn = 0; turn < 6; ++turn) {
    const Area area = turn % 2 ? Area::scratch : Area::kept;
    const std::int64_t bytes = limit * 3 / 4;
    const auto place = pool.take(bytes, area);
    REQUIRE(place);
    auto* data = static_cast<std::byte*>(pool.address(*place, area));
    fill(device, data, turn + 1, bytes);
    for (const std::int64_t at : {std::int64_t(0), bytes - std::int64_t(host.size())}) {
      copy_to_host(device, host.data(), data + at, std::int64_t(host.size()));
      CHECK(std::all_of(host.begin(), host.end(), [&](std::uint8_t v) { return v == turn + 1; }));
    }
    CHECK(pool.opened() <= limit + 3 * pool.step());
    pool.give_back(*place, bytes, area);
  }
  CHECK(pool.high_water() < limit);
}

TEST_CASE("areas together have no more of the host than the capacity, whichever of them grows", "[memory][cpu]") { take_turns(Device::cpu, 5 * kMiB); }

TEST_CASE("pools of a device stand beside each other and have as much of it as they need, and growth moves nothing", "[memory][cuda]") {
  if constexpr (kHasCuda) {
    if (cuda::devices() == 0) return;
    const cuda::Room before = cuda::room();
    Memory one(Device::cuda), two(Device::cuda);
    std::vector<Buffer> blocks;
    int n = 0;
    for (const std::int64_t bytes : {std::int64_t(1), std::int64_t(1000), 300 * kMiB, kMiB, 200 * kMiB + 3})
      for (Memory* memory : {&one, &two}) {
        blocks.emplace_back(*memory, Category::weights, bytes);
        CHECK(reinterpret_cast<std::uintptr_t>(blocks.back().data()) % 512 == 0);
        fill(Device::cuda, blocks.back().data(), ++n, bytes);
      }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      std::vector<std::uint8_t> host(std::size_t(blocks[i].bytes()));
      copy_to_host(Device::cuda, host.data(), blocks[i].data(), blocks[i].bytes());
      CHECK(std::all_of(host.begin(), host.end(), [&](std::uint8_t v) { return v == i + 1; }));
    }
    for (const Memory* memory : {&one, &two}) {
      CHECK(memory->pool().capacity() == before.total_bytes);
      CHECK(memory->pool().opened() >= memory->total());
      CHECK(memory->pool().opened() < memory->total() + 2 * memory->pool().step());
    }
    const std::int64_t calls = one.pool().system_calls();
    Stack stack(one, Category::activations, /*poison=*/false, Area::kept);
    for (int step = 0; step < 3; ++step) {
      Scope scope(stack);
      CHECK(stack.zeros(DType::f32, {50 << 20}).data == static_cast<std::byte*>(one.pool().address(0, Area::kept)));
      const Buffer again(one, Category::gradients, kMiB);
      CHECK(one.pool().system_calls() == calls + 1);
    }
    std::vector<std::uint8_t> host(1);
    copy_to_host(Device::cuda, host.data(), blocks[0].data(), 1);
    CHECK(host[0] == 1);
  }
}

TEST_CASE("areas together have no more of a device than the capacity, and a pool that dies gives it all back", "[memory][cuda]") {
  if constexpr (kHasCuda) {
    if (cuda::devices() == 0) return;
    take_turns(Device::cuda, 100 * kMiB);  // what the first one loads stays
    const std::int64_t before = cuda::room().free_bytes;
    take_turns(Device::cuda, 4096 * kMiB);
    CHECK(cuda::room().free_bytes > before - 64 * kMiB);
  }
}

TEST_CASE("out of memory on a device says whether the limit is short or the device", "[memory][cuda]") {
  if constexpr (kHasCuda) {
    if (cuda::devices() == 0) return;
    const auto text_of = [](Memory& memory, std::int64_t bytes) -> std::string {
      try {
        const Buffer more(memory, Category::activations, bytes);
      } catch (const Error& e) {
        CHECK(e.code() == ExitCode::run_failed);
        return e.what();
      }
      return "";
    };
    Memory small(Device::cuda, 64 * kMiB);
    const Buffer weights(small, Category::weights, 40 * kMiB);
    CHECK(text_of(small, 25 * kMiB).starts_with("out of GPU memory: 25.00 MiB asked for activations of a pool of 64.00 MiB; held: weights 40.00 MiB, "
                                                "40.00 MiB in all, and 0 bytes by rounding; free: 24.00 MiB, at most 24.00 MiB in one piece. Less is "));
    const Buffer all(small, Category::loss, 24 * kMiB);
    Memory whole(Device::cuda);  // of the other pool's bytes the limit knows nothing
    const std::string text = text_of(whole, cuda::room().total_bytes);
    CHECK(text.find("the system gives no more: the device has ") != std::string::npos);
    CHECK(text.find("this pool holds 0 bytes, and other processes") != std::string::npos);
    CHECK(whole.total() == 0);
    const Buffer then(whole, Category::loss, kMiB);  // and the pool can still be used
    fill(Device::cuda, then.data(), 1, kMiB);
  }
}

}  // namespace
}  // namespace moetrain
