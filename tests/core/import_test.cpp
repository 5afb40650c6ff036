// import_test.cpp -- export then import gives every bit back, a run starts from either, and what fails leaves nothing behind.
#include "core/import.h"
#include "core/whole_folder.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "core/checkpoint_saver.h"
#include "core/export.h"
#include "io/files.h"
#include "io/hdf5_file.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/hf_folder.h"
#include "tests/support/short_files.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;
namespace fs = std::filesystem;

namespace {

core::Config of_type(core::Config c, DType dtype) {
  c.run.dtype = dtype;
  return c;
}

// Every weight another number, A_log and the biases too.
std::unique_ptr<core::Trainer> filled(const core::Config& c) {
  auto t = std::make_unique<core::Trainer>(c, parallel::solo(), Device::cpu, /*poison=*/true);
  t->initialize();
  for (int i = 0; i < t->table().size(); ++i) {
    core::Param p = t->table()[i];
    p.init = core::Init::normal;
    const auto rows = t->params().update_rows(i);
    core::initialize_rows(p, 0.3, 5, rows, t->params().stored(i, rows));
    if (t->optimizer().has_master(i)) core::initialize_rows(p, 0.3, 5, rows, t->optimizer().master(i, rows));
  }
  return t;
}
std::string saved(core::Trainer& t, const TempFolder& folder, const std::string& name) {
  core::CheckpointSaver(t, folder / name, 0).save();
  return core::latest_checkpoint(folder / name);
}

std::vector<char> bytes(ConstTensor t) {
  const auto* first = static_cast<const char*>(t.data);
  return {first, first + t.bytes()};
}
std::vector<char> bytes(const io::Hdf5File& file, const std::string& name) {
  const auto info = file.info(name);
  std::vector<char> raw(std::size_t(info.shape.count() * size_of(info.dtype)));
  file.read(name, Tensor(raw.data(), info.dtype, info.shape));
  return raw;
}
std::vector<std::string> files_of(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(folder)) names.push_back(e.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

void check_round_trip(const core::Config& c) {
  const TempFolder folder;
  auto t = filled(c);
  const std::string from = saved(*t, folder, "run");
  auto alone = parallel::solo();
  core::export_folder(*alone, from, folder / "hf", {.file_bytes = 15000});
  const core::Config back = core::import_folder(*alone, folder / "hf", folder / "back");
  CHECK(back.run.dtype == c.run.dtype);
  const auto before = io::Hdf5File::open(from + "/checkpoint.h5"), after = io::Hdf5File::open(folder / "back/checkpoint.h5");
  for (const core::Param& p : t->table().all()) {
    CAPTURE(p.name);
    REQUIRE(after.has(p.name));
    CHECK(after.info(p.name).dtype == before.info(p.name).dtype);
    CHECK(after.info(p.name).shape == before.info(p.name).shape);
    CHECK(bytes(before, p.name) == bytes(after, p.name));
  }
  CHECK(after.names().size() == std::size_t(t->table().size()) + 3);  // job, layout, shards

  core::export_folder(*alone, folder / "back", folder / "again", {.file_bytes = 15000});
  const auto names = files_of(folder / "hf");
  CHECK(names.size() > 4);
  CHECK(files_of(folder / "again") == names);
  for (const std::string& name : names) {
    CAPTURE(name);
    CHECK(io::read_text(folder / ("again/" + name)) == io::read_text(folder / ("hf/" + name)));
  }
}

}  // namespace

TEST_CASE("export then import gives every tensor back, key by key and bit by bit", "[core][cpu]") {
  core::Config untied = tiny_linear_config(), dense = tiny_linear_config();
  untied.model.tie_word_embeddings = false;
  dense.model.num_experts = 0;
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64})
    for (const core::Config& c : {tiny_config(), tiny_linear_config(), untied, dense}) {
      CAPTURE(name_of(dtype), c.model.num_experts, c.model.tie_word_embeddings);
      check_round_trip(of_type(c, dtype));
    }
}

