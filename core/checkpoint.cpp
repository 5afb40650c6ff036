// checkpoint.cpp -- what of a run a checkpoint holds, and loading it under any layout.
#include "core/checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "core/checkpoint_files.h"
#include "core/job_difference.h"
#include "core/together.h"
#include "core/whole_folder.h"

namespace moetrain::core {
namespace fs = std::filesystem;

std::string step_name(std::int64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "step_%08lld", static_cast<long long>(step));
  return text;
}

std::vector<SavedTensor> saved_tensors(Trainer& t, int i, parallel::Rows rows) {
  const std::string& name = t.table()[i].name;
  std::vector<SavedTensor> tensors{{name, t.params().stored(i, rows), Category::weights}};
  if (t.optimizer().has_master(i)) tensors.push_back({"master/" + name, t.optimizer().master(i, rows), Category::optimizer});
  if (t.optimizer().has_state(i)) {
    tensors.push_back({"optimizer/exp_avg/" + name, t.optimizer().exp_avg(i, rows), Category::optimizer});
    tensors.push_back({"optimizer/exp_avg_sq/" + name, t.optimizer().exp_avg_sq(i, rows), Category::optimizer});
  }
  return tensors;
}

std::string checkpoint_at(const std::string& path) {
  if (fs::exists(view_path(path))) return path;
  for (const std::string& folder : {path, path + "/checkpoints"})
    if (fs::exists(folder + "/latest")) return latest_checkpoint(folder);
  return {};
}

std::string latest_checkpoint(const std::string& folder) {
  const std::string pointer = folder + "/latest";
  if (!fs::exists(pointer)) {  // lost, or cut between a first save and its name: the newest folder, since only complete ones have the name
    std::string newest;
    if (fs::is_directory(folder))
      for (const auto& entry : fs::directory_iterator(folder)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("step_") && !name.ends_with(kPartial)) newest = std::max(newest, name);
      }
    return newest.empty() ? newest : folder + "/" + newest;
  }
  std::string name = io::read_text(pointer);
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r' || name.back() == ' ')) name.pop_back();
  const bool named = name.starts_with("step_") && name.find_first_not_of("0123456789", 5) == name.npos && name.size() < 32;
  if (!named) throw Error(pointer + (name.empty() ? ": is empty" : ": does not hold the name of a checkpoint, like step_00000100"));
  if (!fs::is_directory(folder + "/" + name))
    throw Error(pointer + ": names '" + name + "', which is not a checkpoint folder beside it");
  return folder + "/" + name;
}

