// grouped_linear.cu -- ragged products over the groups' rows, whose bounds only the device knows: persistent wgmma kernels fed by
// bulk copies for dense bf16, ops/cuda/product.h for f32, mixed types and widths that are not multiples of 8.
//
// All three passes are one product with 256 rows of outputs a pair of blocks: y^T = W x^T, dx^T = W^T dy^T, dw = dy^T x. The first
// operand's rows always fill their tiles, and where the group's rows are columns a tile has as many, in steps of 32, as it needs.
#include <algorithm>

#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/blas.h"
#include "ops/cuda/grouped_tiles.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/product.h"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/tensor_copy.cuh"
#include "ops/cuda/tensor_cores.cuh"
#include "ops/grouped_linear.h"

namespace moetrain::ops {
namespace {

using namespace cuda;           // NOLINT: the helpers of this backend
using namespace cuda::grouped;  // NOLINT

enum class Pass : std::uint8_t { forward, dgrad, wgrad };

constexpr int kStages = 4, kLine = 128;  // bytes of a stage's summands of one row: a swizzled line
constexpr int kABytes = kRows * kLine, kBBytes = kColumns * kLine, kStageBytes = kABytes + kBBytes;
constexpr int kPanelBytes = 64 * kLine;  // 64 rows of lines
constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kRoundBytes = 64 * kLine;        // 64 rows of results of a warpgroup, on their way out
constexpr int kSumColumns = 64, kSumBox = 32;  // of dw in a stage; of one copy of f32: a line
constexpr int kLag = 1;  // stages that the second warpgroup stays behind: it multiplies while the first one writes
constexpr int kLagBarrier = 3;

// More than stages: before a slot is used again both blocks have read it, since all stages have gone around in between.
constexpr int kSlots = 8;
static_assert(kSlots > kStages);

struct Shared {
  alignas(16) Tile tile[kStages];  // of the stage, where a tile begins
  std::uint64_t full[kStages], empty[kStages], told[kSlots];
  std::uint32_t drawn[kSlots];  // tiles of the pair, as its first block has told
};
constexpr std::size_t kSharedBytes =
    kStages * kStageBytes + kConsumers * 2 * kRoundBytes + sizeof(Shared) + 1024;  // 1024: to align
static_assert(sizeof(Order) <= kConsumers * 2 * kRoundBytes);                      // it lies where wgrad needs no room for results

// Where a warp stands in the ring of stages.
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void step() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// One thread a block copies its own rows of the first operand, and every other box of the columns for both blocks. That of the
// first block draws the pair's next tile and tells the other.
template <Pass kPass>
__device__ void produce(const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& dw, Schedule schedule,
                        std::uint32_t* counters, bool add, const Sizes& s, std::uint32_t stages, Shared& shared) {
  const std::uint32_t rank = cluster_rank();
  Ring ring;
  std::uint32_t index = blockIdx.x / kPair;
  for (std::uint32_t turn = 0;; ++turn) {
    const std::uint32_t slot = turn % kSlots, told = shared_address(&shared.told[slot]);
    const std::uint32_t next = rank == 0 ? gridDim.x / kPair + atomicAdd(&counters[0], 1U) : 0;
    const Tile t = schedule.tile(index, rank);
    const int depth_blocks = blocks_of_depth(s, t), width = width_of(s, t);
    for (int block = 0; block < depth_blocks; ++block, ring.step()) {
      barrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);  // for the readers in both blocks
      const std::uint32_t full = shared_address(&shared.full[ring.stage]), to_a = stages + ring.stage * kStageBytes,
                          to_b = to_a + kABytes;
      if (block == 0) shared.tile[ring.stage] = t;
      if (t.count < 0) {
        barrier_arrive(full);
        // The last pair to finish leaves the counters as it found them.
        if (rank == 0) {
          __threadfence();
          if (atomicInc(&counters[1], gridDim.x / kPair - 1) == gridDim.x / kPair - 1) counters[0] = 0;
        }
        return;
      }
      barrier_arrive_and_expect(full, kABytes + width * kLine);
      const int k = block * kDepth;
      if constexpr (kPass == Pass::forward) {
        copy_box(to_a, &a, full, k, t.row, t.group);
      } else {
        for (int panel = 0; panel < kRows / 64; ++panel)
          if constexpr (kPass == Pass::dgrad)
            copy_box(to_a + panel * kPanelBytes, &a, full, t.row + panel * 64, k, t.group);
          else
            copy_box(to_a + panel * kPanelBytes, &a, full, t.row + panel * 64, t.begin + k);
      }
      constexpr std::uint16_t kBoth = (1 << kPair) - 1;
      if constexpr (kPass == Pass::wgrad) {
        for (int panel = int(rank); panel < kColumns / 64; panel += kPair)
          copy_box_to(kBoth, to_b + panel * kPanelBytes, &b, full, t.column + panel * 64, t.begin + k);
      } else {
        for (int box = int(rank) * kWidthStep; box < width; box += kPair * kWidthStep)
          copy_box_to(kBoth, to_b + box * kLine, &b, full, k, t.begin + box);
      }
      if constexpr (kPass == Pass::wgrad)
        if (add) {  // dw comes nearer while its products are made, little by little: all blocks want theirs at the same time
          constexpr int kBoxes = kColumns / kSumBox * 2;
#pragma unroll 1
          for (int box = block * kBoxes / depth_blocks; box < (block + 1) * kBoxes / depth_blocks; ++box)
            prefetch_box(&dw, t.column + box / 2 * kSumBox, t.row + box % 2 * 64, t.group);
        }
      if (block == 0 && rank == 0)
        tell(shared_address(&shared.drawn[slot]), told, 1, next);  // early: the other will not wait for it
    }
    if constexpr (kPass == Pass::wgrad)
      for (int column = t.column; column < min(t.column + kColumns, s.columns); column += kSumColumns, ring.step()) {
        barrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);  // for the readers in both blocks
        const std::uint32_t full = shared_address(&shared.full[ring.stage]);
        if (!add) {  // the stage is only lent
          barrier_arrive(full);
          continue;
        }
        barrier_arrive_and_expect(full, kRows * kSumColumns * 4);
        for (int box = 0; box < 4; ++box)
          copy_box(stages + ring.stage * kStageBytes + box * kPanelBytes, &dw, full, column + box % 2 * kSumBox,
                   t.row + box / 2 * 64, t.group);
      }
    if (rank != 0) barrier_wait_for_told(told, turn / kSlots % 2);
    index = rank == 0 ? next : shared.drawn[slot];
  }
}

