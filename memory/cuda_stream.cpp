// cuda_stream.cpp -- streams and events by the CUDA runtime.
#include <nvtx3/nvToolsExt.h>
#include <spdlog/spdlog.h>

#include <cstring>

#include "memory/check.h"
#include "memory/cuda_check.h"
#include "memory/range.h"
#include "memory/stream.h"

namespace moetrain::cuda {
namespace {

void warn_unless_ok(cudaError_t status, const char* call) noexcept {
  if (status != cudaSuccess && status != cudaErrorCudartUnloading) spdlog::warn("{}: {}", call, cudaGetErrorString(status));
}

}  // namespace

Event::Event(bool timed) { cuda_ok(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming)); }
Event::~Event() { warn_unless_ok(cudaEventDestroy(event_), "cudaEventDestroy"); }
void Event::record(CUstream_st* stream) { cuda_ok(cudaEventRecord(event_, stream)); }
void Event::synchronize() const { cuda_ok(cudaEventSynchronize(event_)); }
bool Event::reached() const {
  const auto status = cudaEventQuery(event_);
  if (status != cudaErrorNotReady) cuda_ok(status);
  return status == cudaSuccess;
}
float Event::ms_since(const Event& earlier) const {
  float ms = 0;
  cuda_ok(cudaEventElapsedTime(&ms, earlier.event_, event_));
  return ms;
}

Stream::Stream(bool urgent) {
  int least = 0, most = 0;
  cuda_ok(cudaDeviceGetStreamPriorityRange(&least, &most));
  cuda_ok(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, urgent ? most : least));
}
Stream::~Stream() { warn_unless_ok(cudaStreamDestroy(stream_), "cudaStreamDestroy"); }

void release_pinned(void* data) noexcept { warn_unless_ok(cudaFreeHost(data), "cudaFreeHost"); }

Pinned pinned(std::int64_t bytes) {
  void* data = nullptr;
  cuda_ok(cudaMallocHost(&data, std::size_t(bytes)));
  return Pinned(data);
}

Link::Link(std::int64_t bytes) : bytes_(bytes), down_(pinned(bytes)), up_(pinned(bytes)), stream_(/*urgent=*/true) {}
void Link::fetch(const void* from, std::int64_t bytes) {
  check(bytes <= bytes_, "link: a block is larger than was said", {{"bytes", bytes}, {"most", bytes_}});
  ready_.record(nullptr);
  wait(stream_.get(), ready_);
  cuda_ok(cudaMemcpyAsync(down_.get(), from, std::size_t(bytes), cudaMemcpyDeviceToHost, stream_.get()));
  arrived_.record(stream_.get());
}
bool Link::arrived() const { return arrived_.reached(); }
void Link::push(void* to, const void* data, std::int64_t bytes) {
  check(bytes <= bytes_, "link: a block is larger than was said", {{"bytes", bytes}, {"most", bytes_}});
  gone_.synchronize();
  std::memcpy(up_.get(), data, std::size_t(bytes));
  cuda_ok(cudaMemcpyAsync(to, up_.get(), std::size_t(bytes), cudaMemcpyHostToDevice, nullptr));
  gone_.record(nullptr);
}

void Ferry::copy(void* to, const void* from, std::int64_t bytes, Event& done) {
  ready_.record(nullptr);
  wait(stream_.get(), ready_);
  cuda_ok(cudaMemcpyAsync(to, from, std::size_t(bytes), cudaMemcpyDefault, stream_.get()));
  done.record(stream_.get());
}

void Ferry::follow(const Event& event) { wait(stream_.get(), event); }

void push_range(const char* name) { nvtxRangePushA(name); }
void pop_range() noexcept { nvtxRangePop(); }

void wait(CUstream_st* stream, const Event& for_it) { cuda_ok(cudaStreamWaitEvent(stream, for_it.get())); }

}  // namespace moetrain::cuda
