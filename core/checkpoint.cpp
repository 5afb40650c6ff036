// checkpoint.cpp -- shards, the virtual view over them, and the order of writing that makes a checkpoint complete or absent.
#include "core/checkpoint.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <sstream>

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
  const auto size = std::int64_t(fs::file_size(path));
  if (size != f.sum.bytes) throw Error(path + ": has " + std::to_string(size) + " bytes, was written with " + std::to_string(f.sum.bytes));
  if (io::checksum_of_file(path).crc32 != f.sum.crc32) throw Error(path + ": checksum differs from the one it was written with: the file is corrupt");
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
  return "data_parallel " + std::to_string(p.data_parallel) + ", expert_parallel " + std::to_string(p.expert_parallel) + ", sequence_parallel " +
         std::to_string(p.sequence_parallel) + ", tensor_parallel " + std::to_string(p.tensor_parallel) + ", sharding " +
         kSharding[std::size_t(p.sharding)];
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

// Keeps the newest `keep`, the one just written among them. Those of later steps belong to a run that was abandoned: they go first.
void remove_older(const std::string& folder, const std::string& written, std::int64_t keep) {
  std::vector<std::string> steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("step_") && !name.ends_with(kPartial) && name != written) steps.push_back(name);
  }
  std::sort(steps.begin(), steps.end(), [&](const std::string& a, const std::string& b) { return std::pair(a < written, a) < std::pair(b < written, b); });
  std::error_code failed;
  for (std::size_t i = 0; keep > 0 && i + std::size_t(keep) <= steps.size(); ++i) {
    fs::remove_all(folder + "/" + steps[i], failed);
    if (failed) spdlog::warn("{}/{}: not removed: {}", folder, steps[i], failed.message());
  }
}

// `from` takes the place of `to` at one instant, also where `to` exists (a checkpoint of an abandoned run over the same steps).
void put_in_place(const std::string& from, const std::string& to) {
  if (!fs::exists(to)) return fs::rename(from, to);
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) fs::remove_all(to), fs::rename(from, to);
  else fs::remove_all(from);
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
      fs::remove_all(partial);
      fs::create_directories(partial);
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
      io::sync_folder(folder);
      io::write_text_atomically(folder + "/latest", name + "\n");
      remove_older(folder, name, keep);
    });
  } catch (const AgreedError& e) {
    std::error_code ignored;
    if (rank == 0) fs::remove_all(partial, ignored);
    throw AgreedError(e.rank(), std::string("checkpoint ") + name + " was not saved, the one before is as it was: " + e.what(), e.code());
  }
}

std::string latest_checkpoint(const std::string& folder) {
  const std::string pointer = folder + "/latest";
  if (!fs::exists(pointer)) return {};
  std::string name = io::read_text(pointer);
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r' || name.back() == ' ')) name.pop_back();
  if (name.empty() || name.find('/') != name.npos || !fs::is_directory(folder + "/" + name))
    throw Error(pointer + ": names '" + name + "', which is not a checkpoint folder beside it");
  return folder + "/" + name;
}

namespace {

// The view's own file first, then what it says about the others.
std::vector<FileSum> verified_view(const std::string& path) {
  if (!fs::is_directory(path)) throw Error(path + ": not a checkpoint folder");
  const std::string sums = path + "/" + kViewChecksum;
  if (!fs::exists(sums) || !fs::exists(path + "/" + kView)) throw Error(path + ": not a checkpoint: " + kView + " or " + kViewChecksum + " is missing");
  for (const FileSum& f : parse_checksums(io::read_text(sums), sums)) verify(path, f);
  const auto view = io::Hdf5File::open(path + "/" + kView);
  if (view.integer_attribute("format_version").value_or(-1) != kCheckpointFormat)
    throw Error(path + ": format version " + std::to_string(view.integer_attribute("format_version").value_or(-1)) + ", this program reads " +
                std::to_string(kCheckpointFormat));
  return parse_checksums(view.read_text("shards"), path + "/" + kView + ":/shards");
}

// model, data and optimizer as one line a key, so that the first difference can be named.
void flatten(const io::YamlNode& node, const std::string& key, std::vector<std::pair<std::string, std::string>>& out) {
  if (node.kind == io::YamlNode::map)
    for (const auto& [name, value] : node.entries) flatten(value, key.empty() ? name : key + "." + name, out);
  else if (node.kind == io::YamlNode::list) {
    std::string text;
    for (const auto& item : node.items) text += (text.empty() ? "" : ", ") + item.text;
    out.emplace_back(key, text);
  } else
    out.emplace_back(key, node.text);
}

void check_same_run(const io::YamlNode& mine, const io::YamlNode& theirs, const std::string& path) {
  for (const char* section : {"model", "data", "optimizer"}) {
    std::vector<std::pair<std::string, std::string>> a, b;
    if (const auto* node = mine.find(section)) flatten(*node, section, a);
    if (const auto* node = theirs.find(section)) flatten(*node, section, b);
    for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
      const auto& x = i < a.size() ? a[i] : std::pair<std::string, std::string>{b[i].first, "absent"};
      const auto& y = i < b.size() ? b[i] : std::pair<std::string, std::string>{a[i].first, "absent"};
      const bool evaluation = x.first == "data.eval" || x.first == "model.init_from";  // may change between runs of one curve
      if (x != y && !evaluation)
        throw Error(path + ": belongs to another job: " + y.first + " is '" + y.second + "' there and " + x.first + " is '" + x.second +
                        "' here; use another run.dir, or --resume " + path + " to start from it",
                    ExitCode::bad_job);
    }
  }
}

void check_fits(Trainer& t, const io::Hdf5File& view, const std::string& path) {
  for (int i = 0; i < t.table().size(); ++i)
    for (const Piece& p : pieces_of(t, i, t.params().shard(i))) {
      if (!view.has(p.dataset)) throw Error(path + ": holds no tensor " + p.dataset);
      const auto info = view.info(p.dataset);
      if (info.shape != t.table()[i].shape || info.dtype != p.rows.dtype)
        throw Error(path + ": " + p.dataset + " is " + info.type + " " + info.shape.text() + " there, this job needs " + name_of(p.rows.dtype) + " " +
                    t.table()[i].shape.text());
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

void load_checkpoint(Trainer& t, const std::string& path, bool same_run) {
  auto& control = *t.mesh().world().control;
  std::vector<FileSum> shards;
  together(control, [&] { shards = verified_view(path); });
  together(control, [&] {  // each rank its share of the files, since a checkpoint of many terabytes is read once
    for (std::size_t f = std::size_t(control.rank()); f < shards.size(); f += std::size_t(control.size())) verify(path, shards[f]);
  });
  together(control, [&] {
    const auto view = io::Hdf5File::open(path + "/" + kView);
    if (same_run) check_same_run(config_to_yaml(t.config()), io::parse_yaml(view.read_text("job"), path + ":/job"), path);
    check_fits(t, view, path);
    for (int i = 0; i < t.table().size(); ++i) {
      const auto rows = t.params().update_rows(i);
      for (const Piece& p : pieces_of(t, i, rows)) read_rows(t, view, p.dataset, t.layout().first_row[std::size_t(i)] + rows.begin, p.rows);
    }
    auto number = [&](const char* name) {
      const auto v = view.integer_attribute(name);
      if (!v) throw Error(path + ": attribute " + name + " is missing");
      return *v;
    };
    t.set_progress({number("step"), number("updates"), number("sequences"), number("tokens_seen")});
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
