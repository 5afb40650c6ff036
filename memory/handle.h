// handle.h -- sole owner of a C handle, for libraries that hand out integers or pointers to be given back.
#pragma once
#include <utility>

namespace moetrain {

// Destroy is a named noexcept function that warns and never throws; Null is the value that owns nothing.
template <class Raw, auto Destroy, Raw Null = Raw{}>
class Handle {
 public:
  Handle() = default;
  explicit Handle(Raw raw) noexcept : raw_(raw) {}
  Handle(Handle&& other) noexcept : raw_(std::exchange(other.raw_, Null)) {}
  Handle& operator=(Handle&& other) noexcept {
    Handle dying(std::move(other));
    std::swap(raw_, dying.raw_);  // what was held here dies now, not at some later time
    return *this;
  }
  ~Handle() {
    static_assert(noexcept(Destroy(raw_)), "a destructor may not throw");
    if (raw_ != Null) Destroy(raw_);
  }
  Raw get() const noexcept { return raw_; }
  Raw release() noexcept { return std::exchange(raw_, Null); }  // the caller closes it, to see whether that worked

 private:
  Raw raw_ = Null;
};

}  // namespace moetrain
