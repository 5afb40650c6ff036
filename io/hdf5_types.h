// hdf5_types.h -- what the files that call the HDF5 library share: owned handles, checked statuses, types and shapes.
#pragma once
#include <hdf5.h>

#include <array>
#include <string>
#include <utility>

#include "io/in_hdf5.h"
#include "memory/check.h"
#include "memory/handle.h"
#include "memory/tensor.h"

namespace moetrain::io {

void release_id(hid_t id) noexcept;
using Id = Handle<hid_t, release_id, hid_t{-1}>;

std::string reason();  // of the library's last failure, which is thereby forgotten

template <class Status>
Status h5_ok(Status status, const std::string& path, const std::string& what) {
  if (status < 0) throw Error(path + ": cannot " + what + ": HDF5: " + reason());
  return status;
}
inline Id own(hid_t id, const std::string& path, const std::string& what) { return Id(h5_ok(id, path, what)); }

Id type_for(DType dtype);
DType dtype_of(hid_t type);         // none: not one of ours
std::string words_for(hid_t type);  // "bf16", "uint16", "text", whatever it is

struct Extent {  // the sizes of a data space
  int rank = 0;
  std::array<hsize_t, H5S_MAX_RANK> dims{};
};
Extent extent_of(const Shape& shape);
Extent extent_of(hid_t space, const std::string& path);
Shape shape_of(const Extent& extent);
Id space_for(const Extent& extent);
Id link_creation();  // names are UTF-8 and make the groups they name
void select_rows(hid_t space, const Extent& all, std::int64_t begin, std::int64_t count, const std::string& path);
// Of rows of two dims.
struct Columns {
  std::int64_t begin, count;
};
void select_block(hid_t space, std::int64_t begin, std::int64_t count, Columns columns, const std::string& path);

}  // namespace moetrain::io
