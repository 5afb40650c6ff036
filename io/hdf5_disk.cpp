// hdf5_disk.cpp -- a file driver of HDF5 over POSIX reads and writes at an offset.
#include "io/hdf5_disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>

#include "io/files.h"
#include "memory/check.h"

namespace moetrain::io {
namespace {

struct DiskFile {
  H5FD_t base{};  // first: the library knows the file by it, and fills it in
  Descriptor descriptor;
  haddr_t allocated = 0, end = 0;  // what the library thinks it has; what is there
  dev_t device = 0;
  ino_t inode = 0;
  DiskFailure failure = std::make_shared<int>(0);
};
DiskFile& disk(H5FD_t* f) { return *reinterpret_cast<DiskFile*>(f); }
const DiskFile& disk(const H5FD_t* f) { return *reinterpret_cast<const DiskFile*>(f); }

// The innermost entry of the library's error stack is what its callers print.
herr_t give_reason(hid_t minor, const char* what) {
  H5Epush2(H5E_DEFAULT, __FILE__, __func__, __LINE__, H5E_ERR_CLS, H5E_IO, minor, "%s: %s", what, std::strerror(errno));
  return -1;
}

H5FD_t* open_disk(const char* name, unsigned flags, hid_t, haddr_t) {
  int mode = (flags & H5F_ACC_RDWR) != 0 ? O_RDWR : O_RDONLY;
  if ((flags & H5F_ACC_TRUNC) != 0) mode |= O_TRUNC;
  if ((flags & H5F_ACC_CREAT) != 0) mode |= O_CREAT;
  if ((flags & H5F_ACC_EXCL) != 0) mode |= O_EXCL;
  auto file = std::make_unique<DiskFile>();
  const int descriptor = ::open(name, mode | O_CLOEXEC, 0666);
  struct stat found {};
  if (descriptor >= 0) file->descriptor = Descriptor(descriptor);
  if (descriptor < 0 || ::fstat(descriptor, &found) != 0) {
    give_reason(H5E_CANTOPENFILE, "open");
    return nullptr;
  }
  file->end = haddr_t(found.st_size);
  file->device = found.st_dev;
  file->inode = found.st_ino;
  return &file.release()->base;
}

herr_t close_disk(H5FD_t* f) {
  const std::unique_ptr<DiskFile> file(&disk(f));
  // A network file system may tell of a failed write only now.
  if (::close(file->descriptor.release()) != 0 && *file->failure == 0) *file->failure = errno;
  return 0;
}

int compare_disks(const H5FD_t* a, const H5FD_t* b) {
  const DiskFile &x = disk(a), &y = disk(b);
  if (x.device != y.device) return x.device < y.device ? -1 : 1;
  return x.inode == y.inode ? 0 : x.inode < y.inode ? -1 : 1;
}

herr_t tell_features(const H5FD_t*, unsigned long* flags) {
  *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE | H5FD_FEAT_AGGREGATE_SMALLDATA |
           H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  return 0;
}

haddr_t allocated_of(const H5FD_t* f, H5FD_mem_t) { return disk(f).allocated; }
herr_t set_allocated(H5FD_t* f, H5FD_mem_t, haddr_t address) {
  disk(f).allocated = address;
  return 0;
}
haddr_t end_of(const H5FD_t* f, H5FD_mem_t) { return disk(f).end; }

herr_t give_handle(H5FD_t* f, hid_t, void** handle) {
  *handle = &disk(f).failure;
  return 0;
}

herr_t read_disk(H5FD_t* f, H5FD_mem_t, hid_t, haddr_t address, std::size_t size, void* buffer) {
  auto* to = static_cast<char*>(buffer);
  while (size > 0) {
    const ssize_t n = ::pread(disk(f).descriptor.get(), to, size, off_t(address));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return give_reason(H5E_READERROR, "read");
    if (n == 0) {  // past the end everything is zero, as in a hole
      std::memset(to, 0, size);
      return 0;
    }
    to += n;
    address += haddr_t(n);
    size -= std::size_t(n);
  }
  return 0;
}

herr_t write_disk(H5FD_t* f, H5FD_mem_t, hid_t, haddr_t address, std::size_t size, const void* buffer) {
  DiskFile& file = disk(f);
  const auto* from = static_cast<const char*>(buffer);
  while (size > 0 && *file.failure == 0) {
    const ssize_t n = ::pwrite(file.descriptor.get(), from, size, off_t(address));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      *file.failure = errno;
      break;
    }
    from += n;
    address += haddr_t(n);
    size -= std::size_t(n);
  }
  file.end = std::max(file.end, address + size);
  return 0;
}

herr_t cut_disk(H5FD_t* f, hid_t, hbool_t) {
  DiskFile& file = disk(f);
  if (file.allocated == file.end) return 0;
  if (*file.failure == 0 && ::ftruncate(file.descriptor.get(), off_t(file.allocated)) != 0) *file.failure = errno;
  file.end = file.allocated;
  return 0;
}

H5FD_class_t disk_class() {
  H5FD_class_t c{};
  c.name = "moetrain disk";
  c.maxaddr = haddr_t(std::numeric_limits<off_t>::max());
  c.fc_degree = H5F_CLOSE_WEAK;
  c.open = open_disk;
  c.close = close_disk;
  c.cmp = compare_disks;
  c.query = tell_features;
  c.get_eoa = allocated_of;
  c.set_eoa = set_allocated;
  c.get_eof = end_of;
  c.get_handle = give_handle;
  c.read = read_disk;
  c.write = write_disk;
  c.truncate = cut_disk;
  constexpr H5FD_mem_t kFreeSpace[] = H5FD_FLMAP_DICHOTOMY;
  std::copy(std::begin(kFreeSpace), std::end(kFreeSpace), c.fl_map);
  return c;
}

hid_t disk_driver() {
  static const H5FD_class_t how = disk_class();
  static const hid_t driver = H5FDregister(&how);
  if (driver < 0) fail("hdf5: the file driver cannot be registered");
  return driver;
}

}  // namespace

void use_disk(hid_t file_access) {
  check(H5Pset_driver(file_access, disk_driver(), nullptr) >= 0, "hdf5: the file driver cannot be chosen");
}

DiskFailure disk_failure_of(hid_t file) {
  void* handle = nullptr;
  check(H5Fget_vfd_handle(file, H5P_DEFAULT, &handle) >= 0 && handle != nullptr, "hdf5: the file has no driver of ours");
  return *static_cast<DiskFailure*>(handle);
}

}  // namespace moetrain::io
