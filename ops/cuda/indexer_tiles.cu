// indexer_tiles.cu -- index scores of bf16 heads of 128 on the tensor cores of sm_90a. A block holds 8 queries of 32 heads (or 4 of
// 64) and walks over tiles of 128 keys: keys are the rows of a product and heads its columns, so that the weighted sum over heads
// is made where the products lie, and a score is all that leaves. 275 GFLOP for 8192 causal tokens of 32 heads; a key tile is read
// from L2 once for 256 heads.
#include "ops/cuda/indexer.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/tensor_copy.cuh"
#include "ops/cuda/tensor_cores.cuh"

namespace moetrain::ops::cuda {
namespace {

constexpr int kWidth = 128, kPanel = 64, kLine = 128, kPanels = kWidth / kPanel;
constexpr int kColumns = 256, kKeys = 128, kStages = 4;  // heads of all queries of a block; keys of a tile
constexpr int kGroup = 128, kThreads = 3 * kGroup;       // two warpgroups of 64 keys each, and one of which a thread copies
constexpr int kKeyPanel = kKeys * kLine, kKeyTile = kPanels * kKeyPanel, kQueryPanel = kColumns * kLine;
constexpr std::int64_t kSegment = 24 * kKeys;  // keys of a block

struct Layout {  // of shared memory, in bytes from its start
  static constexpr int query = 0, stages = kPanels * kQueryPanel, barriers = stages + kStages * kKeyTile, full = barriers,
                       empty = full + 8 * kStages, query_full = empty + 8 * kStages, bytes = query_full + 8;
};
static_assert(Layout::bytes <= 227 << 10);

// grid (ceil(rows / kQueries), segments), block (kThreads), shared Layout::bytes; kHeads is J rounded up
template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    index_scores_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                        const float* __restrict__ weights, const DocumentList documents, float* __restrict__ scores,
                        std::int64_t begin, std::int64_t end, int J, std::int64_t longest) {
  constexpr int kQueries = kColumns / kHeads;
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  const std::int64_t t = begin + std::int64_t(blockIdx.x) * kQueries;
  const int lane = int(threadIdx.x) % kWarp;
  // what one or another of the queries sees
  const KeyRange seen = documents.seen_by(min(t + lane % kQueries, end - 1));
  const std::int64_t from = __reduce_min_sync(0xffffffffU, int(seen.begin)) + std::int64_t(blockIdx.y) * kSegment,
                     until = __reduce_max_sync(0xffffffffU, int(seen.end));
  if (from >= until) return;
  const int tiles = int((min(until - from, kSegment) + kKeys - 1) / kKeys);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + Layout::full + 8 * s, 1);
      barrier_init(shared + Layout::empty + 8 * s, 2 * kGroup);
    }
    barrier_init(shared + Layout::query_full, 1);
    fence_barrier_init();
  }
  __syncthreads();  // waits for the barriers

  if (threadIdx.x >= 2 * kGroup) {
    leave_registers<40>();
    if (threadIdx.x != 2 * kGroup) return;
    barrier_arrive_and_expect(shared + Layout::query_full, kPanels * kQueryPanel);
    for (int p = 0; p < kPanels; ++p)
      copy_box(shared + Layout::query + p * kQueryPanel, &q, shared + Layout::query_full, p * kPanel, 0, int(t));
    for (int i = 0; i < tiles; ++i) {
      const std::uint32_t full = shared + Layout::full + 8 * (i % kStages), to = shared + Layout::stages + i % kStages * kKeyTile;
      barrier_wait(shared + Layout::empty + 8 * (i % kStages), (i / kStages & 1) ^ 1);
      barrier_arrive_and_expect(full, kKeyTile);
      for (int p = 0; p < kPanels; ++p) copy_box(to + p * kKeyPanel, &k, full, p * kPanel, int(from) + i * kKeys);
    }
  } else {
    take_registers<232>();
    const int half = int(threadIdx.x) / kGroup, row = 64 * half + int(threadIdx.x) % kGroup / kWarp * 16 + lane / 4;
    // the weights of a thread's columns, and what each query sees
    float weight[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int column = 8 * (i / 2) + 2 * (lane % 4) + i % 2, j = column % kHeads;
      const std::int64_t query = t + column / kHeads;
      weight[i] = query < end && j < J ? weights[query * J + j] : 0.0F;
    }
    // a thread ends with the scores of every fourth query
    constexpr int kMine = kQueries / 4;
    int first[kMine], after[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const std::int64_t query = t + 4 * i + lane % 4;
      const KeyRange of_mine = query < end ? documents.seen_by(query) : KeyRange{0, 0};
      first[i] = int(of_mine.begin), after[i] = int(of_mine.end);
    }
    barrier_wait(shared + Layout::query_full, 0);
    for (int i = 0; i < tiles; ++i) {
      barrier_wait(shared + Layout::full + 8 * (i % kStages), i / kStages & 1);
      const std::uint32_t keys = shared + Layout::stages + i % kStages * kKeyTile + half * 64 * kLine;
      float u[kColumns / 2] = {};
      multiply_panels<Along::k, Along::k, kPanels, kPanel / 16>(u, keys, kKeyPanel, shared + Layout::query, kQueryPanel);
      barrier_arrive(shared + Layout::empty + 8 * (i % kStages));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::int64_t s = from + std::int64_t(i) * kKeys + row + 8 * h;
#pragma unroll
        for (int mine = 0; mine < kMine; ++mine) {
          float sums[4];  // of queries 4 mine ... 4 mine + 3
#pragma unroll
          for (int g = 0; g < 4; ++g) {
            float sum = 0;
#pragma unroll
            for (int x = 0; x < kHeads / 4; ++x) {
              const int at = (4 * mine + g) * (kHeads / 4) + x;  // of the thread's columns
              sum += weight[at] * relu(u[4 * (at / 2) + 2 * h + at % 2]);
            }
            sums[g] = sum;
          }
          // four lanes hold a quarter of each sum: each ends with the whole of one
          const bool odd = lane & 1, upper = lane & 2;
          const float low = (odd ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffU, odd ? sums[0] : sums[1], 1),
                      high = (odd ? sums[3] : sums[2]) + __shfl_xor_sync(0xffffffffU, odd ? sums[2] : sums[3], 1);
          const float score = (upper ? high : low) + __shfl_xor_sync(0xffffffffU, upper ? low : high, 2);
          const std::int64_t query = t + 4 * mine + lane % 4;
          if (first[mine] <= s && s < after[mine]) scores[(query - begin) * longest + s - first[mine]] = score;
        }
      }
    }
  }
}