TEST_CASE("an exported A_log is padded with zeros again, and a small export is one file without an index", "[core][cpu]") {
  const TempFolder folder;
  auto t = filled(of_type(tiny_config(), DType::bf16));
  core::export_folder(*parallel::solo(), saved(*t, folder, "run"), folder / "hf/");
  CHECK(files_of(folder / "hf") == std::vector<std::string>{"config.json", "model.safetensors"});
  const auto hf = io::read_safetensors_folder(folder / "hf");
  const auto& place = hf.tensors.at("model.layers.0.self_attn.A_log");
  CHECK(place.entry.text() == "F32 [128]");
  float values[128];
  io::read_safetensors_values(hf.path_of(place), place.entry, 0, Tensor(values, DType::f32, {128}));
  CHECK(values[1] != 0);
  CHECK(std::all_of(values + 2, values + 128, [](float v) { return v == 0 && !std::signbit(v); }));
  CHECK(hf.tensors.at("lm_head.weight").entry.dtype == "BF16");
  CHECK(hf.tensors.at("model.layers.4.block_sparse_moe.experts.7.w2.weight").entry.text() == "BF16 [13, 11]");
}

TEST_CASE("a run of any type starts from a folder or a checkpoint with the same weights and masters", "[core][cpu]") {
  const TempFolder folder;
  auto source = filled(of_type(tiny_config(), DType::f32));
  const std::string checkpoint = saved(*source, folder, "run");
  core::export_folder(*parallel::solo(), checkpoint, folder / "hf", {.file_bytes = 40000});
  core::import_folder(*parallel::solo(), folder / "hf", folder / "imported");
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64})
    for (const std::string& from : {checkpoint, folder / "run", folder / "hf", folder / "imported"}) {
      CAPTURE(name_of(dtype), from);
      core::Trainer t(of_type(tiny_config(), dtype), parallel::solo(), Device::cpu, /*poison=*/true);
      core::initialize_from(t, from);
      for (int i = 0; i < t.table().size(); ++i) {
        CAPTURE(t.table()[i].name);
        const auto rows = t.params().update_rows(i);
        const auto want = values_of(source->params().stored(i, rows)), got = values_of(t.params().stored(i, rows));
        bool same = true;
        for (std::size_t k = 0; k < want.size(); ++k)
          same = same && got[k] == (dtype == DType::bf16 && !t.table()[i].pinned ? double(float(bf16(want[k]))) : want[k]);
        CHECK(same);
        if (t.optimizer().has_master(i)) CHECK(values_of(t.optimizer().master(i, rows)) == want);
      }
    }
}

TEST_CASE("a bf16 run goes on from the masters of a checkpoint, not from its rounded weights", "[core][cpu]") {
  const TempFolder folder;
  auto source = filled(of_type(tiny_config(), DType::bf16));
  core::Trainer t(of_type(tiny_config(), DType::bf16), parallel::solo(), Device::cpu, /*poison=*/true);
  core::initialize_from(t, saved(*source, folder, "run"));
  const int i = t.table().find("lm_head.weight");
  const auto rows = t.params().update_rows(i);
  CHECK(bytes(t.optimizer().master(i, rows)) == bytes(source->optimizer().master(i, rows)));
  CHECK(values_of(t.optimizer().master(i, rows)) != values_of(t.params().stored(i, rows)));
}

TEST_CASE("a weight that the run's type cannot hold is refused by its element", "[core][cpu]") {
  const TempFolder folder;
  auto source = filled(of_type(tiny_config(), DType::f32));
  const int i = source->table().find("lm_head.weight");
  source->params().stored(i, source->params().update_rows(i)).as<float>()[5] = std::numeric_limits<float>::max();
  const std::string checkpoint = saved(*source, folder, "run");
  core::Trainer wide(of_type(tiny_config(), DType::f32), parallel::solo(), Device::cpu);
  core::initialize_from(wide, checkpoint);
  core::Trainer narrow(of_type(tiny_config(), DType::bf16), parallel::solo(), Device::cpu);
  CHECK(contains(error_of([&] { core::initialize_from(narrow, checkpoint); }), "3: lm_head.weight: element 5 is larger than bf16"));
}

TEST_CASE("init_from refuses another model by the key that differs, and a resume refuses weights alone", "[core][cpu]") {
  const TempFolder folder;
  auto source = filled(of_type(tiny_config(), DType::f32));
  const std::string checkpoint = saved(*source, folder, "run");
  core::export_folder(*parallel::solo(), checkpoint, folder / "hf");
  core::import_folder(*parallel::solo(), folder / "hf", folder / "imported");
  core::Config other = of_type(tiny_config(), DType::f32);
  other.model.routed_scaling_factor = 2;
  core::Trainer t(other, parallel::solo(), Device::cpu);
  for (const std::string& from : {checkpoint, folder / "hf"})
    CHECK(contains(error_of([&] { core::initialize_from(t, from); }),
                   "is another model: model.routed_scaling_factor is '1' there and '2' here"));
  core::Trainer same(of_type(tiny_config(), DType::f32), parallel::solo(), Device::cpu);
  CHECK(contains(error_of([&] { core::load_checkpoint(same, folder / "imported", false); }), "model.init_from"));
}

