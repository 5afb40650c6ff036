// checkpoint_files.cpp -- shards, the view over them, and the checksums that vouch for both.
#include "core/checkpoint_files.h"

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "core/checkpoint.h"
#include "core/host_values.h"
#include "core/together.h"

namespace moetrain::core {
namespace fs = std::filesystem;
namespace {

constexpr const char* kView = "checkpoint.h5";
constexpr const char* kViewChecksum = "checkpoint.crc32";

std::string numbered(const char* format, long long n) {
  char text[64];
  std::snprintf(text, sizeof text, format, n);
  return text;
}
std::string checksum_line(const std::string& file, const io::Checksum& c) {
  return file + " " + std::to_string(c.bytes) + " " + numbered("%08llx", c.crc32) + "\n";
}

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

void write_view(const std::string& folder, const CheckpointHeader& header, const std::string& checksums,
                const std::function<void(io::Hdf5File&)>& view) {
  const std::string path = view_path(folder);
  auto file = io::Hdf5File::create(path);
  view(file);
  file.set_attribute("format_version", kCheckpointFormat);
  file.set_attribute("step", header.progress.step);
  file.set_attribute("updates", header.progress.updates);
  file.set_attribute("sequences", header.progress.sequences);
  file.set_attribute("tokens_seen", header.progress.tokens);
  file.set_attribute("seed", std::int64_t(header.seed));
  file.write_text("job", header.job);
  file.write_text("layout", header.layout);
  file.write_text("shards", checksums);
  file.close();
  io::sync_file(path);
  io::write_text_atomically(folder + "/" + kViewChecksum, checksum_line(kView, io::checksum_of_file(path)));
}

}  // namespace

std::string view_path(const std::string& checkpoint) { return checkpoint + "/" + kView; }
std::string file_name(const char* kind, int rank) { return kind + numbered("_%05lld.h5", rank); }

std::string layout_text(const Config& c) {
  const auto& p = c.parallel;
  constexpr const char* kSharding[] = {"none", "optimizer", "gradients", "full"};
  return "data_parallel " + std::to_string(p.data_parallel) + ", expert_parallel " + std::to_string(p.expert_parallel) +
         ", sequence_parallel " + std::to_string(p.sequence_parallel) + ", tensor_parallel " + std::to_string(p.tensor_parallel) +
         ", sharding " + kSharding[std::size_t(p.sharding)];
}

Config config_of(const io::Hdf5File& view) {
  const std::string name = view.path() + ":/job";
  std::vector<Fault> faults;
  Config config = read_config(io::parse_yaml(view.read_text("job"), name), {}, ".", faults);
  for (const Fault& f : faults)
    if (f.key.starts_with("model") || f.key.starts_with("lora")) throw Error(name + ": " + f.key + ": " + f.text);
  return config;
}

DType dtype_in(const io::Hdf5File& view, const Param& p) {
  if (!view.has(p.name)) throw Error(view.path() + ": holds no tensor " + p.name);
  const auto info = view.info(p.name);
  if (info.shape != p.shape || !is_floating(info.dtype))
    throw Error(view.path() + ": " + p.name + " is " + info.type + " " + info.shape.text() + ", its job makes it " + p.shape.text());
  return info.dtype;
}

WeightSource weights_of(std::shared_ptr<const io::Hdf5File> view, std::shared_ptr<const ParamTable> table) {
  return {view->path(), [view, table](int param, std::int64_t first, Tensor to) {
            const std::string& plain = (*table)[param].name;
            const std::string name = view->has("master/" + plain) ? "master/" + plain : plain;
            const DType dtype = view->info(name).dtype;
            if (dtype == to.dtype) return view->read_rows(name, first, to);
            std::vector<std::byte> raw(std::size_t(to.count() * size_of(dtype)));
            const Tensor rows(raw.data(), dtype, to.shape);
            view->read_rows(name, first, rows);
            convert(rows, to);
          }};
}

CheckpointFiles::CheckpointFiles(parallel::Communicator& control, const std::string& path, IfThere if_there, CheckpointHeader header)
    : control_(control), header_(std::move(header)), folder_(control, path, if_there) {}

void CheckpointFiles::add(const char* kind, const std::function<void(const std::string&)>& write) {
  const std::string file = folder_.partial() + "/" + file_name(kind, control_.rank());
  write(file);
  io::sync_file(file);
  mine_.push_back(io::checksum_of_file(file));
  kinds_.push_back(kind);
}

bool CheckpointFiles::add_link(const char* kind, const std::string& checkpoint, const io::Checksum& sum) {
  const std::string name = "/" + file_name(kind, control_.rank());
  if (!io::link_file(checkpoint + name, folder_.partial() + name, sum.bytes)) return false;
  mine_.push_back(sum);
  kinds_.push_back(kind);
  return true;
}

void CheckpointFiles::share_sums() {
  all_.resize(mine_.size() * std::size_t(control_.size()));
  const parallel::Communicator::Gather piece{mine_.data(), all_.data(), std::int64_t(mine_.size() * sizeof(io::Checksum))};
  control_.all_gather({&piece, 1});
}

void CheckpointFiles::appear(const std::function<void(io::Hdf5File&)>& view) {
  folder_.appear([&] {
    std::string text;
    for (std::size_t k = 0; k < kinds_.size(); ++k)
      for (int r = 0; r < control_.size(); ++r)
        text += checksum_line(file_name(kinds_[k], r), all_[std::size_t(r) * kinds_.size() + k]);
    write_view(folder_.partial(), header_, text, view);
  });
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

void verify_shards(parallel::Communicator& control, const std::string& checkpoint, const std::vector<FileSum>& shards) {
  together(control, [&] {
    for (std::size_t f = std::size_t(control.rank()); f < shards.size(); f += std::size_t(control.size()))
      verify(checkpoint, shards[f]);
  });
}

void open_verified(parallel::Communicator& control, const std::string& checkpoint, const std::function<void()>& open) {
  std::vector<FileSum> shards;
  together(control, [&] {
    shards = verified_view(checkpoint);
    open();
  });
  verify_shards(control, checkpoint, shards);
}

}  // namespace moetrain::core
