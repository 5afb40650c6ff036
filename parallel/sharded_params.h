// sharded_params.h -- weights and gradients of a model, sharded over ranks: gather / use / release around a unit, then reduce.
//
//   sharding    a rank stores between steps        gradients                          after the update
//   none        all weights                        all, summed by all-reduce          nothing to do: every rank updates all rows
//   optimizer   all weights                        all; summed into shards at the end owners' rows are gathered by publish()
//   gradients   all weights                        shards, reduced each micro-batch   owners' rows are gathered by publish()
//   full        its shard of the weights           shards, reduced each micro-batch   nothing to do: gathered at the next use
//
// Gradients are sums over ranks (the loss is scaled by the global count of labels beforehand); ops add into them. They
// count as zeros from begin_step on: who asks by first_gradient writes instead of adding the first time, and no zeros are made. A
// parameter that is not trainable has no gradient anywhere.
// Rows r of a parameter lie on dim 0, cut by parallel/shard.h over the unit's group. What is gathered or scattered has n c rows, a
// few more than R where n does not divide R. Where gradients are reduced each micro-batch, the whole gradient of a unit exists only
// from the first gradient() to the end of its reduction. A group of one rank moves, copies and takes nothing, whatever its sharding.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "memory/transfer.h"
#include "parallel/communicator.h"
#include "parallel/shard.h"

namespace moetrain::parallel {

enum class Sharding : std::uint8_t { none, optimizer, gradients, full };

struct ShardedTensor {
  std::string name;
  Shape shape;  // the part that this rank's group holds between its ranks (experts: those of this ep coordinate)
  DType dtype;  // of the weight; its gradient is real_of(dtype)
  bool trainable = true;
};

// Tensors that are gathered and reduced together: of one block, one rank group.
struct Unit {
  std::string name;
  std::vector<int> tensors;  // indices into the list of tensors; a tensor is in exactly one unit
  Communicator* group;
  Sharding sharding;
  bool in_host = false;  // its weights lie in host memory, and are on the device while they are gathered
  // As good as those here, and the same on every rank of the job: what travels together is decided by them.
  std::int64_t gradient_bytes = 0, weight_bytes = 0;
};

class ShardedParams {
 public:
  // Takes the memory that lives across steps (Category::weights, gradients). Weights are uninitialised. poison: what a gradient
  // holds before its first write is NaN, so that a reader of it is caught. bucket_bytes: gradients of units of one group wait for
  // each other until they are that many together, and leave as one message.
  struct Options {
    bool reshard_after_use = true;
    std::int64_t bucket_bytes = 0;
    bool poison = false;
    Memory* host = nullptr;  // of units that lie there
  };
  ShardedParams(Memory& memory, std::vector<ShardedTensor> tensors, std::vector<Unit> units, const Options& options);

  // --- one step, in this order
  void begin_step();        // gradients are zero from here on; those that are written before they are added to are not cleared
  void fetch(int unit);     // of a unit in host memory: begins its way to the device, which prefetch then has to wait for
  void prefetch(int unit);  // collective; begins what gather then only waits for
  void gather(int unit);    // collective; afterwards weight() and gradient() of its tensors may be used. May nest: each
                            // gather has its release
  void open(int unit);      // as gather, for gradient() alone: no weight moves
  void release(int unit);   // with reshard_after_use the gathered weights go, else they stay until publish
  void reduce(int unit);    // collective; once a micro-batch, after the last op that adds to the unit's gradients and
                            // before its release in backward. The sums travel while later work runs, once their bucket is full
  void end_reductions();    // waits for the sums that travel; called before the next block's reduce()
  void finish_gradients();  // collective; after the last micro-batch: stored_gradient() is complete everywhere
  void publish();           // collective; after the update: every stored row is the owner's new one. Also ends the life
                            // of weights kept by reshard_after_use = false. Outside a step, so after init or load, frozen
                            // rows are published too; in a step they cannot have changed

