// cuda_memory.cpp -- device memory by the CUDA runtime, every status checked.
#include "memory/cuda_memory.h"

#include <spdlog/spdlog.h>

#include <string>

#include "memory/check.h"
#include "memory/cuda_check.h"

namespace moetrain {

void cuda_ok(cudaError_t status, std::source_location where) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();  // clears the sticky error, so that the next check reports its own cause
  throw Error(std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": CUDA: " + cudaGetErrorString(status));
}

namespace cuda {

void* allocate(std::int64_t bytes) {
  void* data = nullptr;
  const auto status = cudaMallocAsync(&data, std::size_t(bytes), nullptr);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  cuda_ok(status);
  return data;
}

Room room() {
  std::size_t free = 0, total = 0;
  cuda_ok(cudaMemGetInfo(&free, &total));
  return {std::int64_t(free), std::int64_t(total)};
}

void release(void* data) noexcept {
  if (const auto status = cudaFreeAsync(data, nullptr); status != cudaSuccess && status != cudaErrorCudartUnloading)
    spdlog::warn("cudaFreeAsync: {}", cudaGetErrorString(status));
}

void copy_in(void* to, const void* from_host, std::int64_t bytes) { cuda_ok(cudaMemcpy(to, from_host, std::size_t(bytes), cudaMemcpyDefault)); }
void copy_out(void* to_host, const void* from, std::int64_t bytes) {
  cuda_ok(cudaMemcpy(to_host, from, std::size_t(bytes), cudaMemcpyDefault));
}
void fill(void* data, int byte, std::int64_t bytes) { cuda_ok(cudaMemset(data, byte, std::size_t(bytes))); }

std::string bus_of(int index) {
  char bus[32] = {};
  cuda_ok(cudaDeviceGetPCIBusId(bus, sizeof bus, index));
  return bus;
}

DeviceInfo use_device(int index) {
  cuda_ok(cudaSetDevice(index));
  cudaDeviceProp properties{};
  cuda_ok(cudaGetDeviceProperties(&properties, index));
  // A kernel with Hopper's own instructions runs on 9.0 and on nothing else.
  if (properties.major != 9 || properties.minor != 0)
    throw Error("GPU " + std::to_string(index) + " is a " + properties.name + " of compute capability " +
                    std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                    "; the kernels of this build need 9.0 (H100, H200); run.device: cpu trains without it");
  cudaMemPool_t pool = nullptr;
  cuda_ok(cudaDeviceGetDefaultMemPool(&pool, index));
  std::uint64_t keep_all = ~std::uint64_t(0);  // by default a synchronisation gives unused memory back to the driver
  cuda_ok(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep_all));
  return {properties.name, std::int64_t(properties.totalGlobalMem)};
}

int device_in_use() {
  int index = 0;
  cuda_ok(cudaGetDevice(&index));
  return index;
}

int devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

}  // namespace cuda
}  // namespace moetrain
