// hf_weights.h -- the weights of a Hugging Face folder as rows of the parameter table; every name, shape and type is accounted for
// before a value is read.
#pragma once
#include <string>
#include <vector>

#include "core/hf_names.h"
#include "io/safetensors.h"

namespace moetrain::core {

struct HfModel {
  ModelConfig model;
  bool vision = false;  // the folder also holds a vision tower
};
// config.json of the folder. An Error names every key that is wrong or missing; keys that are not known are told to the log.
HfModel read_hf_model(const std::string& folder);

// From headers alone: what is missing, not used, of another shape than config.json asks for, or of another type than its like, is
// one Error with all of it. Matrices have one type; fp32 parameters (A_log, dt_bias, conv, o_norm, selection bias) that or F32,
// alike in all layers; experts may be MXFP4 in pairs of weight_packed and weight_scale. The vision tower is checked and left out.
class HfWeights {
 public:
  HfWeights(const std::string& folder, const HfModel& model, const ParamTable& table);

  DType dtype() const { return dtype_; }  // that holds the matrices without loss
  std::int64_t tensors() const { return std::int64_t(folder_.tensors.size()); }
  // Rows [first, first + to.shape[0]) of a parameter, into host memory of any floating type. Padding has to be zero.
  void read(int param, std::int64_t first, Tensor to) const;

 private:
  friend class HfPreflight;
  using Place = io::SafetensorsFolder::Place;
  struct Source {
    parallel::Rows rows;  // of the parameter's dim 0: an expert is one of them, else all
    const Place* values;  // MXFP4: the codes
    const Place* scale;   // MXFP4 only
  };
  void read_source(const Source& source, std::int64_t row, Tensor to) const;

  io::SafetensorsFolder folder_;
  std::vector<std::vector<Source>> sources_;  // by parameter
  DType dtype_ = DType::none;
};

}  // namespace moetrain::core
