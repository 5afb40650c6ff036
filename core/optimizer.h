// optimizer.h -- AdamW over the rows of every trainable parameter that this rank updates: master weights, moments, norm, clipping.
#pragma once
#include <vector>

#include "core/layout.h"
#include "core/params.h"
#include "memory/transfer.h"
#include "ops/adamw.h"
#include "ops/context.h"

namespace moetrain::core {

class Optimizer {
 public:
  // Moments are real and start at 0. A weight stored in bf16 has a real master; any other is its own master. With a host moments
  // and masters lie there, where tensors of them are then too, and pass through the device of `memory` in slices while they are
  // updated; so do weights that lie there (parallel/sharded_params.h).
  struct Offload {
    Memory* host = nullptr;
    std::int64_t slice_bytes = 0;
  };
  Optimizer(Memory& memory, const Offload& offload, const OptimizerConfig& config, const ParamTable& table,
            parallel::ShardedParams& params);

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
    PlacedTensor master;  // only where the weight is not its own master
    PlacedTensor exp_avg, exp_avg_sq;
  };
  Tensor rows_of(const PlacedTensor& t, int i, parallel::Rows rows) const;
  std::vector<ops::AdamWShard> shards_to_update();
  void update_in_slices(ops::Context& ctx, ops::AdamW step, const std::vector<ops::AdamWShard>& shards);

  OptimizerConfig config_;
  const ParamTable& table_;
  parallel::ShardedParams& params_;
  Memory* host_;               // null: state lies on the device
  std::vector<int> trained_;   // parameters
  std::vector<State> states_;  // by parameter
  std::vector<OwnedTensor> rooms_;  // on the device, for slices: one comes, one is worked on, one leaves
  Transfer down_, up_;
  std::int64_t updates_ = 0;
};

}  // namespace moetrain::core
