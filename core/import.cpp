// import.cpp -- rows of every parameter, in pieces, from where they are to where they go. Pieces start as NaN, and none may remain.
#include "core/import.h"

#include <spdlog/spdlog.h>

#include <cstring>
#include <filesystem>
#include <memory>

#include "core/checkpoint.h"
#include "core/checkpoint_files.h"
#include "core/hf_weights.h"
#include "core/host_values.h"
#include "core/job_difference.h"
#include "core/lora.h"
#include "core/together.h"
#include "core/weight_pieces.h"

namespace moetrain::core {
namespace fs = std::filesystem;
namespace {

DType stored_dtype(const Param& p, DType run) { return p.pinned ? real_of(run) : run; }

void write_rows(const ParamTable& table, const Config& c, int rank, int ranks, const WeightSource& source, io::Hdf5File& file) {
  for (int i = 0; i < table.size(); ++i) {
    const Param& p = table[i];
    const parallel::Rows mine = parallel::shard_of(p.shape[0], rank, ranks);
    if (mine.count() == 0) continue;
    const DType dtype = stored_dtype(p, c.run.dtype);
    file.create_dataset(p.name, dtype, p.shape.with_dim0(mine.count()));
    for_each_piece(source, p, i, mine, dtype,
                   [&](std::int64_t first, Tensor rows) { file.write_rows(p.name, first - mine.begin, rows); });
  }
}

void write_view(const ParamTable& table, const Config& c, int ranks, io::Hdf5File& file) {
  for (const Param& p : table.all()) {
    std::vector<io::VirtualSource> sources;
    for (int r = 0; r < ranks; ++r)
      if (const auto rows = parallel::shard_of(p.shape[0], r, ranks); rows.count() > 0)
        sources.push_back({file_name(kShard, r), p.name, rows.begin, rows.count()});
    file.create_virtual(p.name, stored_dtype(p, c.run.dtype), p.shape, sources);
  }
}

void check_same_model(const Config& job, const ModelConfig& model, const std::string& path) {
  if (const auto d = model_difference(job.model, model))
    throw Error("model.init_from: " + path + " is another model: " + d->text(), ExitCode::bad_job);
}

// Where a run's weights come from: the first `params` of its table; what is beyond them, adapters, starts fresh.
struct Found {
  WeightSource weights;
  int params = 0;
};

Found find_in_folder(const Trainer& t, const std::string& path) {
  if (!fs::exists(path + "/config.json"))
    throw Error("model.init_from: " + path +
                ": neither a Hugging Face folder, which has a config.json, nor one of a checkpoint or run");
  const HfModel source = read_hf_model(path);
  check_same_model(t.config(), source.model, path);
  const ParamTable own = parameters_of(source.model);
  const auto weights = std::make_shared<HfWeights>(path, source, own);
  return {{path, [weights](int param, std::int64_t first, Tensor to) { weights->read(param, first, to); }}, own.size()};
}

// A checkpoint with the adapters of this job goes on with them; any others are merged.
Found find_in_checkpoint(const Trainer& t, const std::string& path) {
  const auto view = std::make_shared<io::Hdf5File>(io::Hdf5File::open(view_path(path)));
  const Config there = config_of(*view);
  check_same_model(t.config(), there.model, path);
  const auto table = std::make_shared<const ParamTable>(parameters_of(there));
  for (const Param& p : table->all()) {
    if (!view->has(p.name)) throw Error(path + ": holds no tensor " + p.name);
    const auto info = view->info(p.name);
    if (info.shape != p.shape || !is_floating(info.dtype))
      throw Error(path + ": " + p.name + " is " + info.type + " " + info.shape.text() + " there, this model needs " +
                  p.shape.text());
  }
  const WeightSource weights = weights_of(view, table);
  if (!adapter_difference(t.config(), there)) return {weights, t.table().size()};
  return {merged(weights, *table), parameters_of(there.model).size()};
}

// Columns [column, column + width) of rows of a matrix, in a buffer.
Tensor columns_of(ConstTensor rows, std::int64_t column, std::int64_t width, std::vector<std::byte>& buffer) {
  const std::int64_t size = size_of(rows.dtype), from = rows.shape[1] * size, to = width * size;
  buffer.resize(std::size_t(rows.shape[0] * to));
  for (std::int64_t r = 0; r < rows.shape[0]; ++r)
    std::memcpy(buffer.data() + r * to, static_cast<const std::byte*>(rows.data) + r * from + column * size, std::size_t(to));
  return {buffer.data(), rows.dtype, {rows.shape[0], width}};
}

// A piece of `name`, from its element `first` on, to where the run keeps it, in the type it is kept in there.
void put(Trainer& t, const std::string& name, std::int64_t first, ConstTensor piece, Tensor to) {
  std::vector<std::byte> host(std::size_t(to.bytes()));
  const Tensor kept(host.data(), to.dtype, to.shape);
  convert(piece, kept);
  if (const std::int64_t at = first_not_finite(kept); at >= 0)
    throw Error(name + ": element " + std::to_string(first + at) + " is larger than " + name_of(to.dtype) +
                ", in which this job keeps it, can hold");
  copy_to_device(t.memory().device(), to.data, host.data(), to.bytes());
}

}  // namespace

Config import_folder(parallel::Communicator& control, const std::string& folder, const std::string& out) {
  Config c;
  ParamTable table;
  std::unique_ptr<HfWeights> weights;
  together(control, [&] {
    if (!fs::is_directory(folder)) throw Error(folder + ": no such folder", ExitCode::bad_job);
    const HfModel source = read_hf_model(folder);
    c.model = source.model;
    table = parameters_of(c.model);
    weights = std::make_unique<HfWeights>(folder, source, table);
    c.run.dtype = weights->dtype();
    if (control.rank() == 0)
      spdlog::info("{}: {} tensors, {} parameters, {}{}", folder, weights->tensors(), table.count(), name_of(c.run.dtype),
                   source.vision ? "; those of the vision tower are left out" : "");
  });
  const WeightSource source{folder, [&](int param, std::int64_t first, Tensor to) { weights->read(param, first, to); }};
  CheckpointFiles files(control, out, IfThere::refused, {{}, c.run.seed, io::to_yaml(config_to_yaml(c)), "imported by " + std::to_string(control.size()) + " ranks"});
  together(control, [&] {
    files.add(kShard, [&](const std::string& path) {
      auto file = io::Hdf5File::create(path);
      write_rows(table, c, control.rank(), control.size(), source, file);
      file.close();
    });
  });
  files.share_sums();
  together(control, [&] {
    if (control.rank() == 0) files.appear([&](io::Hdf5File& view) { write_view(table, c, control.size(), view); });
  });
  return c;
}

void initialize_from(Trainer& t, const std::string& path) {
  auto& control = *t.mesh().world().control;
  Found found;
  std::vector<FileSum> shards;
  std::string checkpoint;
  together(control, [&] {
    checkpoint = checkpoint_at(path);
    if (!checkpoint.empty()) shards = verified_view(checkpoint);
    found = checkpoint.empty() ? find_in_folder(t, path) : find_in_checkpoint(t, checkpoint);
  });
  verify_shards(control, checkpoint, shards);
  together(control, [&] {
    for (int i = found.params; i < t.table().size(); ++i) t.initialize(i);
    for (int i = 0; i < found.params; ++i) {
      const auto rows = t.params().update_rows(i);
      const std::int64_t whole = t.layout().first_row[std::size_t(i)];
      for_each_piece(found.weights, t.table()[i], i, {whole + rows.begin, whole + rows.end}, real_of(t.config().run.dtype),
                     [&](std::int64_t first, Tensor piece) {
                       const parallel::Rows here{first - whole, first - whole + piece.shape[0]};
                       const Param& p = t.table()[i];
                       std::vector<std::byte> buffer;
                       if (const std::int64_t width = t.layout().tensors[std::size_t(i)].shape.row(); width < p.shape.row())
                         piece = columns_of(piece, t.layout().first_column[std::size_t(i)], width, buffer);
                       put(t, p.name, first * p.shape.row(), piece, t.params().stored(i, here));
                       if (t.optimizer().has_master(i)) put(t, p.name, first * p.shape.row(), piece, t.optimizer().master(i, here));
                     });
    }
  });
  t.params().publish();
}

}  // namespace moetrain::core
