// hf_names.h -- the tensors of a public checkpoint of the family and the rows of the parameter table that they hold.
#pragma once
#include <string>
#include <vector>

#include "core/params.h"

namespace moetrain::core {

struct HfTensor {
  std::string name;   // text models that are part of a larger one have kHfTextPrefix before it
  std::string other;  // the name the transformers library (5.24) writes in its place; empty: the same
  Shape shape;        // past the elements of `rows` there is padding with zeros
  int param = -1;
  parallel::Rows rows;  // of the parameter's dim 0; an expert is one of them
};

inline constexpr const char* kHfTextPrefix = "language_model.";

// In the order of the table. A_log alone has another shape than its rows: [1, 1, heads, 1] with the softplus gate, else padded
// to a multiple of 128.
std::vector<HfTensor> hf_tensors(const ModelConfig& model, const ParamTable& table);

// Name and shape of the tensors of MoonViT-V2 and its projector, which a checkpoint with pictures holds beside the text model.
struct HfVisionTensor {
  std::string name;
  Shape shape;
};
std::vector<HfVisionTensor> hf_vision_tensors(std::int64_t hidden_size);

}  // namespace moetrain::core
