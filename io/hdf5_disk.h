// hdf5_disk.h -- how HDF5 reaches the disk here: writes that fail are remembered beside the file, because the library loses data in
// silence and crashes at exit when its own driver reports them.
#pragma once
#include <hdf5.h>

#include <memory>

namespace moetrain::io {

// errno of the first write that the disk refused; 0: none. From then on nothing more is written and the library believes all is
// well, so its handles can be closed; whoever owns the file asks before it trusts what was written.
using DiskFailure = std::shared_ptr<int>;

void use_disk(hid_t file_access);         // files opened with this property list go through here
DiskFailure disk_failure_of(hid_t file);  // of an open file; outlives it

}  // namespace moetrain::io