template <int kHeads>
void run(Context& ctx, const IndexerSelect& a, float* scores, std::int64_t begin, std::int64_t rows) {
  constexpr int kQueries = kColumns / kHeads;
  const std::int64_t T = a.q.shape[0], J = a.q.shape[1], keys = a.k.shape[0], longest = a.documents.most_keys();
  // whole documents follow one another, between the keys of pieces others may lie
  const std::int64_t reach = a.documents.whole() ? longest + kQueries : keys;
  launch(ctx, index_scores_kernel<kHeads>,
         {dim3(blocks(rows, kQueries), blocks(reach, kSegment)), dim3(kThreads), Layout::bytes},
         tensor_map(a.q, {kWidth, J, T}, {kPanel, kHeads, kQueries}), tensor_map(a.k, {kWidth, keys}, {kPanel, kKeys}),
         a.weights.as<float>(), DocumentList(a.documents), scores, begin, begin + rows, int(J), longest);
}

}  // namespace

void index_score_tiles(Context& ctx, const IndexerSelect& a, float* scores, std::int64_t begin, std::int64_t rows) {
  a.q.shape[1] <= 32 ? run<32>(ctx, a, scores, begin, rows) : run<64>(ctx, a, scores, begin, rows);
}

}  // namespace moetrain::ops::cuda