// So many warps of this block have read their stage: tells the producers of both blocks, who write to both.
__device__ void release(Shared& shared, int stage, int warps = 1) {
  const std::uint32_t lane = threadIdx.x % kWarp;
  if (lane < kPair) barrier_arrive_at(shared_address(&shared.empty[stage]), lane, warps);
}

// Lines past the group's end become zeros: they hold rows of the next group. Each warpgroup clears all that it reads itself.
__device__ void clear_lines(std::uint32_t a, std::uint32_t b, int from) {
  constexpr int kPieces = kLine / 16, kPanels = 1 + kColumns / 64;
  for (int i = from * kPieces * kPanels + int(threadIdx.x) % kWarpgroup; i < kDepth * kPieces * kPanels; i += kWarpgroup) {
    const int panel = i % kPanels, piece = i / kPanels;
    const std::uint32_t at = (panel == 0 ? a : b + (panel - 1) * kPanelBytes) + piece * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  fence_shared_writes();
}

// Adds the products of one warpgroup's half of a tile. The first stage has already come.
template <Pass kPass, int kCount>
__device__ __forceinline__ void multiply(float (&sums)[kCount], Ring& ring, Shared& shared, std::uint32_t stages, const Sizes& s,
                                         const Tile& t, bool leads) {
  constexpr Along kA = kPass == Pass::forward ? Along::k : Along::outer, kB = kPass == Pass::wgrad ? Along::outer : Along::k;
  const int half = int(threadIdx.x) / kWarpgroup - 1, depth_blocks = blocks_of_depth(s, t);
  int before = 0;
  for (int block = 0; block < depth_blocks; ++block) {
    if (block > 0) barrier_wait(shared_address(&shared.full[ring.stage]), ring.parity);
    const std::uint32_t at_a = stages + ring.stage * kStageBytes + half * kPanelBytes,
                        at_b = stages + ring.stage * kStageBytes + kABytes;
    if constexpr (kPass == Pass::wgrad)
      if (block + 1 == depth_blocks && (t.count % kDepth != 0 || t.count == 0)) {
        clear_lines(at_a, at_b, t.count % kDepth);
        warpgroup_sync(1 + half);  // waits for the zeros of the other warps
      }
    const std::uint64_t a = operand_at(at_a, kPanelBytes), b = operand_at(at_b, kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) wgmma<kA, kB>(sums, a + k * step_of(kA), b + k * step_of(kB));
    wgmma_commit();
    wgmma_wait<1>();
    if (block > 0) release(shared, before);
    if (leads && block == min(kLag, depth_blocks - 1)) warpgroups_arrive(kLagBarrier);
    before = ring.stage;
    ring.step();
  }
  wgmma_wait<0>();
  settle(sums);
  release(shared, before);
}

// Where a thread's 8 results of each row go: 8 threads a row, 16 rows a step.
struct RowsOut {
  __nv_bfloat16* out;  // at the tile's first row and the thread's column
  std::int64_t width;
  int rows;  // of the tile that are the group's own; none for columns past the output
  __device__ RowsOut(void* y, const Sizes& s, const Tile& t) : width(s.rows) {
    const int half = int(threadIdx.x) / kWarpgroup - 1, column = t.row + half * 64 + int(threadIdx.x) % 8 * 8;
    out = static_cast<__nv_bfloat16*>(y) + t.begin * width + column;
    rows = column < s.rows ? t.count : 0;
  }
  __device__ static int first() { return int(threadIdx.x) % kWarpgroup / 8; }
  static constexpr int kStep = kWarpgroup / 8;
};

// The rows that results will be added to, toward the L2 cache.
__device__ void prefetch_rows(const RowsOut& to) {
  for (int row = to.first(); row < to.rows; row += to.kStep)
    if (threadIdx.x % 8 == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(to.out + row * to.width));
}

// Transposes 64 results a row of the output through shared memory, 64 rows a round, and writes the rows that are the group's own.
template <int kCount>
__device__ __forceinline__ void write_rows(const float (&sums)[kCount], std::uint32_t rounds, int& round, const RowsOut& out,
                                           bool add) {
  const int half = int(threadIdx.x) / kWarpgroup - 1, warp = int(threadIdx.x) % kWarpgroup / kWarp, lane = int(threadIdx.x) % kWarp;
#pragma unroll
  for (int first = 0; first < kCount; first += 32, round ^= 1) {
    const std::uint32_t to = rounds + (half * 2 + round) * kRoundBytes;
    Pack<__nv_bfloat16, 8> old[64 / RowsOut::kStep];
    if (add) {
#pragma unroll
      for (int i = 0; i < 64; i += out.kStep)
        if (const int row = 2 * first + i + out.first(); row < out.rows) old[i / out.kStep] = load<8>(out.out + row * out.width);
    }
#pragma unroll
    for (int j = 0; j < 32; j += 8) {
      if (first + j >= kCount) break;
      const float* of = sums + first + j;
      const int row = 2 * j + lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + row * kLine + (piece ^ row % 8) * 16),
          "r"(packed(of[0], of[1])), "r"(packed(of[2], of[3])), "r"(packed(of[4], of[5])), "r"(packed(of[6], of[7]))
          : "memory");
    }
    warpgroup_sync(1 + half);  // waits for all warps' results; the round before last has been read by all who come here
#pragma unroll
    for (int i = 0; i < 64; i += out.kStep) {
      const int line = i + out.first(), row = 2 * first + line;
      if (row >= out.rows) continue;
      Pack<__nv_bfloat16, 8> values;
      auto* words = reinterpret_cast<std::uint32_t*>(&values);
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(to + line * kLine + (int(threadIdx.x) % 8 ^ line % 8) * 16)
                   : "memory");
      if (add)
        for (int e = 0; e < 8; ++e)
          values.at[e] = from_float<__nv_bfloat16>(to_float(old[i / out.kStep].at[e]) + to_float(values.at[e]));
      store<8>(out.out + row * out.width, values);
    }
  }
}

