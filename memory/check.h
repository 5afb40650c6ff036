// check.h -- how the house fails: one Error that knows its place, its numbers and the exit code it leads to.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <source_location>
#include <stdexcept>
#include <string>

namespace moetrain {

// The process's exit codes (README, "How a run ends").
enum class ExitCode : int { done = 0, bad_job = 2, run_failed = 3, rank_lost = 4, stopped = 5, gave_up = 6 };

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, ExitCode code = ExitCode::run_failed) : std::runtime_error(what), code_(code) {}
  ExitCode code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

struct Named {
  const char* name;
  std::int64_t value;
};

struct At {  // a text that remembers where it was written
  const char* text;
  std::source_location where;
  At(const char* t, std::source_location w = std::source_location::current()) : text(t), where(w) {}  // NOLINT: implicit on purpose
};

// Throws Error("ops/rmsnorm.h:29: rmsnorm: w is not (D) (D=4, w=5)").
[[noreturn]] void fail(At why, std::initializer_list<Named> values = {});

inline void check(bool holds, At why, std::initializer_list<Named> values = {}) {
  if (!holds) [[unlikely]]
    fail(why, values);
}

}  // namespace moetrain
