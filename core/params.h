// params.h -- the parameter table: the one truth for names, shapes, init, sharding, optimizer, checkpoint and plan.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/config.h"
#include "memory/tensor.h"
#include "parallel/shard.h"

namespace moetrain::core {

enum class Init : std::uint8_t {
  normal,     // N(0, initializer_range^2)
  one,        // norms
  zero,       // AttnRes queries, biases
  fan_in,     // U(-k^-1/2, k^-1/2), k the last dim: taps of a channel, inputs of an adapter
  log_decay,  // log U(1, 16): softplus gate
  dt_bias     // inverse softplus of dt = exp U(log 1e-3, log 1e-1), at least 1e-4
};

// Which kind of rank group cuts a parameter, and when it is gathered.
enum class UnitKind : std::uint8_t { embedding, trunk, experts, head, router_bias };

// What of a matrix the ranks of a tensor group have each a part of (parallel/shard.h, part_of): its rows, outputs of a product, or
// its columns, inputs.
enum class Cut : std::uint8_t { none, rows, columns };

// The low-rank factors beside a matrix W: its products are those of W + scale B A (core/lora.h).
struct Adapter {
  int a = -1, b = -1;  // parameters; -1: none
  double scale = 0, dropout = 0;
  bool present() const { return a >= 0; }
};

struct Param {
  std::string name;  // of the public checkpoint; the experts of a layer stacked on dim 0
  Shape shape;       // whole
  Init init = Init::normal;
  bool decay = true;    // weight decay: matrices, not norms, gates, convolutions, queries
  bool pinned = false;  // kept in fp32 (fp64 in an fp64 run) when weights are bf16; its own master
  int layer = -1;       // -1: outside the blocks
  UnitKind unit = UnitKind::trunk;
  Cut cut = Cut::none;
  bool trainable = true;  // has a gradient
  bool frozen = false;    // the job leaves it as it is: nothing changes it, balancing neither
  Adapter adapter = {};
};

class ParamTable {
 public:
  int add(Param p);                         // its index
  int find(const std::string& name) const;  // -1: no such parameter
  const std::vector<Param>& all() const { return params_; }
  const Param& operator[](int i) const { return params_[std::size_t(i)]; }
  int size() const { return int(params_.size()); }
  void freeze_all_but(const std::vector<std::string>& patterns);  // io/pattern.h; one that matches nothing is an Error
  void attach(int i, const Adapter& adapter) { params_[std::size_t(i)].adapter = adapter; }
  std::int64_t count() const;                                     // elements

 private:
  std::vector<Param> params_;
  std::unordered_map<std::string, int> by_name_;
};

// Element `index` (of the whole tensor, row-major) of a fresh parameter: a function of (seed, name, index) alone.
double initial_value(const Param& p, double initializer_range, std::uint64_t seed, std::int64_t index);
// Writes rows of the whole tensor's dim 0, or of those the columns from `column` on that `to` has, into it (host memory, any
// floating type).
void initialize_rows(const Param& p, double initializer_range, std::uint64_t seed, parallel::Rows rows, Tensor to,
                     std::int64_t column = 0);

}  // namespace moetrain::core
