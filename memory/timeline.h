// timeline.h -- the clock of a dry run: a device that does its work in order, beside messages that travel on lanes of their own.
//
//   work of s seconds begins when the work before it is done and the host has queued it, and takes s; while a message between ranks
//   travels it goes on at 1 / (1 + drag) of its speed, since messages want memory and multiprocessors too
//   the host queues one piece of work after another, and goes on from where the device is when it has to wait for it
//   a message of s seconds begins when the work before it and the messages of its lane are done, and takes s
//   who waits for a message stands still until it has arrived; where nothing travels beside work, for all of its seconds
//
// In seconds. Nothing here is measured: the seconds are what a machine's description makes of sizes (core/machine.h).
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>

namespace moetrain {

class Timeline {
 public:
  enum class Lane : unsigned char { sharding, exchange, tensor, to_host, to_device };  // the first three: between ranks
  static constexpr int kLanes = 5;
  struct Message {
    Lane lane{};
    double seconds = 0, arrives = 0;
  };
  Timeline(bool beside, double drag) : beside_(beside), drag_(drag) {}

  void work(double seconds, double queue_seconds = 0) {
    host_ += queue_seconds;
    const double late = std::max(0.0, host_ - now_);
    now_ += late;
    idle_ += late;
    const double busy = *std::max_element(free_.begin(), free_.begin() + std::ptrdiff_t(Lane::to_host));
    const double beside = std::clamp((busy - now_) / (1 + drag_), 0.0, seconds);  // of the work, done while messages travel
    now_ += seconds + drag_ * beside;
    dragged_ += drag_ * beside;
  }
  void host_waits() { host_ = std::max(host_, now_); }  // for the work queued so far
  Message send(Lane lane, double seconds, double not_before = 0) {
    double& free = free_[std::size_t(lane)];
    if (beside_) free = std::max({free, now_, not_before}) + seconds;
    return {lane, seconds, free};
  }
  // How long it stands still.
  double wait(const Message& m) {
    const double stands = beside_ ? std::max(0.0, m.arrives - now_) : m.seconds;
    now_ += stands;
    stood_[std::size_t(m.lane)] += stands;
    return stands;
  }
  bool beside() const { return beside_; }
  double now() const { return now_; }
  double dragged() const { return dragged_; }  // by messages
  double idle() const { return idle_; }        // while the host queued
  double stood(Lane lane) const { return stood_[std::size_t(lane)]; }

 private:
  bool beside_;
  double drag_, now_ = 0, host_ = 0, dragged_ = 0, idle_ = 0;
  std::array<double, kLanes> free_{}, stood_{};  // when its last message has arrived; waited for them
};

}  // namespace moetrain
