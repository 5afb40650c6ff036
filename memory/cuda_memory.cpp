// cuda_memory.cpp -- device memory by the CUDA runtime, and by the driver where the runtime has no call; every status checked.
#include "memory/cuda_memory.h"

#include <cuda.h>
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
namespace {

// Asked of the runtime, so that nothing links to the driver: the program starts where there is none.
template <class Function>
Function* driver(const char* name, unsigned int version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cuda_ok(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) throw Error(std::string("the driver has no ") + name);
  return reinterpret_cast<Function*>(entry);
}

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity = driver<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity", 10020);
  decltype(&cuMemAddressReserve) reserve = driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve", 10020);
  decltype(&cuMemAddressFree) free = driver<decltype(cuMemAddressFree)>("cuMemAddressFree", 10020);
  decltype(&cuMemCreate) create = driver<decltype(cuMemCreate)>("cuMemCreate", 10020);
  decltype(&cuMemRelease) release = driver<decltype(cuMemRelease)>("cuMemRelease", 10020);
  decltype(&cuMemMap) map = driver<decltype(cuMemMap)>("cuMemMap", 10020);
  decltype(&cuMemUnmap) unmap = driver<decltype(cuMemUnmap)>("cuMemUnmap", 10020);
  decltype(&cuMemSetAccess) set_access = driver<decltype(cuMemSetAccess)>("cuMemSetAccess", 10020);
  decltype(&cuGetErrorName) error_name = driver<decltype(cuGetErrorName)>("cuGetErrorName", 6000);
};
const Driver& calls() {
  static const Driver driver = [] {
    cuda_ok(cudaFree(nullptr));  // the device's context is there from here on
    return Driver{};
  }();
  return driver;
}

std::string text_of(CUresult status) {
  const char* name = nullptr;
  calls().error_name(status, &name);
  return name ? name : std::to_string(int(status));
}
void warn_unless_ok(CUresult status, const char* call) noexcept {
  if (status != CUDA_SUCCESS && status != CUDA_ERROR_DEINITIALIZED) spdlog::warn("{}: {}", call, int(status));
}

CUmemAllocationProp bytes_here() {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device_in_use();
  return p;
}

// One piece; on failure it is as if nothing had been asked for.
CUresult map_piece(CUdeviceptr at, std::size_t bytes, const CUmemAllocationProp& kind) {
  CUmemGenericAllocationHandle handle{};
  if (const auto status = calls().create(&handle, bytes, &kind, 0); status != CUDA_SUCCESS) return status;
  auto status = calls().map(at, bytes, 0, handle, 0);
  warn_unless_ok(calls().release(handle), "cuMemRelease");  // its bytes live as long as they are mapped
  if (status != CUDA_SUCCESS) return status;
  const CUmemAccessDesc access{kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  status = calls().set_access(at, bytes, &access, 1);
  if (status != CUDA_SUCCESS) warn_unless_ok(calls().unmap(at, bytes), "cuMemUnmap");
  return status;
}

}  // namespace

std::int64_t granule() {
  const CUmemAllocationProp kind = bytes_here();
  std::size_t bytes = 0;
  const auto status = calls().granularity(&bytes, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (status != CUDA_SUCCESS) throw Error("cuMemGetAllocationGranularity: " + text_of(status));
  return std::int64_t(bytes);
}

void* reserve(std::int64_t bytes) {
  CUdeviceptr data{};
  const auto status = calls().reserve(&data, std::size_t(bytes), 0, 0, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return nullptr;
  if (status != CUDA_SUCCESS) throw Error("cuMemAddressReserve: " + text_of(status));
  return reinterpret_cast<void*>(data);
}

bool map(void* data, std::int64_t bytes, std::int64_t piece) {
  const CUmemAllocationProp kind = bytes_here();
  for (std::int64_t done = 0; done < bytes; done += piece) {
    const auto status = map_piece(reinterpret_cast<CUdeviceptr>(data) + CUdeviceptr(done), std::size_t(piece), kind);
    if (status == CUDA_SUCCESS) continue;
    if (done > 0) unmap(data, done, piece);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) return false;
    throw Error("device memory cannot be mapped: " + text_of(status));
  }
  return true;
}

void unmap(void* data, std::int64_t bytes, std::int64_t piece) noexcept {
  if (const auto status = cudaDeviceSynchronize(); status != cudaSuccess && status != cudaErrorCudartUnloading)
    spdlog::warn("cudaDeviceSynchronize: {}", cudaGetErrorString(status));
  CUresult status = CUDA_SUCCESS;
  for (std::int64_t done = 0; status == CUDA_SUCCESS && done < bytes; done += piece)  // of a broken device the first says it
    status = calls().unmap(reinterpret_cast<CUdeviceptr>(data) + CUdeviceptr(done), std::size_t(piece));
  warn_unless_ok(status, "cuMemUnmap");
}

void release_addresses(void* data, std::int64_t bytes) noexcept {
  warn_unless_ok(calls().free(reinterpret_cast<CUdeviceptr>(data), std::size_t(bytes)), "cuMemAddressFree");
}

Room room() {
  std::size_t free = 0, total = 0;
  cuda_ok(cudaMemGetInfo(&free, &total));
  return {std::int64_t(free), std::int64_t(total)};
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
