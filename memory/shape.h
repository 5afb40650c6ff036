// shape.h -- the sizes of a dense row-major tensor of at most four dims.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "memory/check.h"

namespace moetrain {

class Shape {
 public:
  static constexpr int kMaxRank = 4;
  static constexpr std::int64_t kMostElements = std::int64_t(1) << 59;  // so that bytes, rounded up, fit 63 bits
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) {
    check(dims.size() <= kMaxRank, "shape: more than four dims");
    for (const auto d : dims) {
      check(d >= 0, "shape: negative dim", {{"dim", d}});
      dims_[std::size_t(rank_++)] = d;
    }
    check_count();
  }
  int rank() const { return rank_; }
  std::int64_t operator[](int i) const { return dims_[std::size_t(i)]; }
  std::int64_t count() const {  // elements; 1 for rank 0
    std::int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[std::size_t(i)];
    return n;
  }
  std::int64_t row() const { return count_from(1); }  // elements of one row of dim 0
  std::int64_t count_from(int first) const {
    std::int64_t n = 1;
    for (int i = first; i < rank_; ++i) n *= dims_[std::size_t(i)];
    return n;
  }
  Shape with_dim0(std::int64_t rows) const {
    Shape s = *this;
    s.dims_[0] = rows;
    s.check_count();
    return s;
  }
  bool operator==(const Shape& o) const = default;
  std::string text() const {  // "[3, 4]"
    std::string s = "[";
    for (int i = 0; i < rank_; ++i) s += (i ? ", " : "") + std::to_string(dims_[std::size_t(i)]);
    return s + "]";
  }

 private:
  void check_count() const {  // here, once a shape, so that no product of dims has to be checked again
    std::int64_t n = 1;
    for (int i = 0; i < rank_; ++i)
      if (__builtin_mul_overflow(n, std::max<std::int64_t>(dims_[std::size_t(i)], 1), &n) || n > kMostElements) [[unlikely]]
        throw Error("a tensor of " + text() + " elements is larger than bytes can be counted");
  }
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

}  // namespace moetrain
