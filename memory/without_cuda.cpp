// without_cuda.cpp -- what a build without CUDA has of streams: members of classes that never use them there.
#include "memory/stream.h"

namespace moetrain::cuda {

Event::Event(bool) {}
Event::~Event() = default;
Stream::Stream(bool) {}
Stream::~Stream() = default;
void release_pinned(void*) noexcept {}

}  // namespace moetrain::cuda
