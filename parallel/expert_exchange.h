// expert_exchange.h -- rows of tokens out to the ranks that hold their experts, and back.
#pragma once
#include <span>
#include <vector>

#include "ops/context.h"
#include "parallel/communicator.h"

namespace moetrain::parallel {

// Where the rows of one exchange go, from the true counts. Experts are placed uniformly: of E experts over n ranks, rank r holds
// [r E/n, (r+1) E/n).
struct ExchangePlan {
  std::vector<std::int64_t> send_rows;     // (n) to each rank
  std::vector<std::int64_t> receive_rows;  // (n) from each rank; 0 is normal
  // (E/n + 1) rows of each local expert after the exchange, expert by expert, inside one expert by source rank: on the host, and on
  // CUDA on the device; with one rank on CUDA on the device alone
  std::vector<std::int64_t> offsets;
  Tensor device_offsets;
  Tensor to;  // (received) i64, arrival order -> expert order; absent with one rank
  std::int64_t received_rows = 0;
  std::int64_t received() const { return received_rows; }
  std::int64_t sent() const;
};

class ExpertExchange {
 public:
  // The ranks of `group` hold all experts between them; `control` is the same group in host memory, for counts.
  ExpertExchange(Communicator& group, Communicator& control, std::int64_t experts);
  // Collective. counts (E): rows here for each expert. `to` is taken from `kept`. On Device::dry counts are taken as given.
  ExchangePlan plan(Stack& kept, std::span<const std::int64_t> counts);
  // One rank: its own rows in expert order are what its experts get. offsets (E+1) i64 on the device: nothing comes to the host.
  static ExchangePlan stay(Tensor offsets, std::int64_t rows);
  // Collective. rows (sent, D) sorted by expert -> received (received, D) in expert order. With one rank a copy.
  void out(ops::Context& ctx, const ExchangePlan& plan, ConstTensor rows, Tensor received);
  // Collective. The way back: received (received, D) in expert order -> rows (sent, D) sorted by expert.
  void back(ops::Context& ctx, const ExchangePlan& plan, ConstTensor received, Tensor rows);
  int ranks() const { return group_.size(); }
  void settle() { group_.settle(); }

 private:
  Communicator &group_, &control_;
  std::int64_t experts_;
};

}  // namespace moetrain::parallel
