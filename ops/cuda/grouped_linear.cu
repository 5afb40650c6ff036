// grouped_linear.cu -- ragged products over the groups' rows, whose bounds only the device knows: persistent wgmma kernels fed by
// bulk copies for dense bf16, ops/cuda/product.h for f32, mixed types and widths that are not multiples of 8.
//
// Forward and dgrad are one product with 256 rows of outputs a pair of blocks: y^T = W x^T, dx^T = W^T dy^T. The first operand's
// rows always fill their tiles, and a tile has as many columns, in steps of 32, as the group has rows. wgrad:
// ops/cuda/grouped_wgrad.cu.
#include <algorithm>

#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/blas.h"
#include "ops/cuda/grouped_passes.h"
#include "ops/cuda/grouped_tiles.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/product.h"
#include "ops/cuda/rows.cuh"
#include "ops/grouped_linear.h"

namespace moetrain::ops {
namespace {

using namespace cuda;           // NOLINT: the helpers of this backend
using namespace cuda::grouped;  // NOLINT

static_assert(kWidthOfTile == pair::kColumns && kWidthOfTile == pair::kPair * pair::kRows && kColumnsOfTile == kWidthStep &&
              kSummandsOfTile == pair::kDepth);

enum class Pass : std::uint8_t { forward, dgrad };

constexpr int kRoundBytes = kPanelBytes;  // 64 rows of results of a warpgroup, on their way out

using Shared = pair::Shared<Tile, kStages>;  // tiles by the stage where they begin
constexpr std::size_t kSharedBytes =
    kStages * kStageBytes + kConsumers * 2 * kRoundBytes + sizeof(Shared) + 1024;  // 1024: to align

// At most two matrices on the same rows: forward has two outputs of one x, dgrad the sum of two products.
struct Operands {
  CUtensorMap a[2], b[2], half_b[2];  // b in boxes of kWidthStep rows, and of half a tile's
  void* out[2];
};

__device__ int blocks_of_depth(const Sizes& s) { return s.summed * ((s.depth + kDepth - 1) / kDepth); }
__device__ int width_of(const Tile& t) { return (t.count + kWidthStep - 1) / kWidthStep * kWidthStep; }

// One thread a block copies its own rows of the first operand, and every other box of the columns for both blocks.
template <Pass kPass>
__device__ void produce(const Operands& of, Schedule schedule, std::uint32_t* counters, const Sizes& s, std::uint32_t stages,
                        Shared& shared) {
  Ring ring;
  for (Draw draw(shared, counters);; draw.step()) {
    const Tile t = schedule.tile(draw.take(), draw.rank());
    const int depth_blocks = blocks_of_depth(s), width = width_of(t);
    const bool whole = width == kColumns;
    const CUtensorMap *a = &of.a[t.matrix], *b = whole ? &of.half_b[0] : &of.b[0];
    for (int block = 0, k = 0; block < depth_blocks; ++block, ring.step()) {
      shared.wait_empty(ring);
      const std::uint32_t full = shared.full_at(ring), to_a = stages + ring.stage * kStageBytes, to_b = to_a + kABytes;
      if (block == 0) shared.tile[ring.stage] = t;
      if (t.count < 0) {
        barrier_arrive(full);
        return draw.end();
      }
      barrier_arrive_and_expect(full, kABytes + width * kLine);
      if constexpr (kPass == Pass::forward) {
        copy_box(to_a, a, full, k, t.row, t.group);
      } else {
#pragma unroll
        for (int panel = 0; panel < kAPanels; ++panel)
          copy_box(to_a + panel * kPanelBytes, a, full, t.row + panel * kPanel, k, t.group);
      }
      if (whole) {
        const int box = int(draw.rank()) * kColumns / kPair;
        copy_box_to(kBoth, to_b + box * kLine, b, full, k, t.begin + box);
      } else {
        for (int box = int(draw.rank()) * kWidthStep; box < width; box += kPair * kWidthStep)
          copy_box_to(kBoth, to_b + box * kLine, b, full, k, t.begin + box);
      }
      if ((k += kDepth) >= s.depth) k = 0, ++a, ++b;  // on to the second product
      if (block == 0) draw.tell_other();
    }
  }
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

// Transposes 64 results a row of the output through shared memory, 64 rows a round, and writes the rows that are the group's own.
template <int kCount>
__device__ __forceinline__ void write_rows(const float (&sums)[kCount], std::uint32_t rounds, int& round, const RowsOut& out) {
  const int half = int(threadIdx.x) / kWarpgroup - 1, warp = int(threadIdx.x) % kWarpgroup / kWarp, lane = int(threadIdx.x) % kWarp;
#pragma unroll
  for (int first = 0; first < kCount; first += 32, round ^= 1) {
    const std::uint32_t to = rounds + (half * 2 + round) * kRoundBytes;
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
      store<8>(out.out + row * out.width, values);
    }
  }
}

template <Pass kPass, int kWidth>
__device__ __forceinline__ void consume_tile(Ring& ring, Shared& shared, std::uint32_t stages, int& round, const Operands& of,
                                             const Sizes& s, const Tile& t, bool leads) {
  float sums[kWidth / 2] = {};
  multiply<kPass == Pass::forward ? Along::k : Along::outer, Along::k>(sums, ring, shared, stages, blocks_of_depth(s), leads);
  write_rows(sums, stages + kStages * kStageBytes, round, RowsOut(of.out[t.matrix], s, t));
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
__device__ void consume(const Operands& of, const Sizes& s, std::uint32_t stages, Shared& shared) {
  Ring ring;
  const int half = int(threadIdx.x) / kWarpgroup - 1;
  int round = 0;
  for (bool first = true;; first = false) {
    shared.wait_full(ring);
    const Tile t = shared.tile[ring.stage];
    if (t.count < 0) return;
    if (first && half == 1) warpgroups_sync(kLagBarrier);
    with_width<kColumns>(
        width_of(t), [&]<int kWidth>() { consume_tile<kPass, kWidth>(ring, shared, stages, round, of, s, t, first && half == 0); });
  }
}

// grid (pairs of blocks, as many as fit the device), block (kThreads): the first warpgroup copies, two multiply and write.
// Forward: a are W (I, O, e), b is x (I, R), out are y. dgrad: a are W (I, O, e), b are dy (O, R), out is dx. counters: two that
// are zero before and after.
template <Pass kPass>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_linear_kernel(const __grid_constant__ Operands of, const std::int64_t* __restrict__ offsets, std::uint32_t* counters,
                          const __grid_constant__ Sizes s) {
  extern __shared__ unsigned char memory[];
  const std::uint32_t stages = (shared_address(memory) + 1023) / 1024 * 1024;  // whole swizzle patterns
  Shared& shared =
      *reinterpret_cast<Shared*>(memory + (stages - shared_address(memory)) + kStages * kStageBytes + kConsumers * 2 * kRoundBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&of.a[0]);
    prefetch_map(&of.b[0]);
    shared.init();
    fence_barrier_init();
  }
  cluster_sync();  // waits for the barriers of both blocks
  if (threadIdx.x < kWarpgroup) {
    leave_registers<56>();
    if (threadIdx.x == 0) produce<kPass>(of, Schedule(offsets, s, nullptr), counters, s, stages, shared);
    __syncwarp();
  } else {
    take_registers<224>();
    consume<kPass>(of, s, stages, shared);
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

// May the bulk copies move rows of these tensors, as many as are present, and are they of the one type?
bool for_tensor_cores(std::initializer_list<ConstTensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const ConstTensor& t) {
    return !t.present() || (t.dtype == DType::bf16 && t.shape[t.shape.rank() - 1] % 8 == 0 &&
                            reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.shape[0] <= 0x7fffffff);
  });
}

template <Pass kPass>
void run_on_tensor_cores(Context& ctx, const Operands& of, const std::int64_t* offsets, const Sizes& s, std::int64_t most_rows) {
  const std::int64_t pairs = s.stacked * pairs_of(s.rows),
                     across = most_rows / kColumns + std::min<std::int64_t>(s.groups, most_rows);
  launch(ctx, grouped_linear_kernel<kPass>, {blocks_for(ctx, pairs * across), kThreads, kSharedBytes}, of, offsets,
         ctx.blas->counters(), s);
}

// y (+)= of one matrix a group, by the kernels for any types and widths.
struct Rows {
  ConstTensor x;
  ConstTensor w;
  Tensor y;
  bool transposed, add = false;  // w^T
};
void rows_product(Context& ctx, const Rows& a, const std::int64_t* offsets) {
  const std::int64_t n = a.y.shape[1], k = a.x.shape[1], wide = a.w.shape[2];
  product(ctx, {.m = a.x.shape[0],
                .n = n,
                .k = k,
                .a = {a.x.data, a.x.dtype, k, 1},
                .b = {a.w.data, a.w.dtype, a.transposed ? 1 : wide, a.transposed ? wide : 1, n * k},
                .c = a.y.data,
                .c_type = a.y.dtype,
                .c_row = n,
                .batch = a.w.shape[0],
                .beta = float(a.add),
                .ragged = Product::Ragged::rows,
                .offsets = offsets});
}

}  // namespace

void cuda::grouped_linear(Context& ctx, const GroupedLinearForward& a) {
  const std::int64_t R = a.x.shape[0], e = a.w.shape[0], O = a.w.shape[1], I = a.w.shape[2];
  const int matrices = a.w2.present() ? 2 : 1;
  if (R == 0 || O == 0) return;
  Scope scope(ctx.scratch);
  const std::int64_t* offsets = offsets_on_device(ctx, a.offsets, a.device_offsets);
  const ConstTensor w[] = {a.w, a.w2};
  const Tensor y[] = {a.y, a.y2};
  if (I > 0 && for_tensor_cores({a.x, a.w, a.y, a.w2, a.y2})) {
    Operands of;
    of.b[0] = tensor_map(a.x, {I, R}, {kDepth, kWidthStep});
    of.half_b[0] = tensor_map(a.x, {I, R}, {kDepth, kColumns / kPair});
    for (int m = 0; m < matrices; ++m) of.a[m] = tensor_map(w[m], {I, O, e}, {kDepth, kRows, 1}), of.out[m] = y[m].data;
    return run_on_tensor_cores<Pass::forward>(
        ctx, of, offsets, Sizes{.groups = int(e), .rows = int(O), .columns = 0, .depth = int(I), .stacked = matrices}, R);
  }
  for (int m = 0; m < matrices; ++m) rows_product(ctx, {.x = a.x, .w = w[m], .y = y[m], .transposed = true}, offsets);
}

void cuda::grouped_linear(Context& ctx, const GroupedLinearBackward& a) {
  const std::int64_t R = a.dy.shape[0], O = a.dy.shape[1];
  const int matrices = a.dy2.present() ? 2 : 1;
  const ConstTensor dy[] = {a.dy, a.dy2}, w[] = {a.w, a.w2};
  const Tensor dw[] = {a.dw, a.dw2};
  if (R == 0 && a.write_dw)
    for (const Tensor& t : dw)
      if (t.present()) cuda_ok(cudaMemsetAsync(t.data, 0, std::size_t(t.bytes()), ctx.stream));
  if (R == 0 || (!a.dx.present() && !a.dw.present())) return;
  Scope scope(ctx.scratch);
  const std::int64_t* offsets = offsets_on_device(ctx, a.offsets, a.device_offsets);
  if (a.dx.present() && a.dx.count() > 0) {
    const std::int64_t e = a.w.shape[0], I = a.w.shape[2];
    if (O > 0 && for_tensor_cores({a.dy, a.w, a.dx, a.dy2, a.w2})) {
      Operands of;
      of.out[0] = a.dx.data;
      for (int m = 0; m < matrices; ++m) {
        of.a[m] = tensor_map(w[m], {I, O, e}, {64, kDepth, 1});
        of.b[m] = tensor_map(dy[m], {O, R}, {kDepth, kWidthStep});
        of.half_b[m] = tensor_map(dy[m], {O, R}, {kDepth, kColumns / kPair});
      }
      run_on_tensor_cores<Pass::dgrad>(
          ctx, of, offsets, Sizes{.groups = int(e), .rows = int(I), .columns = 0, .depth = int(O), .summed = matrices}, R);
    } else {
      for (int m = 0; m < matrices; ++m)
        rows_product(ctx, {.x = dy[m], .w = w[m], .y = a.dx, .transposed = false, .add = m > 0}, offsets);
    }
  }
  if (a.dw.present() && a.dw.count() > 0) {
    const std::int64_t e = a.dw.shape[0], I = a.x.shape[1];
    if (for_tensor_cores({a.dy, a.x, a.dy2}) && in_packs<4>(I, {a.dw, a.dw2}))
      return grouped_wgrad(ctx, {.dy = {a.dy, a.dy2}, .x = a.x, .dw = {a.dw, a.dw2}, .offsets = offsets, .write = a.write_dw});
    for (int m = 0; m < matrices; ++m)
      product(ctx, {.m = O,
                    .n = I,
                    .k = R,
                    .a = {dy[m].data, dy[m].dtype, 1, O},
                    .b = {a.x.data, a.x.dtype, I, 1},
                    .c = dw[m].data,
                    .c_type = dw[m].dtype,
                    .c_row = I,
                    .c_batch = O * I,
                    .batch = e,
                    .beta = float(!a.write_dw),
                    .ragged = Product::Ragged::summands,
                    .offsets = offsets});
  }
}

}  // namespace moetrain::ops
