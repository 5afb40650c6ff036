// cross_entropy_tiles.cu -- the products of the loss as persistent wgmma kernels fed by bulk copies, with what surrounds a product
// done on the tile's f32 sums in registers: no pass reads or writes logits for the statistics or the softmax alone.
//
// A pair of blocks multiplies a tile of 256 x 256: each block has 128 rows of its own, and both share the columns. Pairs draw their
// tiles. The second pass is one launch for all blocks of words: tiles wait for those they need, and no block of words has an end of
// its own at which most pairs would have nothing to do.
#include "ops/cross_entropy.h"
#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/blas.h"
#include "ops/cuda/cross_entropy_schedule.cuh"
#include "ops/cuda/cross_entropy_tiles.h"
#include "ops/cuda/launch.cuh"

namespace moetrain::ops::cuda {
namespace {

using namespace loss;  // NOLINT: its tiles

constexpr int kCount = kColumns / 2;                                                // sums of a thread
constexpr int kPartRows = 16, kPartLine = 256, kPartBytes = kPartRows * kPartLine;  // of a warp's results on their way out
static_assert(kColumns == CrossEntropy::kWordsOfPart);

struct Shared : pair::Shared<Tile, kStages> {  // tiles by the stage where they begin
  std::uint64_t written, reported;
  int finished;  // count of Arguments::done that the tile just written adds to; -1: no tile follows
};
constexpr int kPartsBytes = kConsumers * kWarpgroup / kWarp * kPartBytes;
constexpr std::size_t kSharedBytes = kStages * kStageBytes + kPartsBytes + sizeof(Shared) + 1024;  // 1024: to align

// Copies a tile's operands, stage by stage: its own rows of the first one, and every other box of the columns for both blocks.
// A function a kind, since the copy engine wants to be told from registers that a whole warp shares.
template <Kind kKind>
__device__ __forceinline__ void copy_tile(const Arguments& p, const Tile& t, std::uint32_t rank, std::uint32_t stages,
                                          Shared& shared, Ring& ring) {
  const int word = t.block * p.chunk;
  for (int block = 0; block < t.depth_blocks; ++block, ring.step()) {
    shared.wait_empty(ring);
    const std::uint32_t full = shared.full_at(ring), to = stages + ring.stage * kStageBytes;
    if (block == 0) shared.tile[ring.stage] = t;
    barrier_arrive_and_expect(full, kStageBytes);
    const int k = block * kDepth;
#pragma unroll
    for (int box = 0; box < kAPanels; ++box) {
      const int row = t.row + box * kPanel;
      if constexpr (kKind == Kind::logits)
        copy_box(to + box * kPanelBytes, &p.hidden, full, k, row);
      else if constexpr (kKind == Kind::dhidden)
        copy_box(to + box * kPanelBytes, &p.g, full, k, row, t.block % 2);
      else
        copy_box(to + box * kPanelBytes, &p.g, full, row, k, t.block % 2);
    }
#pragma unroll
    for (int i = 0; i < kBPanels / kPair; ++i) {
      const int box = i * kPair + int(rank), column = t.column + box * kPanel;
      if constexpr (kKind == Kind::logits)
        copy_box_to(kBoth, to + kABytes + box * kPanelBytes, &p.weight, full, k, word + column);
      else if constexpr (kKind == Kind::dhidden)
        copy_box_to(kBoth, to + kABytes + box * kPanelBytes, &p.weight, full, column, word + k);
      else
        copy_box_to(kBoth, to + kABytes + box * kPanelBytes, &p.hidden, full, column, k);
    }
  }
}

// One thread a block copies.
template <Pass kPass>
__device__ void produce(const Arguments& p, std::uint32_t* counters, std::uint32_t stages, Shared& shared) {
  Ring ring;
  Schedule schedule(p, kPass);
  for (Draw draw(shared, counters);; draw.step()) {
    const std::uint32_t rank = draw.rank();
    const Tile t = schedule.tile(draw.take(), rank);
    if (t.kind == Kind::end) {
      shared.wait_empty(ring);
      shared.tile[ring.stage] = t;
      barrier_arrive(shared.full_at(ring));
      return draw.end();
    }
    schedule.wait(t);
    draw.tell_other();
    if (kPass != Pass::gradients || t.kind == Kind::logits)
      copy_tile<Kind::logits>(p, t, rank, stages, shared, ring);
    else if (t.kind == Kind::dhidden)
      copy_tile<Kind::dhidden>(p, t, rank, stages, shared, ring);
    else
      copy_tile<Kind::dweight>(p, t, rank, stages, shared, ring);
  }
}

// Where a thread of a multiplying warpgroup stands.
struct Place {
  int half = int(threadIdx.x) / kWarpgroup - 1, warp = int(threadIdx.x) / kWarp % 4, lane = int(threadIdx.x) % kWarp;
  __device__ int row(int h) const { return half * kPanel + warp * 16 + h * 8 + lane / 4; }  // of the block's tile
  __device__ int column(int i) const { return i / 4 * 8 + lane % 4 * 2 + i % 2; }           // of the i-th sum
};

// Sums leave a warp in parts of 16 rows of 256 bytes, which it lays out in shared memory of its own, so that whole lines go to
// memory. Nobody waits for them.
class Outlet {
 public:
  __device__ Outlet(std::uint32_t parts, const Place& at)
      : part_(parts + (at.half * kWarpgroup / kWarp + at.warp) * kPartBytes), at_(at) {}

