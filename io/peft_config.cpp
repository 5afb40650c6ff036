// peft_config.cpp -- every key that decides what is computed is written, also where it has the library's own default.
#include "io/peft_config.h"

#include <nlohmann/json.hpp>

namespace moetrain::io {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
Json or_null(const T& value) {
  return value.empty() ? Json() : Json(value);
}

}  // namespace

std::string peft_config_text(const PeftConfig& c) {
  const Json config = {{"peft_type", "LORA"},
                       {"task_type", "CAUSAL_LM"},
                       {"base_model_name_or_path", or_null(c.base)},
                       {"r", c.rank},
                       {"lora_alpha", c.alpha},
                       {"use_rslora", c.rslora},
                       {"lora_dropout", c.dropout},
                       {"target_modules", c.modules},
                       {"target_parameters", or_null(c.parameters)},
                       {"rank_pattern", c.ranks},
                       {"alpha_pattern", c.alphas},
                       {"bias", "none"},
                       {"use_dora", false},
                       {"fan_in_fan_out", false},
                       {"exclude_modules", nullptr},
                       {"layers_to_transform", nullptr},
                       {"layers_pattern", nullptr},
                       {"modules_to_save", nullptr},
                       {"init_lora_weights", true},
                       {"inference_mode", true}};
  return config.dump(2) + "\n";
}

}  // namespace moetrain::io
