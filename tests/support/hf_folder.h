// hf_folder.h -- Hugging Face folders made up for tests: the headers that a model should have, changed at will, with or without
// data.
#pragma once
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/hf_names.h"
#include "core/model.h"
#include "io/hf_config.h"
#include "io/safetensors.h"
#include "io/yaml.h"

namespace moetrain::test {

struct HfForm {
  bool packed = false;  // experts in MXFP4
  bool vision = false;
  const char* prefix = "";
};

inline std::vector<std::int64_t> dims_of(const Shape& shape) {
  std::vector<std::int64_t> dims;
  for (int d = 0; d < shape.rank(); ++d) dims.push_back(shape[d]);
  return dims;
}

// BF16, but for what the family keeps in F32.
inline std::vector<io::SafetensorsEntry> hf_entries(const core::ModelConfig& model, const HfForm& form) {
  const core::ParamTable table = core::parameters_of(model);
  std::vector<io::SafetensorsEntry> entries;
  for (const core::HfTensor& t : core::hf_tensors(model, table)) {
    const core::Param& p = table[t.param];
    const std::string name = form.prefix + t.name;
    if (form.packed && p.unit == core::UnitKind::experts) {
      entries.push_back({.name = name + "_packed", .dtype = "U8", .shape = {t.shape[0], t.shape[1] / 2}});
      entries.push_back({.name = name + "_scale", .dtype = "U8", .shape = {t.shape[0], t.shape[1] / 32}});
    } else {
      entries.push_back({.name = name, .dtype = p.pinned ? "F32" : "BF16", .shape = dims_of(t.shape)});
    }
  }
  if (form.vision)
    for (const auto& t : core::hf_vision_tensors(model.hidden_size))
      entries.push_back({.name = t.name, .dtype = "BF16", .shape = dims_of(t.shape)});
  return entries;
}

inline void write_hf_config(const std::string& folder, const core::ModelConfig& model, const HfForm& form) {
  core::Config c;
  c.model = model;
  const io::YamlNode job = core::config_to_yaml(c);
  io::YamlNode keys = *job.find("model");
  std::erase_if(keys.entries, [](const auto& e) { return e.first == "init_from"; });
  std::string text = io::hf_config_text(keys, "bfloat16");
  if (form.vision)
    text = "{\"architectures\": [\"KimiK31ForConditionalGeneration\"], \"vision_config\": {}, \"text_config\": " + text + "}";
  std::ofstream(folder + "/config.json") << text;
}

// The bytes that an entry of the writer takes.
inline std::int64_t bytes_of(const io::SafetensorsEntry& e) {
  return e.elements() * (e.dtype == "F64" ? 8 : e.dtype == "F32" ? 4 : e.dtype == "BF16" || e.dtype == "F16" ? 2 : 1);
}

// Files of equally many tensors; data are holes: zeros that take no room on the disk.
inline void write_headers(const std::string& folder, const std::vector<io::SafetensorsEntry>& entries, std::size_t files = 1) {
  const std::size_t each = (entries.size() + files - 1) / files;
  std::vector<io::SafetensorsIndexEntry> index;
  std::int64_t total = 0;
  for (std::size_t f = 0; f * each < entries.size(); ++f) {
    const std::string name = "model-" + std::to_string(f) + ".safetensors";
    const std::vector<io::SafetensorsEntry> part(entries.begin() + std::ptrdiff_t(f * each),
                                                 entries.begin() + std::ptrdiff_t(std::min(entries.size(), (f + 1) * each)));
    std::int64_t bytes = 0;
    for (const auto& e : part) {
      bytes += bytes_of(e);
      index.push_back({e.name, name});
    }
    std::filesystem::remove(folder + "/" + name);
    io::SafetensorsWriter(folder + "/" + name, part);
    std::filesystem::resize_file(folder + "/" + name, std::filesystem::file_size(folder + "/" + name) + std::uintmax_t(bytes));
    total += bytes;
  }
  if (files > 1) io::write_safetensors_index(folder, index, total);
}

}  // namespace moetrain::test