  ConstTensor weight(int tensor) const;  // whole, between gather and release
  Tensor gradient(int tensor);           // whole, real, to add to; absent when frozen
  struct FirstGradient {
    Tensor dw;   // as gradient()
    bool write;  // the caller must write all of it instead of adding: it is the first of this step
  };
  FirstGradient first_gradient(int tensor);
  bool in_host(int tensor) const { return units_[std::size_t(unit_of(tensor))].in_host; }
  bool holds(int tensor) const;          // gathered now

  // --- what this rank stores and updates
  Rows update_rows(int tensor) const;  // rows this rank's optimizer updates: its shard, or all with Sharding::none
  Rows shard(int tensor) const;        // its shard, also with Sharding::none: every row is in exactly one rank's shard, so norms
                                       // and checkpoints count each once
  Tensor stored(int tensor, Rows rows) const;           // stored weights of rows inside update_rows
  Tensor stored_gradient(int tensor, Rows rows) const;  // complete after finish_gradients, rows inside update_rows
  const std::vector<ShardedTensor>& tensors() const { return tensors_; }
  const std::vector<Unit>& units() const { return units_; }
  int unit_of(int tensor) const;
  bool trains(int unit) const;  // any of its tensors

 private:
  struct Storage {
    PlacedTensor weight;           // (n c rows, or R where nothing is gathered in place; full: c rows, its shard)
    OwnedTensor gathered;          // full, or in host memory: (n c rows) while gathered
    OwnedTensor gradient;          // (n c rows or R) for whole: resident, or from gradient() to the end of the reduction
    OwnedTensor gradient_shard;    // gradients, full: (c rows)
    bool blank = false;            // gradient stands for zeros, but holds anything
    bool shard_blank = false;      // the same of gradient_shard
    int unit = -1;
  };
  // What a unit's sharding comes to: a group of one is always `none`.
  Sharding sharding_of(const Unit& unit) const { return unit.group->size() == 1 ? Sharding::none : unit.sharding; }
  bool scatters_each_micro_batch(const Unit& unit) const {
    return sharding_of(unit) == Sharding::gradients || sharding_of(unit) == Sharding::full;
  }
  const Storage& storage(int tensor) const;
  const Unit& unit(int unit) const;
  std::int64_t padded_shard_rows(int tensor) const;  // c
  Shape padded_shape(int tensor) const;              // n c rows
  bool gathered_goes(const Unit& unit) const { return options_.reshard_after_use || unit.in_host; }  // with its last release
  void make_gradient(int tensor);
  void clear(Storage& own, std::int64_t first_row = 0) const;  // gradient to zeros from a row on, where it is blank
  struct Bucket {
    std::vector<int> units;         // of one group
    std::vector<OwnedTensor> sums;  // where their gradients are summed, by trainable tensor
    std::int64_t bytes = 0;
  };
  struct UnderWay : Bucket {
    bool gather;  // else gradients
  };
  void begin_gather(int unit);
  void end_oldest();
  void begin_reduction(std::size_t bucket);  // of filling_
  bool travels(int unit, bool gather) const;
  void end_all_until(int unit, bool gather);  // and that too, where it is under way
  bool begin_scatter(const Bucket& bucket);

  Memory& memory_;
  std::vector<ShardedTensor> tensors_;
  std::vector<Unit> units_;
  std::vector<Storage> storage_;  // by tensor
  std::vector<int> open_;         // by unit: gathers not yet released
  std::vector<Bucket> filling_;   // a group's gradients that are complete, and too few to leave
  std::deque<UnderWay> under_way_;  // the oldest first
  Transfer from_host_;
  std::vector<Transfer::Mark> came_;  // by unit, its weights from host memory
  std::vector<bool> gathering_;       // by unit: gathered from all ranks, or on its way
  const Options options_;
  bool in_step_ = false;
};

}  // namespace moetrain::parallel
