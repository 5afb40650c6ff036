// export.cpp -- which tensor goes into which file, and its rows from the checkpoint into it.
#include "core/export.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include "core/checkpoint_files.h"
#include "core/hf_names.h"
#include "core/lora.h"
#include "core/model.h"
#include "core/together.h"
#include "core/weight_pieces.h"
#include "core/whole_folder.h"
#include "io/hf_config.h"
#include "io/safetensors.h"

namespace moetrain::core {
namespace {

// What is in the checkpoint, and the files it is to become.
struct Source {
  ModelConfig model;
  ParamTable table;           // of the model alone
  std::vector<DType> dtypes;  // by parameter
  WeightSource weights;       // adapters merged in
};
struct File {
  std::string name;
  std::vector<HfTensor> tensors;
};

Source open_source(const std::string& checkpoint, bool merge) {
  const auto view = std::make_shared<io::Hdf5File>(io::Hdf5File::open(view_path(checkpoint)));
  const Config job = config_of(*view);
  if (job.lora && !merge)
    throw Error(checkpoint + ": has adapters; --merge writes the weights with them merged in, --to peft the adapters alone",
                ExitCode::bad_job);
  if (!job.lora && merge) throw Error(checkpoint + ": --merge, but it has no adapters", ExitCode::bad_job);
  const auto table = std::make_shared<const ParamTable>(parameters_of(job));
  Source s{job.model, parameters_of(job.model), {}, merged(weights_of(view, table), *table)};
  for (const Param& p : table->all()) s.dtypes.push_back(dtype_in(*view, p));
  return s;
}

std::int64_t bytes_of(const Source& s, const HfTensor& t) { return t.shape.count() * size_of(s.dtypes[std::size_t(t.param)]); }

std::vector<File> divide(const Source& s, std::int64_t file_bytes) {
  std::vector<File> files;
  std::int64_t room = 0;
  for (HfTensor& t : hf_tensors(s.model, s.table)) {
    const std::int64_t bytes = bytes_of(s, t);
    if (files.empty() || bytes > room) {
      files.emplace_back();
      room = file_bytes;
    }
    room -= bytes;
    files.back().tensors.push_back(std::move(t));
  }
  for (std::size_t f = 0; f < files.size(); ++f) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", f + 1, files.size());
    files[f].name = files.size() == 1 ? "model.safetensors" : name;
    // The widest type first, so that each begins where its type may.
    std::stable_sort(files[f].tensors.begin(), files[f].tensors.end(), [&](const HfTensor& a, const HfTensor& b) {
      return size_of(s.dtypes[std::size_t(a.param)]) > size_of(s.dtypes[std::size_t(b.param)]);
    });
  }
  return files;
}

void write_file(const Source& s, const File& file, const std::string& folder) {
  std::vector<io::SafetensorsEntry> entries;
  for (const HfTensor& t : file.tensors) {
    std::vector<std::int64_t> shape;
    for (int d = 0; d < t.shape.rank(); ++d) shape.push_back(t.shape[d]);
    entries.push_back({.name = t.name, .dtype = io::safetensors_dtype(s.dtypes[std::size_t(t.param)]), .shape = std::move(shape)});
  }
  io::SafetensorsWriter writer(folder + "/" + file.name, std::move(entries));
  for (const HfTensor& t : file.tensors) {
    const DType dtype = s.dtypes[std::size_t(t.param)];
    std::int64_t padding = bytes_of(s, t);
    for_each_piece(s.weights, s.table[t.param], t.param, t.rows, dtype, [&](std::int64_t, Tensor rows) {
      writer.append(rows.data, rows.bytes());
      padding -= rows.bytes();
    });
    writer.append(std::string(std::size_t(padding), '\0').data(), padding);
  }
  writer.close();
}

// What makes the folder one that loads is written last.
void write_index_and_config(const Source& s, const std::vector<File>& files, const std::string& folder, const std::string& out) {
  std::vector<io::SafetensorsIndexEntry> index;
  std::int64_t bytes = 0;
  for (const File& file : files)
    for (const HfTensor& t : file.tensors) {
      index.push_back({t.name, file.name});
      bytes += bytes_of(s, t);
    }
  if (files.size() > 1) io::write_safetensors_index(folder, index, bytes);

  ModelConfig m = s.model;
  m.init_from.clear();
  m.linear_attn.kda_layers.clear();  // always written, as the transformers library goes by both lists or by neither
  for (std::int64_t layer = 1; layer <= m.num_hidden_layers; ++layer)
    if (!m.full_attention(layer - 1)) m.linear_attn.kda_layers.push_back(layer);
  if (m.dsa) m.dsa->layers = m.linear_attn.full_attn_layers;
  Config c;
  c.model = m;
  const io::YamlNode job = config_to_yaml(c);
  io::YamlNode model = *job.find("model");
  std::erase_if(model.entries, [](const auto& entry) { return entry.first == "init_from"; });
  const DType dtype = s.dtypes[0];
  io::write_text_atomically(folder + "/config.json", io::hf_config_text(model, dtype == DType::bf16  ? "bfloat16"
                                                                               : dtype == DType::f64 ? "float64"
                                                                                                     : "float32"));
  spdlog::info("{}: {} tensors, {} bytes in {} {}", out, index.size(), bytes, files.size(), files.size() == 1 ? "file" : "files");
}

}  // namespace

void export_folder(parallel::Communicator& control, const std::string& checkpoint, const std::string& out,
                   const ExportOptions& options) {
  WholeFolder folder(control, out, IfThere::refused);
  std::optional<Source> source;
  std::vector<File> files;
  open_verified(control, checkpoint, [&] {
    source.emplace(open_source(checkpoint, options.merge));
    files = divide(*source, options.file_bytes);
  });
  together(control, [&] {
    for (std::size_t f = std::size_t(control.rank()); f < files.size(); f += std::size_t(control.size()))
      write_file(*source, files[f], folder.partial());
  });
  folder.finish([&] { write_index_and_config(*source, files, folder.partial(), out); });
}

}  // namespace moetrain::core
