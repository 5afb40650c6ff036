// result_cache.h -- results of costly operators that backward finds instead of computing a layer again: kept on the device, in host
// memory, or not, by benefit a byte.
//
// Where layers are computed again in backward, each operator that is worth it takes its outputs here. The first forward computes
// them, and lays those aside that were chosen; when the layer is computed again, they are there, to the bit what computing would
// give. An operator is known by its layer and its number within it, which are the same in both.
//
// Who is chosen is decided once, after two steps in which everything was computed again, the second of them timed (the first one
// takes memory and loads kernels): by seconds saved a byte, largest first, as far as the room on the device goes, then in host
// memory, as far as that goes and its link has time in the layers' own time. Times and bytes are the largest of any rank, so that
// all ranks decide alike; what has a collective in it must be had by all or none. A result that has grown past the room on the
// device since is computed again, but for those with a collective.
#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/stack.h"
#include "memory/tiered_cache.h"
#include "parallel/communicator.h"

namespace moetrain::core {

enum class ResultOp : std::uint8_t { linear, grouped_linear, kda, attention, exchange };
inline constexpr int kResultOps = 5;
const char* name_of(ResultOp op);
std::optional<ResultOp> cache_op(const std::string& name);  // nothing: no such operator

struct CacheBudget {
  std::vector<ResultOp> ops;  // that may be cached
  bool all = false;           // without limit and without a decision: all of them, on the device
  bool forced = false;        // what finds no room on the device goes to the host, whether its link has the time or not
  bool beside = false;        // what travels to the host does so beside a layer's work; else it must cost less than it saves
  std::int64_t device_bytes = 0, host_bytes = 0;
};

struct Candidate {
  int layer = 0;
  ResultOp op{};
  std::int64_t bytes = 0;
  double seconds = 0;  // to compute it again
  Tier tier = Tier::none;
};
// What was chosen of each operator, its bytes and the time it saves; an aligned text of some lines.
std::string table_of(const std::vector<Candidate>& candidates);
// Sets the tiers. bytes_per_second: of the link to the host, one way; layer_seconds: forward time of a layer.
void choose(std::vector<Candidate>& candidates, const CacheBudget& budget, double bytes_per_second, double layer_seconds);

class ResultCache {
 public:
  ResultCache(Memory& device, Memory& host, const CacheBudget& budget, int layers);

  struct Output {
    Tensor* to;  // set, unless it is there already: then its values are
    DType dtype;
    Shape shape;
  };
  // One operator's outputs, from its start to its end.
  class Result {
   public:
    Result(ResultCache* cache, Stack& kept, ResultOp op, std::span<const Output> outputs);
    ~Result();
    Result(const Result&) = delete;
    Result& operator=(const Result&) = delete;
    bool missing() const { return missing_; }
    // Runs a part of the computing, where the outputs are missing.
    template <class Part>
    void compute(Part&& part) {
      if (!missing_) return;
      if (!timed_) return part();
      const auto start = cache_->now();
      part();
      seconds_ += std::chrono::duration<double>(cache_->now() - start).count();
    }

   private:
    struct Copied {
      Tensor room, from;
    };
    ResultCache* cache_;          // null: nothing is laid aside
    std::vector<Copied> copies_;  // of outputs that were there, to where they are laid aside
    int number_ = 0;
    bool missing_ = true, timed_ = false;
    double seconds_ = 0;
  };

  // Around a layer, in the first forward and when it is computed again.
  void begin(int layer, bool again);
  void end_forward();
  void prefetch(int layer);   // what lies in host memory of a layer whose turn comes next
  void drop(int layer);       // after its backward
  bool next_is_here() const;  // the result of the operator that comes next
  bool decided() const { return decided_; }
  void decide(parallel::Communicator& control,
              double bytes_per_second);  // collective; after each of the first two steps. Of the link to the host, one way
  void assume();                         // of a dry run without a clock: as much as there is room for
  std::vector<Candidate> candidates() const;
  struct Figures {                    // of a rank, since they were last taken
    std::int64_t hits = 0, late = 0;  // results found; tensors waited for
    double saved_seconds = 0;         // that computing them took when it was timed
  };
  Figures take_figures();
  std::int64_t host_bytes() const { return tiers_.host_bytes(); }

 private:
  static constexpr int kOutputs = 4;  // of an operator, at most
  struct Known : Candidate {
    int outputs = 0;
    std::int64_t times = 0;  // seconds are their sum
  };
  std::chrono::steady_clock::time_point now();
  void settle(std::vector<Candidate>& all, double bytes_per_second, double layer_seconds);
  Known& known(int number) { return known_[std::size_t(number)]; }
  int next(ResultOp op);

  TieredCache tiers_;
  Memory& device_;
  CacheBudget budget_;
  std::vector<Known> known_;                // by number, of all layers in the order they were met
  std::vector<std::vector<int>> by_layer_;  // numbers
  int layer_ = -1;
  std::size_t met_ = 0;  // of the layer
  bool again_ = false, warm_ = false, decided_ = false;
  Figures figures_;
  double forward_seconds_ = 0;
  std::int64_t forwards_ = 0;
  std::chrono::steady_clock::time_point layer_start_;
  std::optional<cuda::Event> reached_;  // of CUDA
};

}  // namespace moetrain::core
