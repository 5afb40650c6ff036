// checkpoint.cpp -- which rows of a run a shard holds, the one view over them, and loading under any layout.
#include "core/checkpoint.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <string_view>

#include "core/checkpoint_files.h"
#include "core/job_difference.h"
#include "core/together.h"
#include "core/whole_folder.h"

namespace moetrain::core {
namespace fs = std::filesystem;
namespace {

std::string step_name(std::int64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "step_%08lld", static_cast<long long>(step));
  return text;
}

// The tensors of a parameter that a checkpoint holds, as (data set, rows held here).
struct Piece {
  std::string dataset;
  Tensor rows;
};
std::vector<Piece> pieces_of(Trainer& t, int i, parallel::Rows rows) {
  const std::string& name = t.table()[i].name;
  std::vector<Piece> pieces{{name, t.params().stored(i, rows)}};
  if (t.optimizer().has_master(i)) pieces.push_back({"master/" + name, t.optimizer().master(i, rows)});
  if (t.optimizer().has_state(i)) {
    pieces.push_back({"optimizer/exp_avg/" + name, t.optimizer().exp_avg(i, rows)});
    pieces.push_back({"optimizer/exp_avg_sq/" + name, t.optimizer().exp_avg_sq(i, rows)});
  }
  return pieces;
}

// Rows of each parameter that each rank's shard file holds, in rows of the whole tensor.
struct Ownership {
  int params;
  std::vector<std::int64_t> begin_count;  // (ranks, params, 2)
  std::int64_t begin(int rank, int i) const { return begin_count[std::size_t((std::int64_t(rank) * params + i) * 2)]; }
  std::int64_t count(int rank, int i) const { return begin_count[std::size_t((std::int64_t(rank) * params + i) * 2 + 1)]; }
};
Ownership gather_ownership(Trainer& t) {
  auto& control = *t.mesh().world().control;
  const int n = t.table().size();
  std::vector<std::int64_t> mine;
  for (int i = 0; i < n; ++i) {
    const auto rows = t.params().shard(i);
    mine.push_back(t.layout().first_row[std::size_t(i)] + rows.begin);
    mine.push_back(rows.count());
  }
  Ownership o{n, std::vector<std::int64_t>(mine.size() * std::size_t(control.size()))};
  const parallel::Communicator::Gather piece{mine.data(), o.begin_count.data(), std::int64_t(mine.size() * sizeof(std::int64_t))};
  control.all_gather({&piece, 1});
  return o;
}

// One tensor's rows through host memory, since HDF5 reads and writes host pointers.
void write_shard(Trainer& t, io::Hdf5File& file) {
  std::vector<std::byte> host;
  for (int i = 0; i < t.table().size(); ++i) {
    const auto rows = t.params().shard(i);
    if (rows.count() == 0) continue;
    for (const Piece& p : pieces_of(t, i, rows)) {
      host.resize(std::size_t(p.rows.bytes()));
      copy_to_host(t.memory().device(), host.data(), p.rows.data, p.rows.bytes());
      file.write(p.dataset, ConstTensor(host.data(), p.rows.dtype, p.rows.shape));
    }
  }
}

void write_view(Trainer& t, const Ownership& owned, io::Hdf5File& file) {
  const int ranks = t.mesh().shape().ranks();
  for (int i = 0; i < t.table().size(); ++i) {
    for (const Piece& p : pieces_of(t, i, t.params().shard(i))) {
      std::vector<io::VirtualSource> sources;
      for (int r = 0; r < ranks; ++r)
        if (owned.count(r, i) > 0) sources.push_back({shard_name(r), p.dataset, owned.begin(r, i), owned.count(r, i)});
      file.create_virtual(p.dataset, p.rows.dtype, t.table()[i].shape, sources);
    }
  }
}

// The step of a folder named step_00000100; nothing for any other name, a user's copy among them.
std::optional<std::int64_t> step_of(const std::string& name) {
  constexpr std::string_view kStep = "step_";
  std::int64_t step = -1;
  if (!name.starts_with(kStep)) return {};
  const char *first = name.data() + kStep.size(), *last = name.data() + name.size();
  if (const auto [end, failed] = std::from_chars(first, last, step); failed != std::errc() || end != last) return {};
  return name == step_name(step) ? std::optional(step) : std::nullopt;
}

void remove_all_partial(const std::string& folder) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto name = entry.path().filename().string(); name.starts_with("step_") && name.ends_with(kPartial))
      found.push_back(entry.path());
  for (const auto& path : found) remove_partial(path);
}

// Keeps the newest `keep`, the one just written among them. Those of later steps belong to a run that was abandoned: they go first.
// What cannot be removed costs a warning, not the run.
void remove_older(const std::string& folder, std::int64_t written, std::int64_t keep) {
  if (keep == 0) return;
  std::vector<std::int64_t> steps;
  std::error_code failed;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed))
    if (const auto step = step_of(entry->path().filename().string()); step && *step != written) steps.push_back(*step);
  if (failed) spdlog::warn("{}: older checkpoints not removed: {}", folder, failed.message());
  std::sort(steps.begin(), steps.end(),
            [&](std::int64_t a, std::int64_t b) { return std::pair(a < written, a) < std::pair(b < written, b); });
  for (std::size_t i = 0; i + std::size_t(keep) <= steps.size(); ++i) {
    const std::string path = folder + "/" + step_name(steps[i]);
    fs::remove_all(path, failed);
    if (failed) spdlog::warn("{}: not removed: {}", path, failed.message());
  }
}

}  // namespace

void save_checkpoint(Trainer& t, const std::string& folder, std::int64_t keep) {
  auto& control = *t.mesh().world().control;
  const std::string name = step_name(t.progress().step), final = folder + "/" + name;
  const Ownership owned = gather_ownership(t);
  const CheckpointHeader header{t.progress(), t.config().run.seed, io::to_yaml(config_to_yaml(t.config())), layout_text(t.config())};
  try {
    together(control, [&] {
      if (control.rank() != 0) return;
      fs::create_directories(folder);
      remove_all_partial(folder);
    });
    write_checkpoint(
        control, final, header, [&](io::Hdf5File& file) { write_shard(t, file); }, [&](io::Hdf5File& file) { write_view(t, owned, file); });
  } catch (const AgreedError& e) {
    throw AgreedError(e.rank(), std::string("checkpoint ") + name + " was not saved, the one before is as it was: " + e.what(),
                      e.code());
  }
  try {
    together(control, [&] {
      if (control.rank() != 0) return;
      io::sync_folder(folder);
      io::write_text_atomically(folder + "/latest", name + "\n");
      remove_older(folder, t.progress().step, keep);
    });
  } catch (const AgreedError& e) {
    throw AgreedError(e.rank(), "checkpoint " + final + " is complete, but latest was not updated: " + e.what(), e.code());
  }
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
    for (const Piece& p : pieces_of(t, i, t.params().shard(i))) {
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

void read_rows(Trainer& t, const io::Hdf5File& view, const std::string& dataset, std::int64_t first, Tensor to) {
  if (to.count() == 0) return;
  if (t.memory().device() == Device::cpu) return view.read_rows(dataset, first, to);
  std::vector<std::byte> host(std::size_t(to.bytes()));
  view.read_rows(dataset, first, Tensor(host.data(), to.dtype, to.shape));
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
      for (const Piece& p : pieces_of(t, i, rows))
        read_rows(t, view, p.dataset, t.layout().first_row[std::size_t(i)] + rows.begin, p.rows);
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
