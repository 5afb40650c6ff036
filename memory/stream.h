// stream.h -- a queue of work on a CUDA device and marks in it, owned; defined only in a build with CUDA.
#pragma once
#include <cstdint>

#include "memory/handle.h"

struct CUstream_st;  // cudaStream_t and cudaEvent_t without the CUDA headers
struct CUevent_st;

namespace moetrain::cuda {

// A point in a stream. Timed events cost more to record.
class Event {
 public:
  explicit Event(bool timed = false);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(CUstream_st* stream);
  void synchronize() const;                   // the host waits until the point is reached
  bool reached() const;                       // does not wait
  float ms_since(const Event& earlier) const;  // both timed and reached
  CUevent_st* get() const { return event_; }

 private:
  CUevent_st* event_ = nullptr;
};

// Runs beside the default stream and does not wait for it.
class Stream {
 public:
  explicit Stream(bool urgent = false);  // urgent: its blocks go first where the device has the choice
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream_st* get() const { return stream_; }

 private:
  CUstream_st* stream_ = nullptr;
};

void release_pinned(void* data) noexcept;  // warns, never throws

// Small blocks between host and device for which neither stands still: pinned memory, and a stream for what goes to the host.
class Link {
 public:
  explicit Link(std::int64_t bytes);                          // the most of a block
  void fetch(const void* from, std::int64_t bytes);           // what lies there once the default stream has done its work so far
  bool arrived() const;                                       // does not wait; it does for nothing queued since
  const void* fetched() const { return down_.get(); }         // once it has arrived
  void push(void* to, const void* data, std::int64_t bytes);  // there for later work of the default stream; waits for the last block

 private:
  std::int64_t bytes_;
  Handle<void*, release_pinned> down_, up_;
  Stream stream_;
  Event ready_, arrived_, gone_;
};

using Pinned = Handle<void*, release_pinned>;
Pinned pinned(std::int64_t bytes);  // host memory that the device copies from and to by itself

// Large blocks between pinned memory and the device, on a stream of its own: neither the host nor the default stream stands still.
// A copy begins once the default stream has done its work so far, and has done when `done` is reached.
class Ferry {
 public:
  void copy(void* to, const void* from, std::int64_t bytes, Event& done);
  void follow(const Event& event);  // the next copies come after it

 private:
  Stream stream_;
  Event ready_;
};

void wait(CUstream_st* stream, const Event& for_it);  // work queued from now on waits, the host does not

}  // namespace moetrain::cuda
