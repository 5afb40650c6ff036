// expert_exchange.h -- rows of tokens out to the ranks that hold their experts, and back, in parts that travel while others work.
//
// The experts of every rank are cut into the same parts. A part's rows are all the rows of its experts, so that an expert's products
// and the sums in its gradients are the same bits however many parts there are. Of E experts over n ranks, rank r holds
// [r E/n, (r+1) E/n).
#pragma once
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "memory/stream.h"
#include "ops/context.h"
#include "parallel/communicator.h"

namespace moetrain::parallel {

struct ExchangePart {
  std::int64_t first_expert = 0, last_expert = 0;  // of the experts here
  std::int64_t first_row = 0, last_row = 0;        // of the rows received, which lie expert by expert, inside one by source rank
  // (experts of the part + 1) their rows, from 0 at first_row: on the host, and on CUDA on the device; with one rank on CUDA there
  // alone
  std::vector<std::int64_t> offsets;
  Tensor device_offsets;
  Tensor to;  // (rows) i64, place in the part of the rows in the order of arrival; absent with one rank
  struct Run {
    std::int64_t first, count;
  };
  std::vector<Run> send;                   // (n) to each rank, of the rows here, which are sorted by expert
  std::vector<std::int64_t> receive_rows;  // (n) from each rank; 0 is normal
  Tensor of(Tensor rows) const { return rows.rows(first_row, last_row); }
  ConstTensor of(ConstTensor rows) const { return rows.rows(first_row, last_row); }
};

// Where the rows of one exchange go, from the true counts.
struct ExchangePlan {
  std::vector<ExchangePart> parts;
  std::int64_t sent = 0, received = 0;  // rows
};

class ExpertExchange {
 public:
  // The ranks of `group` hold all experts between them; `control` is the same group in host memory, for counts. parts: at most one
  // an expert here is made of them.
  ExpertExchange(Communicator& group, Communicator& control, std::int64_t experts, std::int64_t parts);

  // counts (E) i64, where `ctx` works: on their way to the host, while a device goes on. They may not change before fetched().
  void fetch(const ops::Context& ctx, ConstTensor counts);
  // everyone: the ranks that the device's earlier work may wait for.
  std::span<const std::int64_t> fetched(Communicator& everyone);
  // Collective. counts (E): rows here for each expert. What a plan holds on the device is taken from `kept`. On Device::dry counts are
  // taken as given, and `dry_rows` arrive, at least those from here; 0: as if every rank had these counts.
  ExchangePlan plan(ops::Context& ctx, Stack& kept, std::span<const std::int64_t> counts, std::int64_t dry_rows = 0);
  // One rank: its own rows in expert order are what its experts get. offsets (E+1) i64 on the device: nothing comes to the host.
  static ExchangePlan stay(Tensor offsets, std::int64_t rows);

  // With more ranks than one. Collective, the same order everywhere: of each part, in their order, begin_out, finish_out,
  // begin_back once or more, where parts may overlap; then finish_back. rows (sent, D) sorted by expert; arrived (received, D) is
  // room for them on their way. None may be touched before the end.
  void begin_out(const ExchangePlan& plan, const ExchangePart& part, ConstTensor rows, Tensor arrived);
  // received: the part's rows, in expert order.
  void finish_out(ops::Context& ctx, const ExchangePart& part, ConstTensor arrived, Tensor received);
  // The way back. part_rows: in expert order; leaving (received, D): room for them on their way, which may be `arrived`.
  void begin_back(ops::Context& ctx, const ExchangePart& part, ConstTensor part_rows, Tensor leaving, Tensor rows);
  void finish_back();
  int ranks() const { return group_.size(); }

 private:
  std::int64_t here() const { return experts_ / group_.size(); }
  void end_oldest();
  Communicator &group_, &control_;
  std::int64_t experts_, parts_;
  std::shared_ptr<cuda::Link> link_;    // made where counts first come from a device
  std::vector<std::int64_t> on_host_;  // counts that were there from the start
  std::deque<const ExchangePart*> under_way_;  // the oldest first; null: on its way back
};

}  // namespace moetrain::parallel
