// cuda_memory.h -- the few calls of the CUDA runtime and driver that memory/pool and memory/buffer need; defined only in a build with CUDA.
#pragma once
#include <cstdint>
#include <string>

namespace moetrain::cuda {

// Addresses, and the bytes behind them, of the device in use. Sizes are multiples of granule(), and those in pieces of their piece. What
// cannot fail warns.
std::int64_t granule();
void* reserve(std::int64_t bytes);  // addresses without bytes; null where there are not as many
bool map(void* data, std::int64_t bytes, std::int64_t piece);             // gives them bytes; false where the device has not as many
void unmap(void* data, std::int64_t bytes, std::int64_t piece) noexcept;  // takes their bytes; waits for the device
void release_addresses(void* data, std::int64_t bytes) noexcept;          // that have no bytes
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