  // f32, as they are: added to the results or instead of them. Every element has one tile, so that what is added to is whole.
  __device__ __forceinline__ void send(const float (&sums)[kCount], const Arguments& p, const Tile& t) const {
    const bool of_words = t.kind == Kind::dweight, add = of_words ? p.add_dweight : t.block > 0;
    const int word = t.block * p.chunk, rows = of_words ? min(p.chunk, p.V - word) : p.s, columns = p.D;
    float* to = of_words ? p.dweight + std::int64_t(word) * columns : p.dhidden;
#pragma unroll
    for (int first = 0; first < kCount; first += kPartLine / 8) {
      const int column = t.column + 2 * first;
      if (column >= columns) break;
#pragma unroll
      for (int i = 0; i < kPartLine / 8; i += 2) {
        const int row = i / 2 % 2 * 8 + at_.lane / 4, piece = i / 4 * 2 + at_.lane % 4 / 2;
        asm volatile(
            "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(part_ + row * kPartLine + (piece ^ row % 4 * 2) * 16 + at_.lane % 2 * 8),
            "f"(sums[first + i]), "f"(sums[first + i + 1])
            : "memory");
      }
      __syncwarp();  // waits for the part
#pragma unroll
      for (int i = 0; i < kPartRows; i += 2) {
        const int row = i + at_.lane / 16, piece = at_.lane % 16, place = t.row + at_.half * kPanel + at_.warp * kPartRows + row;
        float4 v;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "r"(part_ + row * kPartLine + (piece ^ row % 4 * 2) * 16)
                     : "memory");
        if (place >= rows || column + piece * 4 >= columns) continue;
        float* at = to + std::int64_t(place) * columns + column + piece * 4;
        if (add)
          asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                       : "memory");
        else
          *reinterpret_cast<float4*>(at) = v;
      }
      __syncwarp();  // waits for its readers
    }
  }

  // Rounded to bf16, in rows of so many elements.
  __device__ __forceinline__ void send_rounded(const float (&sums)[kCount], const Arguments& p, const Tile& t) const {
    const std::int64_t stride = p.stride;
    __nv_bfloat16* to = p.logits + t.block % 2 * (p.s * stride);
#pragma unroll
    for (int first = 0; first < kCount; first += kPartLine / 4) {
      const int column = t.column + 2 * first;
#pragma unroll
      for (int i = 0; i < kPartLine / 4; i += 8) {
        const float* of = sums + first + i;
        const int row = at_.lane % 16, piece = i / 4 + at_.lane / 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(part_ + row * kPartLine +
                                                                                              (piece ^ row % 8) * 16),
                     "r"(packed(of[0], of[1])), "r"(packed(of[2], of[3])), "r"(packed(of[4], of[5])), "r"(packed(of[6], of[7]))
                     : "memory");
      }
      __syncwarp();  // waits for the part
#pragma unroll
      for (int i = 0; i < kPartRows; i += 2) {
        const int row = i + at_.lane / 16, piece = at_.lane % 16, place = t.row + at_.half * kPanel + at_.warp * kPartRows + row;
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(part_ + row * kPartLine + (piece ^ row % 8) * 16)
                     : "memory");
        if (place < p.s && column + piece * 8 < stride) *reinterpret_cast<uint4*>(to + place * stride + column + piece * 8) = v;
      }
      __syncwarp();  // waits for its readers
    }
  }

 private:
  std::uint32_t part_;
  const Place& at_;
};

// What a thread knows of its two rows.
struct Known {
  int at_label[2];  // columns from the tile's first
  float top[2], share[2];
  template <Pass kPass>
  __device__ static Known of(const Arguments& p, const Place& at, const Tile& t) {
    Known k{};
    for (int h = 0; h < 2; ++h) {
      const int row = t.row + at.row(h);
      const int label = row < p.s ? p.rows.labels[row] : kIgnored;
      k.at_label[h] = label - t.block * p.chunk - t.column;
      if (kPass == Pass::gradients && label != kIgnored)
        k.top[h] = p.rows.top[row], k.share[h] = p.scale / p.rows.sum[row];
    }
    return k;
  }
  // Does any row of the warp have its label in the tile? Seldom.
  __device__ bool any_label() const {
    return __any_sync(0xffffffffU, (0 <= at_label[0] && at_label[0] < kColumns) || (0 <= at_label[1] && at_label[1] < kColumns));
  }
};

