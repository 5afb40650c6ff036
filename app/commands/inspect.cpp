// inspect.cpp -- what a path holds: a checkpoint, training tokens, or the weights of a Hugging Face folder. Values are not read,
// but the checksums of a checkpoint's files are verified.
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>

#include "app/commands.h"
#include "core/checkpoint.h"
#include "io/files.h"
#include "io/folders.h"
#include "io/hdf5_file.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "io/token_file.h"

namespace moetrain::app {
namespace fs = std::filesystem;
namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string s = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) s += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

struct Total {
  std::int64_t tensors = 0, elements = 0;
};
void print_totals(const std::map<std::string, Total>& by_type) {
  Total all;
  for (const auto& [type, t] : by_type) {
    all.tensors += t.tensors;
    all.elements += t.elements;
    std::cout << type << ": " << t.tensors << " tensors, " << t.elements << " elements\n";
  }
  std::cout << "total: " << all.tensors << " tensors, " << all.elements << " elements\n";
}

void list_dataset(const io::Hdf5File& file, const std::string& name, std::map<std::string, Total>& by_type) {
  const auto info = file.info(name);
  std::cout << "  " << name << " " << info.type << " " << info.shape.text() << "\n";
  auto& t = by_type[info.type];
  ++t.tensors;
  t.elements += info.shape.count();
}

void inspect_checkpoint(const std::string& folder) {
  const auto s = core::read_checkpoint_summary(folder);
  std::cout << folder << ": checkpoint, format " << s.format << "\n";
  std::cout << "step " << s.step << ", updates " << s.updates << ", tokens seen " << s.tokens << ", sequences " << s.sequences
            << ", seed " << s.seed << "\n";
  std::cout << "written by " << s.shards.size() << " ranks, " << s.bytes << " bytes, every checksum verified\n";
  std::cout << "layout:\n" << s.layout << (s.layout.empty() || s.layout.back() != '\n' ? "\n" : "");
  std::cout << "tensors:\n";
  const auto view = io::Hdf5File::open(folder + "/checkpoint.h5");
  std::map<std::string, Total> by_type;
  for (const std::string& name : view.names())
    if (name != "job" && name != "layout" && name != "shards") list_dataset(view, name, by_type);
  print_totals(by_type);
}

// Judged as training would judge it, but for the model's vocabulary.
void inspect_tokens(const std::string& path) {
  const auto file = io::Hdf5File::open(path);
  const bool claims = file.integer_attribute("vocab_size") || file.text_attribute("tokenizer");
  const bool has_ids = file.has("tokens") && file.info("tokens").integers;
  if (!claims && !has_ids)
    throw Error(path + ": an HDF5 file, but neither a token file nor a checkpoint: " +
                (file.has("tokens") ? "its data set tokens is " + file.info("tokens").type + ", no integers"
                                    : "it has no data set tokens"));
  io::TokenFile::open_tokens(path, std::numeric_limits<std::int32_t>::max());
  std::cout << path << ": token file\n";
  for (const char* name : {"tokens", "documents", "labels"})
    if (file.has(name)) {
      const auto info = file.info(name);
      std::cout << "  " << name << " " << info.type << " " << info.shape.text() << "\n";
    }
  if (const auto v = file.integer_attribute("vocab_size")) std::cout << "vocabulary " << *v << "\n";
  if (const auto v = file.text_attribute("tokenizer")) std::cout << "tokenizer " << *v << "\n";
  if (file.has("bad_lines")) std::cout << "lines left out as bad:\n" << file.read_text("bad_lines");
}

void inspect_safetensors(const std::vector<std::string>& files) {
  std::map<std::string, Total> by_type;
  std::int64_t bytes = 0;
  for (const std::string& file : files) {
    const auto header = io::read_safetensors_header(file);
    std::cout << file << ": " << header.entries.size() << " tensors, " << header.file_bytes << " bytes\n";
    bytes += header.file_bytes;
    for (const auto& e : header.entries) {
      std::cout << "  " << e.name << " " << e.dtype << " " << shape_text(e.shape) << "\n";
      auto& t = by_type[e.dtype];
      ++t.tensors;
      t.elements += e.elements();
    }
  }
  print_totals(by_type);
  std::cout << bytes << " bytes in " << files.size() << " files\n";
}

// The plain values of config.json, and those of its text model where it has one.
void inspect_hf_config(const std::string& path) {
  io::Json config;
  try {
    config = io::Json::parse(io::read_text(path));
  } catch (const std::exception& wrong) {
    throw Error(path + ": not JSON: " + wrong.what());
  }
  if (!config.is_object()) throw Error(path + ": not a config.json: it holds no object");
  std::cout << path << "\n";
  auto print = [](const io::Json& object, const std::string& prefix) {
    for (const auto& [key, value] : object.items())
      if (!value.is_object()) std::cout << "  " << prefix << key << ": " << value.dump() << "\n";
  };
  print(config, "");
  if (config.contains("text_config") && config["text_config"].is_object()) print(config["text_config"], "text_config.");
}

void inspect_folder(const std::string& path) {
  if (const std::string checkpoint = core::checkpoint_at(path); !checkpoint.empty()) return inspect_checkpoint(checkpoint);
  std::vector<std::string> weights;
  for (const std::string& file : io::files_of_folder(path))
    if (fs::path(file).extension() == ".safetensors") weights.push_back(file);
  const std::string config = path + "/config.json";
  if (weights.empty() && !fs::exists(config)) throw Error(path + ": holds no checkpoint, no config.json and no safetensors file");
  if (fs::exists(config)) inspect_hf_config(config);
  if (!weights.empty()) inspect_safetensors(weights);
}

}  // namespace

ExitCode inspect(const InspectArguments& arguments) {
  std::string path = arguments.path;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (!fs::exists(path)) throw Error(path + ": no such file or folder", ExitCode::bad_job);
  if (fs::is_directory(path))
    inspect_folder(path);
  else if (fs::path(path).filename() == "checkpoint.h5")
    inspect_checkpoint(fs::absolute(path).parent_path().string());
  else if (fs::path(path).extension() == ".safetensors")
    inspect_safetensors({path});
  else if (fs::path(path).filename() == "config.json")
    inspect_hf_config(path);
  else
    inspect_tokens(path);
  return ExitCode::done;
}

}  // namespace moetrain::app