// Adds the sums to dw in the stages that have brought it, or only writes them there, and sends these off. Every element has one
// tile.
template <int kCount>
__device__ __forceinline__ void add_sums(const float (&sums)[kCount], Ring& ring, Shared& shared, std::uint32_t stages,
                                         const CUtensorMap& dw, bool add, const Sizes& s, const Tile& t) {
  const int half = int(threadIdx.x) / kWarpgroup - 1, warp = int(threadIdx.x) / kWarp % 4, lane = int(threadIdx.x) % kWarp;
  int sent = -1;  // the stage whose results are under way
#pragma unroll
  for (int first = 0; first < kCount; first += kSumColumns / 2) {
    if (t.column + 2 * first >= s.columns) break;
    barrier_wait(shared_address(&shared.full[ring.stage]), ring.parity);
    const std::uint32_t boxes = stages + ring.stage * kStageBytes + half * 2 * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kSumColumns / 2; i += 2) {
      const int j = i / 4, row = warp * 16 + lane / 4 + i / 2 % 2 * 8, piece = j % 4 * 2 + lane % 4 / 2;
      const std::uint32_t at = boxes + j / 4 * kPanelBytes + row * kLine + (piece ^ row % 8) * 16 + lane % 2 * 8;
      float low = 0, high = 0;
      if (add) asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(low), "=f"(high) : "r"(at) : "memory");
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(low + sums[first + i]), "f"(high + sums[first + i + 1])
                   : "memory");
    }
    fence_shared_writes();
    warpgroup_sync(1 + half);  // waits for the sums of all warps
    if (threadIdx.x % kWarpgroup < kWarp) {
      if (lane == 0) {
        for (int box = 0; box < 2; ++box)
          store_box(&dw, boxes + box * kPanelBytes, t.column + 2 * first + box * kSumBox, t.row + half * 64, t.group);
        store_commit();
        store_wait_read<1>();  // the boxes before these may be written again
      }
      __syncwarp();
      if (sent >= 0) release(shared, sent, kWarpgroup / kWarp);
    }
    sent = ring.stage;
    ring.step();
  }
  if (threadIdx.x % kWarpgroup < kWarp) {
    if (lane == 0) store_wait_read<0>();
    __syncwarp();
    release(shared, sent, kWarpgroup / kWarp);
  }
}

