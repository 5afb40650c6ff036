// grouped_wgrad.cu -- dw = dy^T x of every group in f32, where the group's rows are the summands: a persistent wgmma kernel fed by
// bulk copies. Some of a tile's sums leave while the next tile's products are made, the others while the other warpgroup
// multiplies.
#include "ops/cuda/blas.h"
#include "ops/cuda/grouped_passes.h"
#include "ops/cuda/grouped_tiles.cuh"
#include "ops/cuda/launch.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;           // NOLINT: the helpers of this backend
using namespace cuda::grouped;  // NOLINT

constexpr int kBoxRows = 16, kBoxColumns = 32, kBoxBytes = kBoxRows * kLine;  // of dw, on their way out of a warp
constexpr int kBoxes = 2;                                                     // of a warp
constexpr int kChunks = kColumns / kBoxColumns, kChunk = kBoxColumns / 2;     // of a tile; sums of a thread for a box
constexpr int kKeptChunks = kChunks / 2;  // that wait for the next tile's products: as many as registers hold
constexpr int kLag = 2;                   // stages that the second warpgroup stays behind: it multiplies while the first one sends
constexpr int kShallow = 512;             // rows of a group: up to about here memory is slower than the products

struct Shared : pair::Shared<Tile, kSlots> {
  std::uint64_t ready[kSlots];
  Order order;
};
constexpr int kBoxesBytes = kConsumers * kWarpgroup / kWarp * kBoxes * kBoxBytes;
constexpr std::size_t kSharedBytes = kStages * kStageBytes + kBoxesBytes + sizeof(Shared);
static_assert(kSharedBytes <= 227 << 10 && kMostSorted * sizeof(int) <= kBoxesBytes);

struct Maps {
  CUtensorMap dy[2], x, dw[2];
};

// One thread a block copies its own rows of dy^T, and every other panel of x for both blocks.
__device__ void produce(const Maps& maps, Schedule schedule, std::uint32_t* counters, std::uint32_t stages, Shared& shared) {
  Ring ring;
  for (Draw draw(shared, counters);; draw.step()) {
    const std::uint32_t rank = draw.rank(), slot = draw.slot();
    const Tile t = schedule.tile(draw.take(), rank);
    const CUtensorMap* dy = &maps.dy[t.matrix];
    const int end = t.begin + max(1, t.count);  // an empty group has a turn too
    for (int k = t.begin; k < end; k += kDepth, ring.step()) {
      shared.wait_empty(ring);
      if (k == t.begin) {
        shared.tile[slot] = t;
        barrier_arrive(shared_address(&shared.ready[slot]));
      }
      if (t.count < 0) return draw.end();
      const std::uint32_t full = shared.full_at(ring), to_a = stages + ring.stage * kStageBytes,
                          to_b = to_a + (kAPanels + rank) * kPanelBytes;
      barrier_arrive_and_expect(full, kStageBytes);
#pragma unroll
      for (int panel = 0; panel < kAPanels; ++panel) copy_box(to_a + panel * kPanelBytes, dy, full, t.row + panel * kPanel, k);
#pragma unroll
      for (int panel = 0; panel < kBPanels; panel += kPair)
        copy_box_to(kBoth, to_b + panel * kPanelBytes, &maps.x, full, t.column + (panel + int(rank)) * kPanel, k);
      if (k == t.begin) draw.tell_other();
    }
  }
}