namespace {

// Any run that starts from a checkpoint has its model and adapters. The same run has also its data and optimizer: whole sections,
// and the keys of others that decide which data comes next, how it is stored and what has optimizer state.
void check_job(const Config& here, const io::Hdf5File& view, const std::string& path, bool same_run) {
  const Config there = config_of(view);
  const auto model = model_difference(here.model, there.model), adapters = adapter_difference(here, there);
  auto d = model ? model : adapters;
  if (same_run && !d)
    d = first_difference(config_to_yaml(here), config_to_yaml(there),
                         {"model", "data", "optimizer", "lora", "run.seed", "run.dtype", "training.trainable"},
                         {"data.eval", "data.bad_lines", "model.init_from", "model.preset"});
  if (!d) return;
  const std::string advice = model      ? "another model needs a run.dir and weights of its own"
                             : adapters ? "other adapters start anew, in a run.dir of their own, by model.init_from: " + path +
                                              ", which merges these into the weights"
                                        : "use another run.dir, or --resume " + path + " to start from it";
  throw Error(path + ": belongs to another job: " + d->text() + "; " + advice, ExitCode::bad_job);
}

void check_fits(Trainer& t, const io::Hdf5File& view, const std::string& path) {
  if (const auto groups = view.groups(); std::find(groups.begin(), groups.end(), "optimizer") == groups.end())
    throw Error(path + ": holds weights alone, as an import does, and no optimizer state: a new run starts from it by model.init_from");
  for (int i = 0; i < t.table().size(); ++i)
    for (const SavedTensor& p : saved_tensors(t, i, t.params().shard(i))) {
      if (!view.has(p.dataset)) throw Error(path + ": holds no tensor " + p.dataset);
      const auto info = view.info(p.dataset);
      if (info.shape != t.table()[i].shape || info.dtype != p.rows.dtype)
        throw Error(path + ": " + p.dataset + " is " + info.type + " " + info.shape.text() + " there, this job needs " +
                    name_of(p.rows.dtype) + " " + t.table()[i].shape.text());
    }
  for (const std::string& name : view.names())
    if (t.table().find(name) < 0 && name != "job" && name != "layout" && name != "shards")
      throw Error(path + ": holds a tensor that this job's model does not have: " + name);
}

// Rows of parameter i, of a part of its columns where they are cut.
void read_rows(Trainer& t, int i, const io::Hdf5File& view, const std::string& dataset, std::int64_t row, Tensor to) {
  if (to.count() == 0) return;
  const auto first = t.layout().first_row[std::size_t(i)] + row, column = t.layout().first_column[std::size_t(i)];
  const auto read = [&](Tensor rows) {
    rows.shape.row() == t.table()[i].shape.row() ? view.read_rows(dataset, first, rows)
                                                 : view.read_block(dataset, first, column, rows);
  };
  if (t.memory().device() == Device::cpu) return read(to);
  std::vector<std::byte> host(std::size_t(to.bytes()));
  read(Tensor(host.data(), to.dtype, to.shape));
  copy_to_device(t.memory().device(), to.data, host.data(), to.bytes());
}

}  // namespace

void check_same_run(const Config& config, const std::string& path) {
  check_job(config, io::Hdf5File::open(view_path(path)), path, true);
}

void load_checkpoint(Trainer& t, const std::string& path, bool same_run) {
  auto& control = *t.mesh().world().control;
  std::vector<FileSum> shards;
  together(control, [&] {
    shards = verified_view(path);
    const auto view = io::Hdf5File::open(view_path(path));
    check_job(t.config(), view, path, same_run);
    check_fits(t, view, path);
  });
  verify_shards(control, path, shards);
  together(control, [&] {
    const auto view = io::Hdf5File::open(view_path(path));
    for (int i = 0; i < t.table().size(); ++i) {
      const auto rows = t.params().update_rows(i);
      for (const SavedTensor& p : saved_tensors(t, i, rows)) read_rows(t, i, view, p.dataset, rows.begin, p.rows);
    }
    auto number = [&](const char* name) {
      const auto v = view.integer_attribute(name);
      if (!v) throw Error(path + ": attribute " + name + " is missing");
      return *v;
    };
    const Progress p{number("step"), number("updates"), number("sequences"), number("tokens_seen")};
    if (p.step < 0 || p.updates < 0 || p.updates > p.step || p.sequences < 0 || p.tokens < 0)
      throw Error(path + ": step " + std::to_string(p.step) + ", updates " + std::to_string(p.updates) + ", sequences " +
                  std::to_string(p.sequences) + ", tokens " + std::to_string(p.tokens) + ": not the progress of a run");
    t.set_progress(p);
  });
  t.params().publish();
}

CheckpointSummary read_checkpoint_summary(const std::string& path) {
  CheckpointSummary s;
  const auto shards = verified_view(path);
  for (const FileSum& f : shards) {
    verify(path, f);
    s.shards.push_back(f.file);
    s.bytes += f.sum.bytes;
  }
  const auto view = io::Hdf5File::open(view_path(path));
  auto number = [&](const char* name) { return view.integer_attribute(name).value_or(0); };
  s.format = number("format_version");
  s.step = number("step");
  s.tokens = number("tokens_seen");
  s.sequences = number("sequences");
  s.updates = number("updates");
  s.seed = number("seed");
  s.job = view.read_text("job");
  s.layout = view.read_text("layout");
  return s;
}

}  // namespace moetrain::core