template <Pass kPass, int kWidth>
__device__ __forceinline__ void consume_tile(Ring& ring, Shared& shared, std::uint32_t stages, int& round, void* out, bool add,
                                             const Sizes& s, const Tile& t, const CUtensorMap& dw, bool leads) {
  float sums[kWidth / 2] = {};
  if constexpr (kPass == Pass::wgrad) {
    multiply<kPass>(sums, ring, shared, stages, s, t, leads);
    add_sums(sums, ring, shared, stages, dw, add, s, t);
  } else {
    const RowsOut rows(out, s, t);
    if (add) prefetch_rows(rows);
    multiply<kPass>(sums, ring, shared, stages, s, t, leads);
    write_rows(sums, stages + kStages * kStageBytes, round, rows, add);
  }
}

// run<kWidth>() for the width that a tile has.
template <int kWidth, class Run>
__device__ __forceinline__ void with_width(int width, const Run& run) {
  if (width == kWidth)
    run.template operator()<kWidth>();
  else if constexpr (kWidth > kWidthStep)
    with_width<kWidth - kWidthStep>(width, run);
}

template <Pass kPass>
__device__ void consume(std::uint32_t stages, Shared& shared, void* out, bool add, const Sizes& s, const CUtensorMap& dw) {
  Ring ring;
  const int half = int(threadIdx.x) / kWarpgroup - 1;
  int round = 0;
  for (bool first = true;; first = false) {
    barrier_wait(shared_address(&shared.full[ring.stage]), ring.parity);
    const Tile t = shared.tile[ring.stage];
    if (t.count < 0) return;
    if (first && half == 1) warpgroups_sync(kLagBarrier);
    const auto run = [&]<int kWidth>() {
      consume_tile<kPass, kWidth>(ring, shared, stages, round, out, add, s, t, dw, first && half == 0);
    };
    if constexpr (kPass == Pass::wgrad)
      run.template operator()<kColumns>();
    else
      with_width<kColumns>(width_of(s, t), run);
  }
}

