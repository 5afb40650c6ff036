// cross_entropy_schedule.cuh -- which tile of the loss's products a pair of blocks multiplies next, and what that tile waits for.
#pragma once
#include "ops/cuda/cross_entropy_tiles.h"
#include "ops/cuda/pair_tiles.cuh"

namespace moetrain::ops::cuda::loss {

using namespace pair;

enum class Pass : std::uint8_t { sums, kept, gradients };
enum class Kind : std::uint8_t { logits, dhidden, dweight, end };

// Work on a block of words goes in three parts, and those of neighbouring blocks take turns, so that none waits for the one just
// before it: g of block 0; then dhidden and half of dweight of a block, g of the next block, the other half of dweight.
enum Part : int { kLogits, kFirst, kSecond, kParts };

struct Tile {
  Kind kind;
  int block, part, row, column, depth_blocks;
};
struct Arguments {
  CUtensorMap hidden, weight, g;  // g of even blocks, then of odd ones
  int s, D, V, chunk;             // tokens, width, words, words a block
  LossRows rows;
  float2* parts;
  __nv_bfloat16* logits;  // kept, or g
  int stride;             // elements between their rows
  bool given;             // g of the only block is there already
  float scale;
  float *dhidden, *dweight;
  bool add_dweight;
  std::uint32_t* done;  // (blocks, kParts): tiles of the part whose results are there, a block's half of each counted alone
};

// The tiles in the order in which they are drawn, and what each waits for. Indices must not fall from call to call.
class Schedule {
 public:
  __device__ explicit Schedule(const Arguments& p, Pass pass)
      : p_(p), blocks_((p.V + p.chunk - 1) / p.chunk), only_logits_(pass != Pass::gradients) {
    if (p.given && !only_logits_) block_ = 0, part_ = kFirst;
  }
  __device__ Tile tile(std::uint32_t index, std::uint32_t rank) {
    while (block_ < blocks_) {
      const std::uint32_t count = tiles(block_, part_);
      if (index < before_ + count) return at(int(index - before_), int(rank));
      before_ += count;
      next();
    }
    return {.kind = Kind::end};
  }
  // By one thread: until all results that the tile reads, or takes the place of, are there.
  __device__ void wait(const Tile& t) {
    if (t.block == waited_block_ && t.part == waited_part_) return;
    waited_block_ = t.block, waited_part_ = t.part;
    if (only_logits_ || p_.given) return;
    if (t.part == kLogits) {
      wait_for(t.block - 2, kFirst);  // they read the g that this one overwrites
      wait_for(t.block - 2, kSecond);
    } else {
      wait_for(t.block, kLogits);
      if (t.part == kFirst) wait_for(t.block - 1, kFirst);  // dhidden is added to in the order of blocks
    }
    asm volatile("fence.proxy.async;" ::: "memory");
  }

 private:
  __device__ int words(int block) const { return min(p_.chunk, p_.V - block * p_.chunk); }
  __device__ int tiles(int block, int part) const {
    if (part == kLogits) return pairs_of(p_.s) * tiles_across(words(block));
    const int of_dweight = p_.dweight ? pairs_of(words(block)) * tiles_across(p_.D) : 0;
    return part == kFirst ? pairs_of(p_.s) * tiles_across(p_.D) + of_dweight / 2 : of_dweight - of_dweight / 2;
  }
  __device__ void next() {
    if (only_logits_) {
      block_ = blocks_;
    } else if (part_ == kLogits) {
      part_ = block_ == 0 ? kFirst : kSecond;
      block_ = max(0, block_ - 1);
    } else if (part_ == kFirst) {
      if (block_ + 1 < blocks_)
        ++block_, part_ = kLogits;
      else
        part_ = kSecond;
    } else {
      ++block_, part_ = kFirst;
    }
  }
  __device__ Tile at(int index, int rank) const {
    const int w = words(block_);
    if (part_ == kLogits) return within(Kind::logits, index, p_.s, w, p_.D, rank);
    const int of_dhidden = pairs_of(p_.s) * tiles_across(p_.D);
    if (part_ == kFirst && index < of_dhidden) return within(Kind::dhidden, index, p_.s, p_.D, w, rank);
    const int half = pairs_of(w) * tiles_across(p_.D) / 2;
    return within(Kind::dweight, part_ == kFirst ? index - of_dhidden : half + index, w, p_.D, p_.s, rank);
  }
  __device__ Tile within(Kind kind, int index, int rows, int columns, int depth, int rank) const {
    const auto [pair, column] = InBands(index, pairs_of(rows), tiles_across(columns));
    return {kind, block_, part_, (pair * kPair + rank) * kRows, column, (depth + kDepth - 1) / kDepth};
  }
  __device__ void wait_for(int block, int part) const {
    if (block < 0) return;
    const std::uint32_t all = tiles(block, part) * kPair;
    std::uint32_t done = 0;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(&p_.done[block * kParts + part]) : "memory");
    while (done < all);
  }

  const Arguments& p_;
  int blocks_, block_ = 0, part_ = kLogits, waited_block_ = -1, waited_part_ = 0;
  bool only_logits_;
  std::uint32_t before_ = 0;  // tiles of earlier parts
};

}  // namespace moetrain::ops::cuda::loss
