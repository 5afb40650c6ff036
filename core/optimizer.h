// optimizer.h -- AdamW over the rows of every trainable parameter that this rank updates: master weights, moments, norm, clipping.
#pragma once
#include <vector>

#include "core/layout.h"
#include "core/params.h"
#include "ops/context.h"

namespace moetrain::core {

class Optimizer {
 public:
  // Moments are real and start at 0. A weight stored in bf16 has a real master; any other is its own master.
  Optimizer(Memory& memory, const OptimizerConfig& config, const ParamTable& table, parallel::ShardedParams& params);

  // Global L2 norm of the gradients, every element of every expert and shard once; the same bits on every rank. Collective.
  double norm(ops::Context& ctx, parallel::Communicator& everyone);
  // gradient_scale clips; update counts from 1.
  void update(ops::Context& ctx, double lr, double gradient_scale);
  std::int64_t updates() const { return updates_; }
  void set_updates(std::int64_t n) { updates_ = n; }

  // State of rows inside params.update_rows(i); absent for frozen parameters.
  Tensor master(int i, parallel::Rows rows) const;
  Tensor exp_avg(int i, parallel::Rows rows) const { return rows_of(states_[std::size_t(i)].exp_avg, i, rows); }
  Tensor exp_avg_sq(int i, parallel::Rows rows) const { return rows_of(states_[std::size_t(i)].exp_avg_sq, i, rows); }
  bool has_state(int i) const { return states_[std::size_t(i)].exp_avg.present(); }
  bool has_master(int i) const { return states_[std::size_t(i)].master.present(); }

 private:
  struct State {
    OwnedTensor master;  // only where the weight is not its own master
    OwnedTensor exp_avg, exp_avg_sq;
  };
  Tensor rows_of(const OwnedTensor& t, int i, parallel::Rows rows) const;

  OptimizerConfig config_;
  const ParamTable& table_;
  parallel::ShardedParams& params_;
  std::vector<State> states_;  // by parameter
  std::int64_t updates_ = 0;
};

}  // namespace moetrain::core