// Lines past the group's end become zeros, as far as they are multiplied: they hold rows of the next group. Each warpgroup clears
// all that it reads itself.
__device__ void clear_lines(std::uint32_t a, std::uint32_t b, int from, int to) {
  constexpr int kPieces = kLine / 16, kPanels = 1 + kBPanels;
  for (int i = from * kPieces * kPanels + int(threadIdx.x) % kWarpgroup; i < to * kPieces * kPanels; i += kWarpgroup) {
    const int panel = i % kPanels;
    const std::uint32_t at = (panel == 0 ? a : b + (panel - 1) * kPanelBytes) + i / kPanels * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  fence_shared_writes();
}

template <int kSteps>
__device__ __forceinline__ void multiply_steps(float (&sums)[kChunks * kChunk], std::uint64_t a, std::uint64_t b) {
  constexpr std::uint64_t kStep = step_of(Along::outer);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma<Along::outer, Along::outer>(sums, a + k * kStep, b + k * kStep);
  wgmma_commit();
}

// Adds the products of this warpgroup's half of a tile; meanwhile(block) while those of a whole block of summands are made.
template <class Meanwhile>
__device__ __forceinline__ void multiply(float (&sums)[kChunks * kChunk], Ring& ring, Shared& shared, std::uint32_t stages,
                                         int count, const Meanwhile& meanwhile) {
  const int half = int(threadIdx.x) / kWarpgroup - 1, whole = count / kDepth, rest = count % kDepth;
  int before = -1;
  for (int block = 0; block < whole; ++block, ring.step()) {
    shared.wait_full(ring);
    const std::uint32_t stage = stages + ring.stage * kStageBytes;
    multiply_steps<kDepth / 16>(sums, operand_at(stage + half * kPanelBytes), operand_at(stage + kABytes, kPanelBytes));
    meanwhile(block);
    wgmma_wait<1>();
    if (before >= 0) shared.release(before);
    before = ring.stage;
  }
  if (rest > 0 || whole == 0) {
    shared.wait_full(ring);
    const std::uint32_t a = stages + ring.stage * kStageBytes + half * kPanelBytes, b = stages + ring.stage * kStageBytes + kABytes;
    const int steps = (rest + 15) / 16;
    if (rest < steps * 16) {
      clear_lines(a, b, rest, steps * 16);
      warpgroup_sync(1 + half);  // waits for the zeros of the other warps
    }
    for (int k = 0; k < steps; ++k)
      multiply_steps<1>(sums, operand_at(a) + k * step_of(Along::outer), operand_at(b, kPanelBytes) + k * step_of(Along::outer));
    wgmma_wait<0>();
    shared.release(ring.stage);
    ring.step();
  }
  wgmma_wait<0>();
  settle(sums);
  if (before >= 0) shared.release(before);
}

// A warp's way to dw, through boxes of 16 rows and 32 columns.
struct Out {
  const CUtensorMap* dw;  // of each matrix
  std::uint32_t boxes;
  int columns;
  bool add;
  std::uint32_t next = 0;

  // What the warp will add to, toward the L2 cache.
  __device__ __forceinline__ void bring_near(const Tile& t) const {
    const int warp = int(threadIdx.x) / kWarp - kWarpgroup / kWarp;
    if (threadIdx.x % kWarp == 0)
      for (int chunk = 0; chunk < kChunks; ++chunk)
        prefetch_box(&dw[t.matrix], t.column + chunk * kBoxColumns, t.row + warp * kBoxRows, t.group);
  }
  // Sends the warp's sums of 32 columns of a tile off. Each element of dw has one tile.
  __device__ __forceinline__ void send(const float* sums, const Tile& t, int chunk) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp - kWarpgroup / kWarp;
    const int column = t.column + chunk * kBoxColumns;
    if (column >= columns) return;
    const std::uint32_t box = boxes + next * kBoxBytes;
    next = (next + 1) % kBoxes;
    if (lane == 0) store_wait_read<kBoxes - 1>();  // until what was in this box has left
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChunk; i += 2) {
      const int line = lane / 4 + i / 2 % 2 * 8, piece = i / 4 * 2 + lane % 4 / 2;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(box + line * kLine + (piece ^ line % 8) * 16 + lane % 2 * 8),
                   "f"(sums[i]), "f"(sums[i + 1])
                   : "memory");
    }
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) {
      if (add)
        add_box(&dw[t.matrix], box, column, t.row + warp * kBoxRows, t.group);
      else
        store_box(&dw[t.matrix], box, column, t.row + warp * kBoxRows, t.group);
      store_commit();
    }
  }
};

