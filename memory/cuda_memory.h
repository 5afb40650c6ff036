// cuda_memory.h -- the few calls of the CUDA runtime that memory/buffer needs; defined only in a build with CUDA.
#pragma once
#include <cstdint>

namespace moetrain::cuda {

void* allocate(std::int64_t bytes);
void release(void* data) noexcept;  // warns, never throws
void copy_in(void* to, const void* from_host, std::int64_t bytes);
void copy_out(void* to_host, const void* from, std::int64_t bytes);
void fill(void* data, int byte, std::int64_t bytes);
int devices();  // visible devices; 0 without a driver

}  // namespace moetrain::cuda
