// cuda_check.h -- turns a CUDA status into an Error that names place and cause.
#pragma once
#include <cuda_runtime_api.h>

#include <source_location>

namespace moetrain {

void cuda_ok(cudaError_t status, std::source_location where = std::source_location::current());

}  // namespace moetrain