// grid (pairs of blocks, as many as fit the device), block (kThreads): the first warpgroup copies, two multiply and write.
// Forward: a is W (I, O, e), b is x (I, R), out is y. dgrad: a is W (I, O, e), b is dy (O, R), out is dx. wgrad: a is dy (O, R), b
// is x (I, R), dw is (I, O, e) f32. counters: two that are zero before and after.
template <Pass kPass>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_linear_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                          const std::int64_t* __restrict__ offsets, const __grid_constant__ CUtensorMap dw, std::uint32_t* counters,
                          void* out, bool add, const __grid_constant__ Sizes s) {
  extern __shared__ unsigned char memory[];
  const std::uint32_t stages = (shared_address(memory) + 1023) / 1024 * 1024;  // whole swizzle patterns
  Shared& shared =
      *reinterpret_cast<Shared*>(memory + (stages - shared_address(memory)) + kStages * kStageBytes + kConsumers * 2 * kRoundBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&a);
    prefetch_map(&b);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), kPair * kConsumers * kWarpgroup / kWarp);
    }
    for (int i = 0; i < kSlots; ++i) barrier_init(shared_address(&shared.told[i]), 1);
    fence_barrier_init();
  }
  Order* order = nullptr;
  if constexpr (kPass == Pass::wgrad)
    if (s.groups <= kMostSorted) {
      order = reinterpret_cast<Order*>(memory + (stages - shared_address(memory)) + kStages * kStageBytes);
      sort_groups(offsets, s.groups, *order);
    }
  cluster_sync();  // waits for the barriers of both blocks, and for the order
  if (threadIdx.x < kWarpgroup) {
    leave_registers<56>();
    if (threadIdx.x == 0) produce<kPass>(a, b, dw, Schedule(offsets, s, order), counters, add, s, stages, shared);
    __syncwarp();
  } else {
    take_registers<224>();
    consume<kPass>(stages, shared, out, add, s, dw);
  }
  cluster_sync();  // the other block still tells this one's barriers what it has read
}

struct OffsetsPart {
  static constexpr int kMost = 448;  // of a kernel's 4 KB of parameters
  std::int64_t at[kMost];
};

// grid (1), block (OffsetsPart::kMost): offsets that came from the host
__global__ void grouped_linear_offsets_kernel(const OffsetsPart part, std::int64_t* __restrict__ offsets, int count) {
  if (int(threadIdx.x) < count) offsets[threadIdx.x] = part.at[threadIdx.x];
}

// The offsets on the device, in scratch where they were given on the host.
const std::int64_t* offsets_on_device(Context& ctx, std::span<const std::int64_t> offsets, ConstTensor device_offsets) {
  if (device_offsets.present()) return device_offsets.as<std::int64_t>();
  std::int64_t* to = ctx.scratch.take(DType::i64, {std::int64_t(offsets.size())}).as<std::int64_t>();
  for (std::size_t first = 0; first < offsets.size(); first += OffsetsPart::kMost) {
    OffsetsPart part;
    const std::size_t count = std::min(offsets.size() - first, std::size_t(OffsetsPart::kMost));
    std::copy_n(offsets.begin() + std::ptrdiff_t(first), count, part.at);
    launch(ctx, grouped_linear_offsets_kernel, {1, OffsetsPart::kMost}, part, to + first, int(count));
  }
  return to;
}

// May the bulk copies move rows of these tensors, and are they of the one type?
bool for_tensor_cores(std::initializer_list<ConstTensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const ConstTensor& t) {
    return t.dtype == DType::bf16 && t.shape[t.shape.rank() - 1] % 8 == 0 && reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 &&
           t.shape[0] <= 0x7fffffff;
  });
}

template <Pass kPass>
void run_on_tensor_cores(Context& ctx, const CUtensorMap& a, const CUtensorMap& b, const std::int64_t* offsets, Tensor out,
                         bool add, const Sizes& s, std::int64_t most_rows) {
  int device = 0, multiprocessors = 0;
  cuda_ok(cudaGetDevice(&device));
  cuda_ok(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const std::int64_t pairs = (s.rows + kPair * kRows - 1) / (kPair * kRows);
  const std::int64_t across = s.depth > 0 ? most_rows / kColumns + std::min<std::int64_t>(s.groups, most_rows)
                                          : std::int64_t(s.groups) * ((s.columns + kColumns - 1) / kColumns);
  check(pairs * across < 0x7fffffff, "grouped_linear: more tiles than can be counted", {{"tiles", pairs * across}});
  const std::int64_t work = std::min<std::int64_t>(pairs * across, multiprocessors / kPair);
  const CUtensorMap dw = kPass == Pass::wgrad ? tensor_map(out, {s.columns, s.rows, s.groups}, {kSumBox, 64, 1}) : a;
  launch(ctx, grouped_linear_kernel<kPass>, {blocks(work * kPair, 1), kThreads, kSharedBytes}, a, b, offsets, dw,
         ctx.blas->counters(), out.data, add, s);
}

}  // namespace

