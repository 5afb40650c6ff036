// stack.h -- memory that is given back in the reverse order of taking: temporaries of an op, and what a block keeps for backward.
#pragma once
#include <cstdint>
#include <vector>

#include "memory/buffer.h"

namespace moetrain {

// Its takes lie in an area of the memory's pool without a hole between them, whatever their sizes, where it is the only stack there.
// With poison, memory is handed out as NaN (all bits one), so that a kernel which trusts it is caught.
class Stack {
 public:
  Stack(Memory& memory, Category category, bool poison = false, Area area = Area::scratch)
      : memory_(memory), category_(category), poison_(poison), area_(area) {}
  ~Stack() { release(0); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  Tensor take(DType dtype, Shape shape);   // uninitialised
  Tensor zeros(DType dtype, Shape shape);
  Memory& memory() const { return memory_; }

  std::size_t mark() const { return takes_.size(); }
  void release(std::size_t mark);          // gives back all that was taken since

  Category set_category(Category c) { return std::exchange(category_, c); }  // for takes from now on; returns the old one

 private:
  struct Take {
    std::int64_t bytes, place;
    Category category;
  };
  Memory& memory_;
  Category category_;
  bool poison_;
  Area area_;
  std::vector<Take> takes_;
};

// Gives back at its end what was taken from the stack during its life.
class Scope {
 public:
  explicit Scope(Stack& stack) : stack_(stack), mark_(stack.mark()) {}
  ~Scope() { stack_.release(mark_); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Stack& stack_;
  std::size_t mark_;
};

}  // namespace moetrain
