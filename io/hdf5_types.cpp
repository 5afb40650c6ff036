// hdf5_types.cpp -- our types and shapes as the HDF5 library's, and its error stack as one reason.
#include "io/hdf5_types.h"

#include <spdlog/spdlog.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace moetrain::io {

namespace {

struct Turns {
  std::mutex mutex;
  std::condition_variable next;
  std::uint64_t taken = 0, served = 0;
};
Turns& turns() {
  static auto* const all = new Turns;  // never destroyed: files may be closed at the very end
  return *all;
}
thread_local int depth = 0;

// The library prints its error stack otherwise, and the reason is in our Error; each thread has a stack of its own. And its cleanup at
// exit walks over what a failed close left behind, while our files have owners that close them.
void tame_library() noexcept {
  static const bool without_cleanup = H5dont_atexit() >= 0;
  thread_local const bool silent = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  static const bool told = [] {
    if (!without_cleanup || !silent) spdlog::warn("HDF5: its own error printing or cleanup cannot be turned off");
    return true;
  }();
  static_cast<void>(told);
}

}  // namespace

InHdf5::InHdf5() {
  if (depth++ > 0) return;
  Turns& t = turns();
  {
    std::unique_lock lock(t.mutex);
    const std::uint64_t mine = t.taken++;
    t.next.wait(lock, [&] { return t.served == mine; });
  }
  tame_library();
}

InHdf5::~InHdf5() {
  if (--depth > 0) return;
  Turns& t = turns();
  {
    const std::scoped_lock lock(t.mutex);
    ++t.served;
  }
  t.next.notify_all();
}

void release_id(hid_t id) noexcept {
  if (H5Idec_ref(id) < 0) spdlog::warn("HDF5: a handle could not be released");
}

// The innermost entry of the library's error stack: what really happened.
std::string reason() {
  std::string text;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned n, const H5E_error2_t* entry, void* out) -> herr_t {
        if (n == 0 && entry->desc != nullptr) *static_cast<std::string*>(out) = entry->desc;
        return 0;
      },
      &text);
  H5Eclear2(H5E_DEFAULT);
  return text.empty() ? "no reason given" : text;
}

namespace {

Id bf16_type() {
  Id type(H5Tcopy(H5T_IEEE_F32LE));
  // The fields must lie inside the type at every moment, so they shrink first.
  const bool made = type.get() >= 0 && H5Tset_fields(type.get(), 15, 7, 8, 0, 7) >= 0 && H5Tset_precision(type.get(), 16) >= 0 &&
                    H5Tset_size(type.get(), 2) >= 0 && H5Tset_ebias(type.get(), 127) >= 0;
  if (!made) throw Error("HDF5: cannot make the bf16 type: " + reason());
  return type;
}

}  // namespace

Id type_for(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return Id(H5Tcopy(H5T_IEEE_F64LE));
    case DType::f32:
      return Id(H5Tcopy(H5T_IEEE_F32LE));
    case DType::bf16:
      return bf16_type();
    case DType::i64:
      return Id(H5Tcopy(H5T_STD_I64LE));
    case DType::i32:
      return Id(H5Tcopy(H5T_STD_I32LE));
    case DType::u8:
      return Id(H5Tcopy(H5T_STD_U8LE));
    case DType::none:
      break;
  }
  fail("hdf5: a tensor without a type");
}

DType dtype_of(hid_t type) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i64, DType::i32, DType::u8})
    if (H5Tequal(type, type_for(dtype).get()) > 0) return dtype;
  return DType::none;
}

std::string words_for(hid_t type) {
  if (const DType known = dtype_of(type); known != DType::none) return name_of(known);
  const std::string bits = std::to_string(H5Tget_size(type) * 8);
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return (H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int") + bits;
    case H5T_FLOAT:
      return "a float of " + bits + " bits";
    case H5T_STRING:
      return "text";
    default:
      return "a compound or other type";
  }
}

Extent extent_of(const Shape& shape) {
  Extent extent{shape.rank(), {}};
  for (int i = 0; i < shape.rank(); ++i) extent.dims[std::size_t(i)] = hsize_t(shape[i]);
  return extent;
}

Extent extent_of(hid_t space, const std::string& path) {
  Extent extent;
  extent.rank = h5_ok(H5Sget_simple_extent_ndims(space), path, "ask for a shape");
  h5_ok(H5Sget_simple_extent_dims(space, extent.dims.data(), nullptr), path, "ask for a shape");
  return extent;
}

Shape shape_of(const Extent& extent) {
  const auto d = [&](int i) { return std::int64_t(extent.dims[std::size_t(i)]); };
  switch (extent.rank) {
    case 0:
      return {};
    case 1:
      return {d(0)};
    case 2:
      return {d(0), d(1)};
    case 3:
      return {d(0), d(1), d(2)};
    case 4:
      return {d(0), d(1), d(2), d(3)};
    default:
      fail("hdf5: a data set of more than four dims", {{"dims", extent.rank}});
  }
}

Id space_for(const Extent& extent) {
  if (extent.rank == 0) return Id(H5Screate(H5S_SCALAR));
  return Id(H5Screate_simple(extent.rank, extent.dims.data(), nullptr));
}

void select_rows(hid_t space, const Extent& all, std::int64_t begin, std::int64_t count, const std::string& path) {
  std::array<hsize_t, H5S_MAX_RANK> start{};
  auto block = all.dims;
  start[0] = hsize_t(begin);
  block[0] = hsize_t(count);
  h5_ok(H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, block.data(), nullptr), path, "select rows");
}

void select_block(hid_t space, std::int64_t begin, std::int64_t count, Columns columns, const std::string& path) {
  const hsize_t start[] = {hsize_t(begin), hsize_t(columns.begin)}, block[] = {hsize_t(count), hsize_t(columns.count)};
  h5_ok(H5Sselect_hyperslab(space, H5S_SELECT_SET, start, nullptr, block, nullptr), path, "select rows and columns");
}

Id link_creation() {
  Id links(H5Pcreate(H5P_LINK_CREATE));
  if (H5Pset_create_intermediate_group(links.get(), 1) < 0 || H5Pset_char_encoding(links.get(), H5T_CSET_UTF8) < 0)
    throw Error("HDF5: cannot set how names are made: " + reason());
  return links;
}

}  // namespace moetrain::io
