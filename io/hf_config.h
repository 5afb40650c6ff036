// hf_config.h -- config.json of a Hugging Face folder as the model section of a job, and back.
#pragma once
#include <string>

#include "io/yaml.h"

namespace moetrain::io {

struct HfConfig {
  YamlNode model;       // the text model under the names of a job's model section; values are not yet judged
  bool vision = false;  // a vision tower belongs to the model
};

// The text model is `text_config` where there is one. The transformers library's own names for a key (n_group, num_local_experts,
// model_max_length ...) and its lists by layer (layer_types, mlp_layer_types) become the public ones; two that disagree are an
// Error, as are biases and a quantisation other than MXFP4. What has no bearing on the weights is left out.
HfConfig read_hf_config(const std::string& path);

// The reverse: `model` as core/config writes it, the type of the matrices as torch calls it.
std::string hf_config_text(const YamlNode& model, const std::string& torch_dtype);

}  // namespace moetrain::io