void cuda::grouped_linear(Context& ctx, const GroupedLinearForward& a) {
  const std::int64_t R = a.x.shape[0], e = a.w.shape[0], O = a.w.shape[1], I = a.w.shape[2];
  if (R == 0 || O == 0) return;
  Scope scope(ctx.scratch);
  const std::int64_t* offsets = offsets_on_device(ctx, a.offsets, a.device_offsets);
  if (I > 0 && for_tensor_cores({a.x, a.w, a.y}))
    return run_on_tensor_cores<Pass::forward>(ctx, tensor_map(a.w, {I, O, e}, {kDepth, kRows, 1}),
                                              tensor_map(a.x, {I, R}, {kDepth, kWidthStep}), offsets, a.y, false,
                                              {int(e), int(O), 0, int(I)}, R);
  product(ctx, {.m = R,
                .n = O,
                .k = I,
                .a = {a.x.data, a.x.dtype, I, 1},
                .b = {a.w.data, a.w.dtype, 1, I, O * I},
                .c = a.y.data,
                .c_type = a.y.dtype,
                .c_row = O,
                .batch = e,
                .ragged = Product::Ragged::rows,
                .offsets = offsets});
}

void cuda::grouped_linear(Context& ctx, const GroupedLinearBackward& a) {
  const std::int64_t R = a.dy.shape[0], O = a.dy.shape[1];
  if (R == 0 && a.write_dw && a.dw.present()) cuda_ok(cudaMemsetAsync(a.dw.data, 0, std::size_t(a.dw.bytes()), ctx.stream));
  if (R == 0 || (!a.dx.present() && !a.dw.present())) return;
  Scope scope(ctx.scratch);
  const std::int64_t* offsets = offsets_on_device(ctx, a.offsets, a.device_offsets);
  if (a.dx.present() && a.dx.count() > 0) {
    const std::int64_t e = a.w.shape[0], I = a.w.shape[2];
    if (O > 0 && for_tensor_cores({a.dy, a.w, a.dx}))
      run_on_tensor_cores<Pass::dgrad>(ctx, tensor_map(a.w, {I, O, e}, {64, kDepth, 1}),
                                       tensor_map(a.dy, {O, R}, {kDepth, kWidthStep}), offsets, a.dx, a.add_dx,
                                       {int(e), int(I), 0, int(O)}, R);
    else
      product(ctx, {.m = R,
                    .n = I,
                    .k = O,
                    .a = {a.dy.data, a.dy.dtype, O, 1},
                    .b = {a.w.data, a.w.dtype, I, 1, O * I},
                    .c = a.dx.data,
                    .c_type = a.dx.dtype,
                    .c_row = I,
                    .batch = e,
                    .beta = float(a.add_dx),
                    .ragged = Product::Ragged::rows,
                    .offsets = offsets});
  }
  if (a.dw.present() && a.dw.count() > 0) {
    const std::int64_t e = a.dw.shape[0], I = a.x.shape[1];
    if (for_tensor_cores({a.dy, a.x}) && in_packs<4>(I, {a.dw}))
      run_on_tensor_cores<Pass::wgrad>(ctx, tensor_map(a.dy, {O, R}, {64, kDepth}), tensor_map(a.x, {I, R}, {64, kDepth}), offsets,
                                       a.dw, !a.write_dw, {int(e), int(O), int(I), 0, a.write_dw}, R);
    else
      product(ctx, {.m = O,
                    .n = I,
                    .k = R,
                    .a = {a.dy.data, a.dy.dtype, 1, O},
                    .b = {a.x.data, a.x.dtype, I, 1},
                    .c = a.dw.data,
                    .c_type = a.dw.dtype,
                    .c_row = I,
                    .c_batch = O * I,
                    .batch = e,
                    .beta = float(!a.write_dw),
                    .ragged = Product::Ragged::summands,
                    .offsets = offsets});
  }
}

}  // namespace moetrain::ops
