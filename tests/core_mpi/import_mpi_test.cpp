// import_mpi_test.cpp -- four ranks write, read and start from folders that are the same as those of one.
#include <cstring>
#include <filesystem>

#include "core/checkpoint_saver.h"
#include "core/export.h"
#include "core/import.h"
#include "core/together.h"
#include "io/files.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/shared_folder.h"
#include "tests/support/short_files.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;
namespace fs = std::filesystem;

namespace {

core::Config config_of(parallel::Sharding sharding, std::uint64_t seed, bool cut = false) {
  core::Config c = tiny_config();
  c.run.dtype = DType::bf16;
  c.run.seed = seed;
  c.model.num_attention_heads = c.model.linear_attn.num_heads = 4;
  c.parallel.data_parallel = c.parallel.expert_parallel = cut ? 1 : 2;
  c.parallel.tensor_parallel = cut ? 4 : 1;
  c.parallel.sharding = sharding;
  return c;
}

}  // namespace

TEST_CASE("four ranks export, import and start from either with the weights they had, bit by bit", "[core][mpi]") {
  const SharedFolder folder;
  auto& world = folder.world();
  core::Trainer source(config_of(parallel::Sharding::full, 3), parallel::mpi_world(), Device::cpu, /*poison=*/true);
  source.initialize();
  core::CheckpointSaver(source, folder / "run", 0).save();
  const std::string checkpoint = folder / "run/step_00000000";
  core::export_folder(world, checkpoint, folder / "hf", {.file_bytes = 20000});
  core::import_folder(world, folder / "hf", folder / "imported");
  if (world.rank() == 0) {
    core::export_folder(*parallel::solo(), checkpoint, folder / "alone", {.file_bytes = 20000});
    core::export_folder(*parallel::solo(), folder / "imported", folder / "back", {.file_bytes = 20000});
    int files = 0;
    for (const auto& e : fs::directory_iterator(folder / "hf")) {
      ++files;
      for (const char* other : {"alone/", "back/"})
        CHECK(io::read_text(e.path()) == io::read_text(folder / (other + e.path().filename().string())));
    }
    CHECK(files > 6);
  }
  world.barrier();
  for (const auto& [sharding, cut] : {std::pair{parallel::Sharding::none, false},
                                      {parallel::Sharding::optimizer, false},
                                      {parallel::Sharding::gradients, false},
                                      {parallel::Sharding::full, false},
                                      {parallel::Sharding::full, true}})
    for (const char* from : {"hf", "imported", "run"}) {
      CAPTURE(from, int(sharding), cut);
      core::Trainer t(config_of(sharding, 4, cut), parallel::mpi_world(), Device::cpu, /*poison=*/true);
      core::initialize_from(t, folder / from);
      core::Trainer want(config_of(sharding, 3, cut), parallel::mpi_world(), Device::cpu, /*poison=*/true);
      want.initialize();
      for (int i = 0; i < t.table().size(); ++i) {
        CAPTURE(t.table()[i].name);
        const auto rows = t.params().update_rows(i);
        const Tensor a = t.params().stored(i, rows), b = want.params().stored(i, rows);
        CHECK(std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0);
      }
    }
}

TEST_CASE("an export or import that fails on one rank fails on all and leaves nothing", "[core][mpi]") {
  const SharedFolder folder;
  auto& world = folder.world();
  core::Trainer source(config_of(parallel::Sharding::full, 3), parallel::mpi_world(), Device::cpu);
  source.initialize();
  core::CheckpointSaver(source, folder / "run", 0).save();
  const std::string checkpoint = folder / "run/step_00000000";
  core::export_folder(world, checkpoint, folder / "hf", {.file_bytes = 20000});
  const ShortFiles full(world.rank() == 2 ? 5000 : RLIM_INFINITY);
  for (const auto& body : {std::function<void()>([&] { core::export_folder(world, checkpoint, folder / "out", {.file_bytes = 20000}); }),
                           std::function<void()>([&] { core::import_folder(world, folder / "hf", folder / "out"); })}) {
    int rank = -1;
    try {
      body();
    } catch (const core::AgreedError& e) {
      rank = e.rank();
    }
    CHECK(rank == 2);
    world.barrier();
    CHECK_FALSE(fs::exists(folder / "out"));
    CHECK_FALSE(fs::exists(folder / "out.partial"));
    world.barrier();
  }
}
