// checkpoint.cpp -- shards, the virtual view over them, and the order of writing that makes a checkpoint complete or absent.
#include "core/checkpoint.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include "core/together.h"
#include "io/files.h"
#include "io/hdf5_file.h"

namespace moetrain::core {
namespace fs = std::filesystem;
namespace {

constexpr const char* kView = "checkpoint.h5";
constexpr const char* kViewChecksum = "checkpoint.crc32";
constexpr const char* kPartial = ".partial";

std::string numbered(const char* format, long long n) {
  char text[64];
  std::snprintf(text, sizeof text, format, n);
  return text;
}
std::string step_name(std::int64_t step) { return numbered("step_%08lld", step); }
std::string shard_name(int rank) { return numbered("shard_%05lld.h5", rank); }

std::string checksum_line(const std::string& file, const io::Checksum& c) {
  return file + " " + std::to_string(c.bytes) + " " + numbered("%08llx", c.crc32) + "\n";
}

struct FileSum {
  std::string file;
  io::Checksum sum;
};
std::vector<FileSum> parse_checksums(const std::string& text, const std::string& path) {
  std::vector<FileSum> sums;
  std::istringstream lines(text);
  std::string file, crc;
  std::int64_t bytes = 0;
  while (lines >> file >> bytes >> crc) {
    std::uint32_t value = 0;
    const auto end = std::from_chars(crc.data(), crc.data() + crc.size(), value, 16);
    if (end.ptr != crc.data() + crc.size()) throw Error(path + ": unreadable checksum '" + crc + "' of " + file);
    sums.push_back({file, {value, bytes}});
  }
  if (sums.empty()) throw Error(path + ": lists no files");
  return sums;
}

void verify(const std::string& folder, const FileSum& f) {
  const std::string path = folder + "/" + f.file;
  if (!fs::exists(path)) throw Error(path + ": missing; the checkpoint is not complete");
  if (!fs::is_regular_file(path)) throw Error(path + ": not a file; the checkpoint is not complete");
  const auto size = std::int64_t(fs::file_size(path));
  if (size != f.sum.bytes)
    throw Error(path + ": has " + std::to_string(size) + " bytes, was written with " + std::to_string(f.sum.bytes));
  if (io::checksum_of_file(path).crc32 != f.sum.crc32)
    throw Error(path + ": checksum differs from the one it was written with: the file is corrupt");
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
void write_shard(Trainer& t, const std::string& path) {
  auto file = io::Hdf5File::create(path);
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
  file.close();
  io::sync_file(path);
}

std::string layout_text(const Config& c) {
  const auto& p = c.parallel;
  constexpr const char* kSharding[] = {"none", "optimizer", "gradients", "full"};
  return "data_parallel " + std::to_string(p.data_parallel) + ", expert_parallel " + std::to_string(p.expert_parallel) +
         ", sequence_parallel " + std::to_string(p.sequence_parallel) + ", tensor_parallel " + std::to_string(p.tensor_parallel) +
         ", sharding " + kSharding[std::size_t(p.sharding)];
}

void write_view(Trainer& t, const std::string& folder, const Ownership& owned, const std::string& checksums) {
  const std::string path = folder + "/" + kView;
  auto file = io::Hdf5File::create(path);
  const int ranks = t.mesh().shape().ranks();
  for (int i = 0; i < t.table().size(); ++i) {
    for (const Piece& p : pieces_of(t, i, t.params().shard(i))) {
      std::vector<io::VirtualSource> sources;
      for (int r = 0; r < ranks; ++r)
        if (owned.count(r, i) > 0) sources.push_back({shard_name(r), p.dataset, owned.begin(r, i), owned.count(r, i)});
      file.create_virtual(p.dataset, p.rows.dtype, t.table()[i].shape, sources);
    }
  }
  const Progress progress = t.progress();
  file.set_attribute("format_version", kCheckpointFormat);
  file.set_attribute("step", progress.step);
  file.set_attribute("updates", progress.updates);
  file.set_attribute("sequences", progress.sequences);
  file.set_attribute("tokens_seen", progress.tokens);
  file.set_attribute("seed", std::int64_t(t.config().run.seed));
  file.write_text("job", io::to_yaml(config_to_yaml(t.config())));
  file.write_text("layout", layout_text(t.config()));
  file.write_text("shards", checksums);
  file.close();
  io::sync_file(path);
  io::write_text_atomically(folder + "/" + kViewChecksum, checksum_line(kView, io::checksum_of_file(path)));
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

// What a save that was cut short has left. Contents go first: an open file keeps its blocks past the loss of its name, and
// exit.json has to find room on a full disk.
void remove_partial(const std::string& path) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path, ignored)) fs::resize_file(entry.path(), 0, ignored);
  fs::remove_all(path, ignored);
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

// `from` takes the place of `to` at one instant, also where `to` exists (a checkpoint of an abandoned run over the same steps).
void put_in_place(const std::string& from, const std::string& to) {
  if (!fs::exists(to)) return fs::rename(from, to);
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return remove_partial(from);
  const std::string old = to + ".old" + kPartial;  // a file system that cannot exchange names: the old one is whole until the end
  fs::rename(to, old);
  std::error_code failed;
  fs::rename(from, to, failed);
  if (failed) {
    fs::rename(old, to);
    throw Error(to + ": cannot put in place: " + failed.message());
  }
  remove_partial(old);
}

}  // namespace

void save_checkpoint(Trainer& t, const std::string& folder, std::int64_t keep) {
  auto& control = *t.mesh().world().control;
  const int rank = t.mesh().rank();
  const std::string name = step_name(t.progress().step), final = folder + "/" + name, partial = final + kPartial;
  const Ownership owned = gather_ownership(t);
  try {
    together(control, [&] {
      if (rank != 0) return;
      fs::create_directories(folder);
      remove_all_partial(folder);
      fs::create_directory(partial);
    });
    io::Checksum mine;
    together(control, [&] {
      const std::string path = partial + "/" + shard_name(rank);
      write_shard(t, path);
      mine = io::checksum_of_file(path);
    });
    std::vector<io::Checksum> sums(std::size_t(control.size()));
    const parallel::Communicator::Gather piece{&mine, sums.data(), sizeof mine};
    control.all_gather({&piece, 1});
    together(control, [&] {
      if (rank != 0) return;
      std::string text;
      for (int r = 0; r < control.size(); ++r) text += checksum_line(shard_name(r), sums[std::size_t(r)]);
      write_view(t, partial, owned, text);
      io::sync_folder(partial);
      put_in_place(partial, final);
    });
  } catch (const AgreedError& e) {
    if (rank == 0) remove_partial(partial);
    throw AgreedError(e.rank(), std::string("checkpoint ") + name + " was not saved, the one before is as it was: " + e.what(),
                      e.code());
  }
  try {
    together(control, [&] {
      if (rank != 0) return;
      io::sync_folder(folder);
      io::write_text_atomically(folder + "/latest", name + "\n");
      remove_older(folder, t.progress().step, keep);
    });
  } catch (const AgreedError& e) {
    throw AgreedError(e.rank(), "checkpoint " + final + " is complete, but latest was not updated: " + e.what(), e.code());
  }
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

// The view's own file first, then what it says about the others.
std::vector<FileSum> verified_view(const std::string& path) {
  if (!fs::is_directory(path)) throw Error(path + ": not a checkpoint folder");
  const std::string sums = path + "/" + kViewChecksum;
  if (!fs::exists(sums) || !fs::exists(path + "/" + kView))
    throw Error(path + ": not a checkpoint: " + kView + " or " + kViewChecksum + " is missing");
  for (const FileSum& f : parse_checksums(io::read_text(sums), sums)) verify(path, f);
  const auto view = io::Hdf5File::open(path + "/" + kView);
  const auto format = view.integer_attribute("format_version");
  if (!format) throw Error(path + "/" + kView + ": not the view of a checkpoint: it has no format_version");
  if (*format != kCheckpointFormat)
    throw Error(path + ": format version " + std::to_string(*format) + ", this program reads " + std::to_string(kCheckpointFormat));
  return parse_checksums(view.read_text("shards"), path + "/" + kView + ":/shards");
}

// A part of a job as one line a key, so that the first difference can be named.
using Keys = std::map<std::string, std::string>;
void flatten(const io::YamlNode& node, const std::string& key, Keys& out) {
  if (node.kind == io::YamlNode::map) {
    for (const auto& [name, value] : node.entries) flatten(value, key + "." + name, out);
  } else if (node.kind == io::YamlNode::list) {
    std::string text;
    for (const auto& item : node.items) text += (text.empty() ? "" : ", ") + item.text;
    out[key] = "[" + text + "]";
  } else {
    out[key] = node.text;
  }
}

// Whole sections, and the keys of others that decide which data comes next, how it is stored and what has optimizer state.
constexpr const char* kSameRun[] = {"model", "data", "optimizer", "run.seed", "run.dtype", "training.trainable"};
constexpr const char* kFreeToChange[] = {"data.eval", "model.init_from", "model.preset"};

Keys identity_of(const io::YamlNode& job) {
  Keys keys;
  for (const std::string path : kSameRun) {
    const auto dot = path.find('.');
    const io::YamlNode* node = job.find(path.substr(0, dot));
    if (node != nullptr && dot != path.npos) node = node->find(path.substr(dot + 1));
    if (node != nullptr) flatten(*node, path, keys);
  }
  for (const char* key : kFreeToChange) keys.erase(key);
  return keys;
}

void check_same_run(const io::YamlNode& here, const io::YamlNode& there, const std::string& path) {
  const Keys mine = identity_of(here), theirs = identity_of(there);
  std::set<std::string> names;
  for (const Keys* keys : {&mine, &theirs})
    for (const auto& [name, value] : *keys) names.insert(name);
  const auto value_of = [](const Keys& keys, const std::string& name) {
    const auto found = keys.find(name);
    return found == keys.end() || found->second.empty() ? std::string("absent") : "'" + found->second + "'";
  };
  for (const std::string& name : names)
    if (const std::string a = value_of(mine, name), b = value_of(theirs, name); a != b)
      throw Error(path + ": belongs to another job: " + name + " is " + b + " there and " + a +
                      " here; use another run.dir, or --resume " + path + " to start from it",
                  ExitCode::bad_job);
}

void check_fits(Trainer& t, const io::Hdf5File& view, const std::string& path) {
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
  check_same_run(config_to_yaml(config), io::parse_yaml(io::Hdf5File::open(path + "/" + kView).read_text("job"), path + ":/job"), path);
}

void load_checkpoint(Trainer& t, const std::string& path, bool same_run) {
  auto& control = *t.mesh().world().control;
  std::vector<FileSum> shards;
  together(control, [&] {
    shards = verified_view(path);
    const auto view = io::Hdf5File::open(path + "/" + kView);
    if (same_run) check_same_run(config_to_yaml(t.config()), io::parse_yaml(view.read_text("job"), path + ":/job"), path);
    check_fits(t, view, path);
  });
  together(control, [&] {  // each rank its share of the files, since a checkpoint of many terabytes is read once
    for (std::size_t f = std::size_t(control.rank()); f < shards.size(); f += std::size_t(control.size())) verify(path, shards[f]);
  });
  together(control, [&] {
    const auto view = io::Hdf5File::open(path + "/" + kView);
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
  const auto view = io::Hdf5File::open(path + "/" + kView);
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
