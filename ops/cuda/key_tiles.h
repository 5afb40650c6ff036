// key_tiles.h -- gradients of keys on tensor cores: for each key the sum over the queries that read it, without atomics.
//
//   over the rows, over the i with listed[row, i] = s, and over heads n < 64 from `head` on:
//   p < both:  sum[s, 64 p + c] += pair[row, i, n] value0[row, n, 64 p + c] + pair[row, i, 64 + n] value1[row, n, 64 p + c]
//   else:      sum[s, 64 p + c] += pair[row, i, n] value2[row, n, first + 64 (p - both) + c]
//
// Every row lists its positions in ascending order, so that those of a range of keys follow one another. Where rows list a good
// part of the keys before them (key_products.cu), keys are the rows of one product over all queries and heads, and its sums stay in
// registers; else (key_tiles.cu) a block owns kKeyRange keys and one panel p of columns and adds row after row in shared memory.
// Nothing is rounded before the end.
#pragma once
#include <cstdint>

#include "ops/context.h"

namespace moetrain::ops::cuda {

constexpr std::int64_t kKeyRange = 512, kRangeWords = kKeyRange / 32;  // keys of a block, in sets of 32

inline std::int64_t key_ranges(std::int64_t keys) { return (keys + kKeyRange - 1) / kKeyRange; }
inline std::int64_t key_words(std::int64_t keys) { return key_ranges(keys) * kRangeWords; }
// Into how many parts the rows of a call are cut, each with sums of its own, so that the device is filled.
inline std::int64_t key_parts(std::int64_t keys, std::int64_t panels) {
  constexpr std::int64_t kBlocks = 1152, kMost = 16;
  const std::int64_t blocks = key_ranges(keys) * panels;
  return blocks == 0 || kBlocks / blocks > kMost ? kMost : kBlocks / blocks < 1 ? 1 : kBlocks / blocks;
}

// The positions of each row in ascending order, then -1; how many; the same as sets, a bit a key; and where each set begins in the
// list.
struct KeyLists {
  std::int32_t* listed;  // (rows, K)
  std::int32_t* counts;  // (rows)
  std::int32_t* sets;    // (rows, words)
  std::int32_t* starts;  // (rows, words + 1)
  std::int64_t rows, K, keys;
};
// with values (rows, K): they follow their positions, to `turned` (rows, K).
constexpr std::int64_t kMostListedKeys = 1 << 19;  // two bits each in a block's memory
void list_keys(Context& ctx, const std::int32_t* indices, const KeyLists& to, const float* values = nullptr,
               float* turned = nullptr);

struct KeyTiles {
  KeyLists lists;
  ConstTensor pairs;           // (lists.rows or more, K, 64 or, with panels of both, 128) bf16
  ConstTensor value0, value1;  // (rows, N, 64 both) bf16
  ConstTensor value2;          // (rows, N, first + 64 (panels - both) or more) bf16
  std::int64_t head = 0, both = 0, first = 0, panels;
  std::int64_t reach;  // rows list few positions from it on, or none
  float* sums;         // (key_parts, keys, 64 panels); adds
};
void sum_key_tiles(Context& ctx, const KeyTiles& a);
void sum_key_products(Context& ctx, const KeyTiles& a);  // the same, for panels 8 of both and 1 more, or 2

}  // namespace moetrain::ops::cuda
