// phase_peaks.h -- the most that was held in each phase of a run, by category and in all: when memory is short, not only of what.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

namespace moetrain {

// What memory is held for; the names `moetrain plan --json` prints.
enum class Category : std::uint8_t { weights, gradients, optimizer, activations, cache, loss, communication, workspace };
inline constexpr int kCategories = 8;
const char* name_of(Category c);

// Bring-up; of a step the passes of its micro-batches, and what comes after the last of them; a checkpoint.
enum class MemoryPhase : std::uint8_t { load, forward, backward, step, save };
inline constexpr int kMemoryPhases = 5;
const char* name_of(MemoryPhase p);

using CategoryBytes = std::array<std::int64_t, kCategories>;
struct PhaseBytes {
  CategoryBytes by_category{};  // each one's own peak
  std::int64_t total = 0;       // peak of their sum
  bool operator==(const PhaseBytes&) const = default;
};

// Bytes count where they are taken, and where they are still held as a phase begins.
class PhasePeaks {
 public:
  void enter(MemoryPhase phase, const CategoryBytes& held, std::int64_t total) {
    phase_ = phase;
    for (int c = 0; c < kCategories; ++c) note(Category(c), held[std::size_t(c)], total);
  }
  void note(Category c, std::int64_t held, std::int64_t total) {
    PhaseBytes& peak = peaks_[std::size_t(phase_)];
    auto& most = peak.by_category[std::size_t(c)];
    most = std::max(most, held);
    peak.total = std::max(peak.total, total);
  }
  const std::array<PhaseBytes, kMemoryPhases>& all() const { return peaks_; }

 private:
  std::array<PhaseBytes, kMemoryPhases> peaks_{};
  MemoryPhase phase_ = MemoryPhase::load;
};

}  // namespace moetrain