__device__ int words_left(const Arguments& p, const Tile& t) { return min(p.chunk, p.V - t.block * p.chunk) - t.column; }
__device__ __forceinline__ void mask(float (&sums)[kCount], const Place& at, int from, float with) {
  if (from >= kColumns) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (at.column(i) >= from) sums[i] = with;
}

// The tile's maximum of each row, and the sum of exponentials below it: in this thread, then over the four that share the row.
__device__ __forceinline__ void write_parts(float (&sums)[kCount], const Place& at, const Known& known, const Arguments& p,
                                            const Tile& t) {
  if (known.any_label()) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (at.column(i) == known.at_label[i / 2 % 2]) p.rows.label_logit[t.row + at.row(i / 2 % 2)] = sums[i];
  }
  mask(sums, at, words_left(p, t), -INFINITY);
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
  for (int i = 0; i < kCount; i += 8)
    for (int h = 0; h < 2; ++h)
      top[h] = fmaxf(top[h], fmaxf(fmaxf(sums[i + 2 * h], sums[i + 2 * h + 1]), fmaxf(sums[i + 2 * h + 4], sums[i + 2 * h + 5])));
  for (int lanes = 1; lanes < 4; lanes *= 2)
    for (float& t_ : top) t_ = fmaxf(t_, __shfl_xor_sync(0xffffffffU, t_, lanes));
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    for (int h = 0; h < 2; ++h)
      sum[h] += power_of_2((sums[i + 2 * h] - top[h]) * kLog2E) + power_of_2((sums[i + 2 * h + 1] - top[h]) * kLog2E);
  for (int lanes = 1; lanes < 4; lanes *= 2)
    for (float& s_ : sum) s_ += __shfl_xor_sync(0xffffffffU, s_, lanes);
  const int tiles = tiles_across(p.V);
  for (int h = 0; h < 2; ++h)
    if (const int row = t.row + at.row(h); at.lane % 4 == 0 && row < p.s)
      p.parts[std::int64_t(row) * tiles + t.column / kColumns] = make_float2(top[h], sum[h]);
}

__device__ __forceinline__ void become_gradients(float (&sums)[kCount], const Place& at, const Known& known, const Arguments& p,
                                                 const Tile& t) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = known.share[i / 2 % 2] * power_of_2((sums[i] - known.top[i / 2 % 2]) * kLog2E);
  if (known.any_label()) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (at.column(i) == known.at_label[i / 2 % 2]) sums[i] -= p.scale;
  }
  mask(sums, at, words_left(p, t), 0);
}

// A tile's results are on their way: a warp that does not multiply waits for them and counts the tile.
__device__ void finish(Shared& shared, std::uint32_t turn, int of) {
  __syncwarp();  // waits for all lanes' results
  if (threadIdx.x % kWarp != 0) return;
  barrier_wait(shared_address(&shared.reported), turn % 2 ^ 1);  // for the tile before, long ago
  if (threadIdx.x == kWarpgroup) shared.finished = of;
  barrier_arrive(shared_address(&shared.written));
}
__device__ void report(const Arguments& p, Shared& shared) {
  for (std::uint32_t turn = 0;; ++turn) {
    barrier_wait(shared_address(&shared.written), turn % 2);
    const int of = shared.finished;
    if (of < 0) return;
    asm volatile("fence.proxy.async;" ::: "memory");  // bulk copies will read them
    __threadfence();
    atomicAdd(&p.done[of], 1U);
    barrier_arrive(shared_address(&shared.reported));
  }
}

template <Pass kPass>
__device__ void consume(const Arguments& p, std::uint32_t stages, Shared& shared) {
  Ring ring;
  const Place at;
  const Outlet outlet(stages + kStages * kStageBytes, at);
  for (std::uint32_t turn = 0;; ++turn) {
    shared.wait_full(ring);
    const Tile t = shared.tile[ring.stage];
    if (t.kind == Kind::end) {
      if (kPass == Pass::gradients && !p.given) finish(shared, turn, -1);
      return;
    }
    if (turn == 0 && at.half == 1) warpgroups_sync(kLagBarrier);
    const bool leads = turn == 0 && at.half == 0;
    float sums[kCount] = {};
    if (t.kind == Kind::logits) {
      const Known known = Known::of<kPass>(p, at, t);
      multiply<Along::k, Along::k>(sums, ring, shared, stages, t.depth_blocks, leads);
      if constexpr (kPass == Pass::gradients) {
        become_gradients(sums, at, known, p, t);
      } else {
        if constexpr (kPass == Pass::kept) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) sums[i] = to_float(from_float<__nv_bfloat16>(sums[i]));
        }
        write_parts(sums, at, known, p, t);
        if constexpr (kPass == Pass::kept) mask(sums, at, words_left(p, t), 0);
      }
      if constexpr (kPass != Pass::sums) outlet.send_rounded(sums, p, t);
    } else if constexpr (kPass == Pass::gradients) {
      if (t.kind == Kind::dhidden)
        multiply<Along::k, Along::outer>(sums, ring, shared, stages, t.depth_blocks, leads);
      else
        multiply<Along::outer, Along::outer>(sums, ring, shared, stages, t.depth_blocks, leads);
      outlet.send(sums, p, t);
    }
    if (kPass == Pass::gradients && !p.given) finish(shared, turn, t.block * kParts + t.part);
  }
}

