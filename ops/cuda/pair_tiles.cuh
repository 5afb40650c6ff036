// pair_tiles.cuh -- how two blocks of a cluster multiply tiles that share their columns: stages of operands that both fill and both
// read, tiles that one of them draws for both, and the products of a tile.
#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/cuda/blas.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/tensor_copy.cuh"
#include "ops/cuda/tensor_cores.cuh"

namespace moetrain::ops::cuda::pair {

constexpr int kPair = 2;                           // blocks that share the columns of a tile
constexpr std::uint16_t kBoth = (1 << kPair) - 1;  // of them, to whom a copy goes
constexpr int kRows = 128, kColumns = 256;         // of a block's tile
constexpr int kDepth = 64;                         // summands of a stage
constexpr int kBand = 8;                           // pairs side by side on the same columns: what stays in L2 is about square

constexpr int kStages = 4, kPanel = 64, kLine = 128;  // lines of a panel, and bytes of each: a swizzled line
constexpr int kPanelBytes = kPanel * kLine, kAPanels = kRows / kPanel, kBPanels = kColumns / kPanel;
constexpr int kABytes = kAPanels * kPanelBytes, kStageBytes = kABytes + kBPanels * kPanelBytes;
constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kLagBarrier = 3;  // of two warpgroups, one of which begins later: it multiplies while the other one writes

// More than stages: before a slot is used again all have read it, since all stages have gone around in between.
constexpr int kSlots = 8;
static_assert(kSlots > kStages + 1);

__host__ __device__ inline int tiles_across(int columns) { return (columns + kColumns - 1) / kColumns; }
__host__ __device__ inline int pairs_of(int rows) { return (rows + kPair * kRows - 1) / (kPair * kRows); }  // that cover the rows

// Where tile `index` of so many pairs and so many tiles across lies: in bands of kBand pairs, so that neighbours read the same
// operands.
struct InBands {
  int pair, column;
  __device__ InBands(int index, int pairs, int across) {
    const int band = index / (across * kBand), at = index % (across * kBand), width = min(kBand, pairs - band * kBand);
    pair = band * kBand + at % width;
    column = at / width * kColumns;
  }
};

// Where one stands in the ring of stages.
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void step() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// What the threads of a block share, and know of the other block.
template <class Tile, int kTiles>
struct Shared {
  alignas(16) Tile tile[kTiles];
  std::uint64_t full[kStages], empty[kStages], told[kSlots];
  std::uint32_t drawn[kSlots];  // tiles of the pair, as its first block has told

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&full[i]), 1);
      barrier_init(shared_address(&empty[i]), kPair * kConsumers * kWarpgroup / kWarp);
    }
    for (int i = 0; i < kSlots; ++i) barrier_init(shared_address(&told[i]), 1);
  }
  __device__ std::uint32_t full_at(const Ring& r) const { return shared_address(&full[r.stage]); }
  __device__ void wait_full(const Ring& r) const { barrier_wait(full_at(r), r.parity); }
  __device__ void wait_empty(const Ring& r) const {  // for the readers in both blocks
    barrier_wait(shared_address(&empty[r.stage]), r.parity ^ 1);
  }
  // This warp has read a stage: tells the producers of both blocks, who write to both.
  __device__ void release(int stage) const {
    const std::uint32_t lane = threadIdx.x % kWarp;
    __syncwarp();  // waits for its readers
    if (lane < kPair) barrier_arrive_at(shared_address(&empty[stage]), lane, 1);
  }
};

// The tiles of a pair, for the one thread a block that copies: that of the first block draws the next one and tells the other.
template <class Shared>
class Draw {
 public:
  __device__ Draw(Shared& shared, std::uint32_t* counters) : shared_(shared), counters_(counters) {}
  __device__ std::uint32_t rank() const { return rank_; }
  __device__ std::uint32_t slot() const { return turn_ % kSlots; }
  // The index of the pair's tile. Draws the one after it.
  __device__ std::uint32_t take() {
    told_ = shared_address(&shared_.told[slot()]);
    next_ = rank_ == 0 ? gridDim.x / kPair + atomicAdd(&counters_[0], 1U) : 0;
    return index_;
  }
  __device__ void tell_other() const {  // early in a tile: the other will not wait for it
    if (rank_ == 0) tell(shared_address(&shared_.drawn[slot()]), told_, 1, next_);
  }
  __device__ void step() {
    if (rank_ != 0) barrier_wait_for_told(told_, turn_ / kSlots % 2);
    index_ = rank_ == 0 ? next_ : shared_.drawn[slot()];
    ++turn_;
  }
  // No tile is left: the last pair to finish leaves the counters as it found them.
  __device__ void end() const {
    if (rank_ != 0) return;
    __threadfence();
    if (atomicInc(&counters_[1], gridDim.x / kPair - 1) == gridDim.x / kPair - 1) counters_[0] = 0;
  }

 private:
  Shared& shared_;
  std::uint32_t* counters_;  // two on the device that are zero before and after
  const std::uint32_t rank_ = cluster_rank();
  std::uint32_t turn_ = 0, index_ = blockIdx.x / kPair, next_ = 0, told_ = 0;
};

// Adds the products of one warpgroup's half of a tile. The first stage has already come. The warpgroup that leads lets the other
// one begin.
template <Along kA, Along kB, int kCount, class Shared>
__device__ __forceinline__ void multiply(float (&sums)[kCount], Ring& ring, const Shared& shared, std::uint32_t stages,
                                         int depth_blocks, bool leads) {
  constexpr int kLag = 1;  // stages that the other stays behind
  const int half = int(threadIdx.x) / kWarpgroup - 1;
  int before = 0;
  for (int block = 0; block < depth_blocks; ++block) {
    if (block > 0) shared.wait_full(ring);
    const std::uint32_t at = stages + ring.stage * kStageBytes;
    const std::uint64_t a = operand_at(at + half * kPanelBytes, kPanelBytes), b = operand_at(at + kABytes, kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) wgmma<kA, kB>(sums, a + k * step_of(kA), b + k * step_of(kB));
    wgmma_commit();
    wgmma_wait<1>();
    if (block > 0) shared.release(before);
    if (leads && block == min(kLag, depth_blocks - 1)) warpgroups_arrive(kLagBarrier);
    before = ring.stage;
    ring.step();
  }
  wgmma_wait<0>();
  settle(sums);
  shared.release(before);
}

// Blocks for so many tiles: pairs of them, as many as fit the device.
inline unsigned int blocks_for(const Context& ctx, std::int64_t tiles) {
  check(tiles < 0x7fffffff, "pair_tiles: more tiles than can be counted", {{"tiles", tiles}});
  return kPair * blocks(std::min<std::int64_t>(tiles, ctx.blas->multiprocessors() / kPair), 1);
}

}  // namespace moetrain::ops::cuda::pair
