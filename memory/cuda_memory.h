// cuda_memory.h -- the few calls of the CUDA runtime that memory/buffer needs; defined only in a build with CUDA.
#pragma once
#include <cstdint>
#include <string>

namespace moetrain::cuda {

// Device memory comes from the driver's pool in the order of the default stream: taking and giving back does not wait for the
// device, and a steady step takes nothing new from the driver.

void* allocate(std::int64_t bytes);  // null when the device has not as much
void release(void* data) noexcept;  // warns, never throws
void copy_in(void* to, const void* from_host, std::int64_t bytes);
void copy_out(void* to_host, const void* from, std::int64_t bytes);
void fill(void* data, int byte, std::int64_t bytes);
struct Room {
  std::int64_t free_bytes, total_bytes;  // of the device in use, for all its processes
};
Room room();
int devices();  // visible devices; 0 without a driver
int device_in_use();

std::string bus_of(int index);  // its address on the PCI bus: tells devices of one host apart, however they are numbered

struct DeviceInfo {
  std::string name;
  std::int64_t memory_bytes;
};
// Makes device `index` this process's own and refuses one that this build has no kernels for.
DeviceInfo use_device(int index);

}  // namespace moetrain::cuda
