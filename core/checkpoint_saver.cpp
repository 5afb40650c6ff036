// checkpoint_saver.cpp -- which rows a rank's files hold, the one view over them, and who does what in which thread.
#include "core/checkpoint_saver.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>

#include "core/together.h"

namespace moetrain::core {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kBlockBytes = std::int64_t(64) << 20;
constexpr std::size_t kChanging = 0, kLeft = 1;  // of SavedRows

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::int64_t bytes_of(const SavedRows& rows, Category category) {
  std::int64_t bytes = 0;
  for (const auto& tensors : rows)
    for (const SavedTensor& t : tensors)
      if (t.category == category) bytes += t.rows.bytes();
  return bytes;
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

SavedRows saved_rows(Trainer& t) {
  SavedRows all;
  for (int i = 0; i < t.table().size(); ++i)
    if (const auto rows = t.params().shard(i); rows.count() > 0)
      for (SavedTensor& tensor : saved_tensors(t, i, rows)) all[t.table()[i].frozen ? kLeft : kChanging].push_back(std::move(tensor));
  return all;
}

HostCopy::HostCopy(Memory& host, const SavedRows& rows)
    : weights_(host, Category::weights, DType::u8, {bytes_of(rows, Category::weights)}),
      optimizer_(host, Category::optimizer, DType::u8, {bytes_of(rows, Category::optimizer)}) {}

bool HostCopy::fits(const SavedRows& rows) const {
  return weights_.view().bytes() == bytes_of(rows, Category::weights) && optimizer_.view().bytes() == bytes_of(rows, Category::optimizer);
}

void HostCopy::take(Device from, SavedRows& rows) {
  auto* weights = static_cast<std::byte*>(weights_.view().data);
  auto* optimizer = static_cast<std::byte*>(optimizer_.view().data);
  for (auto& tensors : rows)
    for (SavedTensor& t : tensors) {
      std::byte*& to = t.category == Category::weights ? weights : optimizer;
      copy_to_host(from, to, t.rows.data, t.rows.bytes());
      t.rows = Tensor(to, t.rows.dtype, t.rows.shape);
      to += t.rows.bytes();
    }
}

CheckpointSaver::CheckpointSaver(Trainer& trainer, std::string folder, std::int64_t keep, std::function<void(const Saved&)> saved)
    : trainer_(trainer), control_(*trainer.mesh().world().control), folder_(std::move(folder)), keep_(keep), saved_(std::move(saved)) {
  for (int i = 0; i < trainer.table().size(); ++i) {
    const Param& p = trainer.table()[i];
    shapes_.push_back(p.shape);
    frozen_.push_back(p.frozen);
    for (const SavedTensor& t : saved_tensors(trainer, i, trainer.params().shard(i))) view_.push_back({t.dataset, t.rows.dtype, i});
  }
}

void CheckpointSaver::save() {
  start(/*beside=*/false);
  finish();
}

void CheckpointSaver::begin() { start(/*beside=*/true); }

void CheckpointSaver::start(bool beside) {
  finish();
  trainer_.enter(MemoryPhase::save);
  start_ = std::chrono::steady_clock::now();
  beside_ = beside;
  step_ = trainer_.progress().step;
  const std::string path = folder_ + "/" + step_name(step_);
  const Config& c = trainer_.config();
  gather_ownership();
  try {
    together(control_, [&] {
      if (control_.rank() != 0) return;
      fs::create_directories(folder_);
      remove_all_partial(folder_);
    });
    files_.emplace(control_, path, IfThere::replaced,
                   CheckpointHeader{trainer_.progress(), c.run.seed, io::to_yaml(config_to_yaml(c)), layout_text(c)});
    trainer_.mesh().settle();  // copies wait for the device
    together(control_, [&] {
      rows_ = saved_rows(trainer_);
      linked_ = frozen_sum_ && files_->add_link(kFrozen, last_, *frozen_sum_);
      if (linked_) rows_[kLeft].clear();
      if (beside) {
        if (!copy_.fits(rows_)) {
          copy_ = {};
          copy_ = HostCopy(host_, rows_);
        }
        copy_.take(trainer_.memory().device(), rows_);
      }
      // Put off, it is done by who waits for it; so is one for which there is no thread.
      writer_ = std::async(beside ? std::launch::async | std::launch::deferred : std::launch::deferred, [this] { write_files(); });
    });
  } catch (const AgreedError& e) {
    files_.reset();
    throw AgreedError(e.rank(), not_saved() + e.what(), e.code());
  }
  copying_ = seconds_since(start_);
  stage_ = Stage::files;
}

bool CheckpointSaver::working() const {
  return writer_.valid() && writer_.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
}

void CheckpointSaver::finish() {
  while (stage_ != Stage::none) advance();
}

void CheckpointSaver::advance() {
  const Stage ended = std::exchange(stage_, Stage::none);  // what fails ends it
  if (ended == Stage::none) return;
  try {
    together(control_, [&] {
      if (writer_.valid()) writer_.get();
    });
  } catch (const AgreedError& e) {
    files_.reset();
    throw AgreedError(e.rank(), (ended == Stage::files ? not_saved() : "") + e.what(), e.code());
  }
  if (ended == Stage::files) {
    files_->share_sums();
    if (control_.rank() == 0)
      writer_ = std::async(beside_ ? std::launch::async | std::launch::deferred : std::launch::deferred, [this] { put_in_place(); });
    stage_ = Stage::place;
    return;
  }
  last_ = folder_ + "/" + step_name(step_);
  files_.reset();
  if (saved_) saved_({step_, copying_, seconds_since(start_)});
}

void CheckpointSaver::gather_ownership() {
  std::vector<Owned> mine;
  for (int i = 0; i < int(shapes_.size()); ++i) {
    const auto rows = trainer_.params().shard(i);
    const Shape& here = trainer_.params().tensors()[std::size_t(i)].shape;
    const bool cut = here.row() != shapes_[std::size_t(i)].row();
    mine.push_back({.row = trainer_.layout().first_row[std::size_t(i)] + rows.begin,
                    .rows = rows.count(),
                    .column = trainer_.layout().first_column[std::size_t(i)],
                    .columns = cut ? here[1] : 0});
  }
  owned_.resize(mine.size() * std::size_t(control_.size()));
  const parallel::Communicator::Gather piece{mine.data(), owned_.data(), std::int64_t(mine.size() * sizeof(Owned))};
  control_.all_gather({&piece, 1});
}

void CheckpointSaver::write_files() {
  const bool any_left = std::find(frozen_.begin(), frozen_.end(), true) != frozen_.end();
  if (any_left && !linked_) {
    files_->add(kFrozen, [&](const std::string& path) { write_file(path, rows_[kLeft]); });
    frozen_sum_ = files_->sum(0);
  }
  files_->add(kShard, [&](const std::string& path) { write_file(path, rows_[kChanging]); });
}

// The library makes the places, and the values go there without it: others may use it meanwhile.
void CheckpointSaver::write_file(const std::string& path, const std::vector<SavedTensor>& rows) const {
  std::vector<std::int64_t> places;
  auto hdf5 = io::Hdf5File::create(path);
  for (const SavedTensor& t : rows) places.push_back(hdf5.reserve(t.dataset, t.rows.dtype, t.rows.shape));
  hdf5.close();
  io::RawFile file(path);
  const bool on_host = beside_ || trainer_.memory().device() == Device::cpu;
  std::vector<std::byte> block;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto* data = static_cast<const std::byte*>(rows[i].rows.data);
    for (std::int64_t at = 0, bytes = rows[i].rows.bytes(); at < bytes; at += kBlockBytes) {
      if (given_up_) throw Error(path + ": given up");
      const std::int64_t n = std::min(kBlockBytes, bytes - at);
      if (!on_host) {
        block.resize(std::size_t(std::max(n, std::int64_t(block.size()))));
        copy_to_host(trainer_.memory().device(), block.data(), data + at, n);
      }
      file.write(places[i] + at, on_host ? data + at : block.data(), n);
    }
  }
  file.finish();
}

void CheckpointSaver::declare(io::Hdf5File& file) const {
  const std::size_t params = shapes_.size();
  for (const ViewTensor& t : view_) {
    const auto i = std::size_t(t.param);
    std::vector<io::VirtualSource> sources;
    for (int r = 0; r < control_.size(); ++r)
      if (const Owned& at = owned_[std::size_t(r) * params + i]; at.rows > 0)
        sources.push_back({file_name(frozen_[i] ? kFrozen : kShard, r), t.dataset, at.row, at.rows, at.column, at.columns});
    file.create_virtual(t.dataset, t.dtype, shapes_[i], sources);
  }
}

void CheckpointSaver::put_in_place() {
  const std::string name = step_name(step_);
  if (const auto failed = failure_of([&] { files_->appear([&](io::Hdf5File& file) { declare(file); }); }))
    throw Error(not_saved() + failed->what(), failed->code());
  const auto failed = failure_of([&] {
    io::sync_folder(folder_);
    io::write_text_atomically(folder_ + "/latest", name + "\n");
    remove_older(folder_, step_, keep_);
  });
  if (failed) throw Error("checkpoint " + folder_ + "/" + name + " is complete, but latest was not updated: " + failed->what(), failed->code());
}

}  // namespace moetrain::core
