// stream.h -- a queue of work on a CUDA device and marks in it, owned; defined only in a build with CUDA.
#pragma once

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

void wait(CUstream_st* stream, const Event& for_it);  // work queued from now on waits, the host does not
void synchronize(CUstream_st* stream);                // the host waits for all work queued so far

}  // namespace moetrain::cuda