__device__ void consume(const Maps& maps, bool add, const Sizes& s, std::uint32_t stages, Shared& shared) {
  const std::uint32_t half = threadIdx.x / kWarpgroup - 1, warp = threadIdx.x / kWarp - kWarpgroup / kWarp;
  Out out{maps.dw, stages + kStages * kStageBytes + warp * kBoxes * kBoxBytes, s.columns, add};
  Ring ring;
  float kept[kKeptChunks * kChunk] = {};
  int sent = kKeptChunks;  // of what is kept
  for (std::uint32_t turn = 0;; ++turn) {
    const std::uint32_t slot = turn % kSlots;
    const Tile &t = shared.tile[slot], &before = shared.tile[(slot + kSlots - 1) % kSlots];  // not told anew so soon
    const auto send_kept = [&](int end) {
#pragma unroll
      for (int chunk = 0; chunk < kKeptChunks; ++chunk)
        if (sent <= chunk && chunk < end) out.send(kept + chunk * kChunk, before, chunk);
      sent = end;
    };
    barrier_wait(shared_address(&shared.ready[slot]), turn / kSlots % 2);
    if (t.count < 0) {
      send_kept(kKeptChunks);
      break;
    }
    if (turn == 0 && half == 1) warpgroups_sync(kLagBarrier);
    const int whole = t.count / kDepth, pause = max(1, whole / kKeptChunks);
    const bool shallow = t.count <= kShallow;
    if (shallow && add) out.bring_near(t);
    float sums[kChunks * kChunk] = {};
    multiply(sums, ring, shared, stages, t.count, [&](int block) {
      if (turn == 0 && half == 0 && block == kLag) warpgroups_arrive(kLagBarrier);
      if (sent < kKeptChunks && block % pause == 0) send_kept(sent + 1);
    });
    if (turn == 0 && half == 0 && whole <= kLag) warpgroups_arrive(kLagBarrier);
    send_kept(kKeptChunks);
    if (shallow) {
#pragma unroll
      for (int chunk = 0; chunk < kKeptChunks; ++chunk) out.send(sums + chunk * kChunk, t, chunk);
    } else {
#pragma unroll
      for (int i = 0; i < kKeptChunks * kChunk; ++i) kept[i] = sums[i];
      sent = 0;
    }
#pragma unroll
    for (int chunk = kKeptChunks; chunk < kChunks; ++chunk) out.send(sums + chunk * kChunk, t, chunk);
  }
  if (threadIdx.x % kWarp == 0) store_wait_read<0>();  // the memory is about to go
}

// grid (pairs of blocks, as many as fit the device), block (kThreads): the first warpgroup copies, two multiply and send.
// counters: two that are zero before and after.
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_wgrad_kernel(const __grid_constant__ Maps maps, const std::int64_t* __restrict__ offsets, std::uint32_t* counters,
                         bool add, const __grid_constant__ Sizes s) {
  extern __shared__ __align__(1024) unsigned char memory[];  // whole swizzle patterns
  const std::uint32_t stages = shared_address(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory + kStages * kStageBytes + kBoxesBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&maps.dy[0]);
    prefetch_map(&maps.x);
    prefetch_map(&maps.dw[0]);
    shared.init();
    for (int i = 0; i < kSlots; ++i) barrier_init(shared_address(&shared.ready[i]), 1);
    fence_barrier_init();
  }
  const bool sorted = s.groups <= kMostSorted;
  if (sorted) sort_groups(offsets, s.groups, reinterpret_cast<int*>(memory + kStages * kStageBytes), shared.order);
  cluster_sync();  // waits for the barriers of both blocks, and for the order
  if (threadIdx.x < kWarpgroup) {
    leave_registers<40>();
    if (threadIdx.x == 0) produce(maps, Schedule(offsets, s, sorted ? &shared.order : nullptr), counters, stages, shared);
    __syncwarp();
  } else {
    take_registers<232>();
    consume(maps, add, s, stages, shared);
  }
  cluster_sync();  // the other block still tells this one's barriers what it has read
}

}  // namespace

void cuda::grouped_wgrad(Context& ctx, const GroupedWgrad& a) {
  const std::int64_t R = a.dy[0].shape[0], O = a.dy[0].shape[1], I = a.x.shape[1], e = a.dw[0].shape[0];
  const int matrices = a.dy[1].present() ? 2 : 1;
  const std::int64_t tiles = e * matrices * pairs_of(int(O)) * tiles_across(int(I));
  Maps maps;
  maps.x = tensor_map(a.x, {I, R}, {kPanel, kDepth});
  for (int m = 0; m < matrices; ++m) {
    maps.dy[m] = tensor_map(a.dy[m], {O, R}, {kPanel, kDepth});
    maps.dw[m] = tensor_map(a.dw[m], {I, O, e}, {kBoxColumns, kBoxRows, 1});
  }
  launch(ctx, grouped_wgrad_kernel, {blocks_for(ctx, tiles), kThreads, kSharedBytes}, maps, a.offsets, ctx.blas->counters(),
         !a.write,
         Sizes{.groups = int(e), .rows = int(O), .columns = int(I), .depth = 0, .empty_groups = a.write, .stacked = matrices});
}

}  // namespace moetrain::ops