TEST_CASE("what is there already stays, and an import or export that fails leaves nothing", "[core][cpu]") {
  const TempFolder folder;
  auto alone = parallel::solo();
  auto source = filled(of_type(tiny_config(), DType::f32));
  const std::string checkpoint = saved(*source, folder, "run");
  core::export_folder(*alone, checkpoint, folder / "hf", {.file_bytes = 40000});
  CHECK(contains(error_of([&] { core::export_folder(*alone, checkpoint, folder / "merged", {.merge = true}); }), "it has no adapters"));
  CHECK(error_of([&] { core::export_folder(*alone, checkpoint, folder / "hf"); }) == "2: " + folder / "hf" + ": exists already");
  CHECK(contains(error_of([&] { core::import_folder(*alone, folder / "hf", folder / "run"); }), "2: "));
  CHECK(contains(error_of([&] { core::import_folder(*alone, folder / "absent", folder / "out"); }),
                 "2: " + folder / "absent" + ": no such folder"));
  const auto leaves_nothing = [&](const std::string& what, auto body) {
    const std::string why = error_of(body);
    CAPTURE(why);
    CHECK(contains(why, "3: "));
    CHECK(contains(why, what));
    CHECK_FALSE(fs::exists(folder / "out"));
    CHECK_FALSE(fs::exists(folder / "out.partial"));
  };
  {
    const ShortFiles full(20000);
    leaves_nothing("File too large", [&] { core::export_folder(*alone, checkpoint, folder / "out"); });
    leaves_nothing("File too large", [&] { core::import_folder(*alone, folder / "hf", folder / "out"); });
  }
  folder.file("out.partial/model.safetensors", "what a lost process left");
  core::export_folder(*alone, checkpoint, folder / "out");
  CHECK(files_of(folder / "out").size() == 2);
  fs::remove_all(folder / "out");
  folder.file("out.partial/notes.txt", "somebody's");
  CHECK(contains(error_of([&] { core::export_folder(*alone, checkpoint, folder / "out"); }), "2: " + folder / "out.partial" + ": holds notes.txt"));
  CHECK(fs::exists(folder / "out.partial/notes.txt"));
  fs::remove(folder / "out.partial/notes.txt");
  {
    const auto at_work = io::lock_folder(folder / "out.partial", "");
    CHECK(contains(error_of([&] { core::import_folder(*alone, folder / "hf", folder / "out"); }), "another process is writing it"));
  }

  const int i = source->table().find("model.norm.weight");  // NaN in the weights, as a run that went wrong has them
  const Tensor norm = source->params().stored(i, source->params().update_rows(i));
  norm.as<float>()[3] = std::nanf("");
  const std::string bad = saved(*source, folder, "bad");
  leaves_nothing(bad + "/checkpoint.h5: model.norm.weight: element 3 is not a finite number",
                 [&] { core::export_folder(*alone, bad, folder / "out"); });
  std::fstream(bad + "/shard_00000.h5", std::ios::in | std::ios::out | std::ios::binary).seekp(5000) << "damage";
  leaves_nothing("checksum", [&] { core::export_folder(*alone, bad, folder / "out"); });
  const std::string first = folder / "hf/" + files_of(folder / "hf")[1];
  fs::resize_file(first, fs::file_size(first) - 1);
  leaves_nothing(first + ": ", [&] { core::import_folder(*alone, folder / "hf", folder / "out"); });

  // What gets the name while the folder is being written stays as well.
  for (const auto& appear : {std::function<void(const std::string&)>([](const std::string& path) { std::filesystem::create_directory(path); }),
                             std::function<void(const std::string&)>([](const std::string& path) { io::write_text_atomically(path, "precious"); }),
                             std::function<void(const std::string&)>([](const std::string& path) { std::filesystem::create_symlink("nowhere", path); })}) {
    const std::string late = folder / "late";
    {
      core::WholeFolder whole(*alone, late, core::IfThere::refused);
      appear(late);
      CHECK(error_of([&] { whole.finish([] {}); }) == "2: " + late + ": exists already");
    }
    CHECK_FALSE(std::filesystem::exists(late + core::kPartial));
    CHECK(std::filesystem::remove(late));
    CHECK(error_of([&] { appear(late), core::WholeFolder(*alone, late, core::IfThere::refused); }) == "2: " + late + ": exists already");
    CHECK(std::filesystem::remove(late));
  }
}