// grid (pairs of blocks, as many as fit the device), block (kThreads): the first warpgroup copies, two multiply and write.
// counters: two that are zero before and after.
template <Pass kPass>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1)
    cross_entropy_tiles_kernel(const __grid_constant__ Arguments p, std::uint32_t* counters) {
  extern __shared__ unsigned char memory[];
  const std::uint32_t stages = (shared_address(memory) + 1023) / 1024 * 1024;  // whole swizzle patterns
  Shared& shared = *reinterpret_cast<Shared*>(memory + (stages - shared_address(memory)) + kStages * kStageBytes + kPartsBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&p.hidden);
    prefetch_map(&p.weight);
    shared.init();
    barrier_init(shared_address(&shared.written), kConsumers * kWarpgroup / kWarp);
    barrier_init(shared_address(&shared.reported), 1);
    fence_barrier_init();
  }
  cluster_sync();  // waits for the barriers of both blocks
  if (threadIdx.x < kWarpgroup) {
    leave_registers<72>();
    if (threadIdx.x == 0) produce<kPass>(p, counters, stages, shared);
    if (kPass == Pass::gradients && !p.given && threadIdx.x == kWarp) report(p, shared);
    __syncwarp();
  } else {
    take_registers<216>();
    consume<kPass>(p, stages, shared);
  }
  cluster_sync();  // the other block still tells this one's barriers what it has read
}

template <Pass kPass>
void run(Context& ctx, const Arguments& p) {
  const std::int64_t most = std::int64_t(blocks(p.s, kPair * kRows)) * blocks(std::max(p.V, p.D), kColumns) +
                            std::int64_t(blocks(p.V, kPair * kRows)) * blocks(p.D, kColumns);
  launch(ctx, cross_entropy_tiles_kernel<kPass>, {blocks_for(ctx, most), kThreads, kSharedBytes}, p, ctx.blas->counters());
}

CUtensorMap boxes_of(ConstTensor t) { return tensor_map(t, {t.shape[1], t.shape[0]}, {kLine / 2, kPanel}); }

Arguments arguments_of(const LossBlock& l, std::int64_t chunk) {
  Arguments p{};
  p.hidden = boxes_of(l.hidden);
  p.weight = boxes_of(l.weight);
  p.s = int(l.hidden.shape[0]);
  p.D = int(l.hidden.shape[1]);
  p.V = int(l.weight.shape[0]);
  p.chunk = int(chunk);
  p.rows = l.rows;
  return p;
}

}  // namespace

void loss_logits(Context& ctx, const LossBlock& l, float* parts, Tensor kept) {
  Arguments p = arguments_of(l, l.weight.shape[0]);
  p.parts = reinterpret_cast<float2*>(parts);
  if (!kept.present()) return run<Pass::sums>(ctx, p);
  p.logits = device_pointer<bf16>(kept);
  p.stride = int(kept.shape[1]);
  run<Pass::kept>(ctx, p);
}

void loss_gradients(Context& ctx, const LossBlock& l, const LossGradients& to) {
  const bool given = !to.done.present();
  const std::int64_t chunk = given ? l.weight.shape[0] : to.chunk;
  Arguments p = arguments_of(l, chunk);
  p.g = tensor_map(to.g, {to.g.shape[1], p.s, given ? 1 : 2}, {kLine / 2, kPanel, 1});
  p.logits = device_pointer<bf16>(to.g);
  p.stride = int(to.g.shape[1]);
  p.given = given;
  p.scale = to.scale;
  p.dhidden = to.dhidden.as<float>();
  if (to.dweight.present()) p.dweight = to.dweight.as<float>();
  p.add_dweight = to.add_dweight;
  if (!given) {
    p.done = reinterpret_cast<std::uint32_t*>(to.done.as<std::int32_t>());
    cuda_ok(cudaMemsetAsync(to.done.data, 0, std::size_t(to.done.bytes()), ctx.stream));
  }
  run<Pass::gradients>(ctx, p);
}

}  // namespace moetrain::ops::cuda
