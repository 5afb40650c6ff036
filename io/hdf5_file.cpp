// hdf5_file.cpp -- the only caller of the HDF5 library: every status checked, every handle owned.
#include "io/hdf5_file.h"

#include <hdf5.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>

#include "io/hdf5_disk.h"
#include "memory/check.h"

namespace moetrain::io {

namespace {

void release_id(hid_t id) noexcept {
  if (H5Idec_ref(id) < 0) spdlog::warn("HDF5: a handle could not be released");
}
using Id = Handle<hid_t, release_id, hid_t{-1}>;

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

template <class Status>
Status h5_ok(Status status, const std::string& path, const std::string& what) {
  if (status < 0) throw Error(path + ": cannot " + what + ": HDF5: " + reason());
  return status;
}

Id own(hid_t id, const std::string& path, const std::string& what) { return Id(h5_ok(id, path, what)); }

// The library prints its error stack otherwise, and the reason is in our Error; and its cleanup at exit walks over what a failed
// close left behind, while our files have owners that close them.
void tame_library() {
  static const bool tame = H5dont_atexit() >= 0 && H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  if (!tame) fail("hdf5: automatic error printing or cleanup cannot be turned off");
}

Id bf16_type() {
  Id type(H5Tcopy(H5T_IEEE_F32LE));
  // The fields must lie inside the type at every moment, so they shrink first.
  const bool made = type.get() >= 0 && H5Tset_fields(type.get(), 15, 7, 8, 0, 7) >= 0 && H5Tset_precision(type.get(), 16) >= 0 &&
                    H5Tset_size(type.get(), 2) >= 0 && H5Tset_ebias(type.get(), 127) >= 0;
  if (!made) throw Error("HDF5: cannot make the bf16 type: " + reason());
  return type;
}

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

struct Extent {  // the sizes of a data space
  int rank = 0;
  std::array<hsize_t, H5S_MAX_RANK> dims{};
};

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

// A file that is only read keeps the library's own driver: sources of a virtual data set are opened with that one, and one process
// cannot hold a file open by two drivers (the source would read as fill).
Id file_access(bool writes) {
  Id access(H5Pcreate(H5P_FILE_ACCESS));
  if (H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG) < 0 || H5Pset_file_locking(access.get(), false, true) < 0)
    throw Error("HDF5: cannot set how files are opened: " + reason());
  if (writes) use_disk(access.get());
  return access;
}

Id link_creation() {
  Id links(H5Pcreate(H5P_LINK_CREATE));
  if (H5Pset_create_intermediate_group(links.get(), 1) < 0 || H5Pset_char_encoding(links.get(), H5T_CSET_UTF8) < 0)
    throw Error("HDF5: cannot set how names are made: " + reason());
  return links;
}

Id variable_text() {
  Id type(H5Tcopy(H5T_C_S1));
  if (H5Tset_size(type.get(), H5T_VARIABLE) < 0 || H5Tset_cset(type.get(), H5T_CSET_UTF8) < 0)
    throw Error("HDF5: cannot make the text type: " + reason());
  return type;
}

// A text of fixed or variable length, from an attribute or a data set: read(memory type, bytes).
template <class Read>
std::string text_by(hid_t type, const std::string& path, const std::string& name, Read read) {
  if (H5Tget_class(type) != H5T_STRING) throw Error(path + ": " + name + " is " + words_for(type) + ", not a text");
  if (H5Tis_variable_str(type) > 0) {
    char* text = nullptr;
    Id memory(H5Tcopy(H5T_C_S1));
    H5Tset_size(memory.get(), H5T_VARIABLE);
    H5Tset_cset(memory.get(), H5Tget_cset(type));
    h5_ok(read(memory.get(), &text), path, "read " + name);
    std::string result = text == nullptr ? "" : text;
    H5free_memory(text);
    return result;
  }
  std::string text(H5Tget_size(type), '\0');
  h5_ok(read(type, text.data()), path, "read " + name);
  return text.substr(0, text.find('\0'));
}

}  // namespace

void close_hdf5_file(std::int64_t file) noexcept {
  if (H5Fclose(file) < 0) spdlog::warn("HDF5: a file was not closed well: {}", reason());
}

Hdf5File::Hdf5File(std::string path, File file, bool writes)
    : path_(std::move(path)), file_(std::move(file)), disk_(writes ? disk_failure_of(file_.get()) : std::make_shared<int>(0)) {}

Hdf5File Hdf5File::create(const std::string& path) {
  tame_library();
  return {path, File(h5_ok(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, file_access(true).get()), path, "create the file")),
          true};
}

Hdf5File Hdf5File::open(const std::string& path, Access access) {
  tame_library();
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) throw Error(path + ": cannot open: " + std::strerror(errno));
  if (!S_ISREG(found.st_mode)) throw Error(path + ": cannot open: not a file");
  const auto kind = H5Fis_hdf5(path.c_str());
  if (kind == 0) throw Error(path + ": not an HDF5 file (" + std::to_string(found.st_size) + " bytes)");
  h5_ok(kind, path, "open");
  const unsigned flags = access == Access::read ? H5F_ACC_RDONLY : H5F_ACC_RDWR;
  return {path, File(h5_ok(H5Fopen(path.c_str(), flags, file_access(access == Access::write).get()), path, "open")),
          access == Access::write};
}

void Hdf5File::check_disk() const {
  if (*disk_ != 0) throw Error(path_ + ": cannot write: " + std::strerror(*disk_));
}

void Hdf5File::flush() {
  h5_ok(H5Fflush(file_.get(), H5F_SCOPE_GLOBAL), path_, "write to disk");
  check_disk();
}

void Hdf5File::close() {
  flush();
  h5_ok(H5Fclose(file_.release()), path_, "close");
  check_disk();
}

bool Hdf5File::has(const std::string& name) const {
  // The library asks for every group on the way by itself.
  for (std::size_t slash = name.find('/', 1);; slash = name.find('/', slash + 1)) {
    const std::string part = name.substr(0, slash);
    if (h5_ok(H5Lexists(file_.get(), part.c_str(), H5P_DEFAULT), path_, "look for " + name) == 0) return false;
    if (slash == std::string::npos) return true;
  }
}

std::vector<std::string> Hdf5File::links(const std::string& group, int kind) const {
  const Id opened = own(H5Gopen2(file_.get(), group.c_str(), H5P_DEFAULT), path_, "open group " + group);
  std::vector<std::string> all, found;
  hsize_t position = 0;
  h5_ok(H5Literate(
            opened.get(), H5_INDEX_NAME, H5_ITER_INC, &position,
            [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
              static_cast<std::vector<std::string>*>(out)->emplace_back(name);
              return 0;
            },
            &all),
        path_, "list group " + group);
  for (const auto& name : all) {
    H5O_info_t object;
    h5_ok(H5Oget_info_by_name2(opened.get(), name.c_str(), &object, H5O_INFO_BASIC, H5P_DEFAULT), path_, "look at " + name);
    if (int(object.type) == kind) found.push_back(name);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<std::string> Hdf5File::names(const std::string& group) const { return links(group, H5O_TYPE_DATASET); }
std::vector<std::string> Hdf5File::groups(const std::string& group) const { return links(group, H5O_TYPE_GROUP); }

DatasetInfo Hdf5File::info(const std::string& name) const {
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id type = own(H5Dget_type(dataset.get()), path_, "ask for the type of " + name);
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  return {dtype_of(type.get()), words_for(type.get()), shape_of(extent_of(space.get(), path_)),
          H5Tget_class(type.get()) == H5T_INTEGER};
}

void Hdf5File::create_dataset(const std::string& name, DType dtype, Shape shape) {
  own(H5Dcreate2(file_.get(), name.c_str(), type_for(dtype).get(), space_for(extent_of(shape)).get(), link_creation().get(),
                 H5P_DEFAULT, H5P_DEFAULT),
      path_, "create " + name);
}

void Hdf5File::write(const std::string& name, ConstTensor all) {
  if (!has(name)) create_dataset(name, all.dtype, all.shape);
  transfer(name, 0, all.shape, true, all.dtype, nullptr, all.data);
}

void Hdf5File::write_rows(const std::string& name, std::int64_t row_begin, ConstTensor rows) {
  transfer(name, row_begin, rows.shape, false, rows.dtype, nullptr, rows.data);
}

void Hdf5File::read(const std::string& name, Tensor all) const { transfer(name, 0, all.shape, true, all.dtype, all.data, nullptr); }

void Hdf5File::read_rows(const std::string& name, std::int64_t row_begin, Tensor rows) const {
  transfer(name, row_begin, rows.shape, false, rows.dtype, rows.data, nullptr);
}

// Rows in either direction: into `to` if it is there, else out of `from`.
void Hdf5File::transfer(const std::string& name, std::int64_t row_begin, const Shape& rows, bool whole, DType dtype, void* to,
                        const void* from) const {
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id stored = own(H5Dget_type(dataset.get()), path_, "ask for the type of " + name);
  const Id type = type_for(dtype);
  if (H5Tequal(stored.get(), type.get()) <= 0)
    throw Error(path_ + ": " + name + " holds " + words_for(stored.get()) + ", " + name_of(dtype) + " is asked for");
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  const Extent all = extent_of(space.get(), path_);
  const Shape shape = shape_of(all);
  bool fits = whole ? shape == rows : shape.rank() > 0 && shape.rank() == rows.rank() && shape.with_dim0(rows[0]) == rows;
  fits = fits && (whole || (row_begin >= 0 && row_begin + rows[0] <= shape[0]));
  if (!fits)
    throw Error(path_ + ": " + name + " is " + shape.text() + ", " + rows.text() + " at row " + std::to_string(row_begin) +
                " does not fit");
  if (rows.count() == 0) return;
  const std::int64_t row_end = row_begin + (rows.rank() > 0 ? rows[0] : 1);
  if (rows.rank() > 0) select_rows(space.get(), all, row_begin, row_end - row_begin, path_);
  const Id memory = space_for(extent_of(rows));
  if (from != nullptr) {
    h5_ok(H5Dwrite(dataset.get(), type.get(), memory.get(), space.get(), H5P_DEFAULT, from), path_, "write " + name);
    check_disk();
  } else {
    check_sources(name, dataset.get(), row_begin, row_end);
    h5_ok(H5Dread(dataset.get(), type.get(), memory.get(), space.get(), H5P_DEFAULT, to), path_, "read " + name);
  }
}

std::vector<std::int64_t> Hdf5File::read_integers(const std::string& name, std::int64_t begin, std::int64_t count) const {
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id stored = own(H5Dget_type(dataset.get()), path_, "ask for the type of " + name);
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  const Extent all = extent_of(space.get(), path_);
  if (H5Tget_class(stored.get()) != H5T_INTEGER || all.rank != 1)
    throw Error(path_ + ": " + name + " is " + words_for(stored.get()) + " of " + std::to_string(all.rank) +
                " dims, integers of one dim are needed");
  if (begin < 0 || count < 0 || begin + count > std::int64_t(all.dims[0]))
    throw Error(path_ + ": " + name + " holds " + std::to_string(all.dims[0]) + " values, " + std::to_string(count) + " at " +
                std::to_string(begin) + " are asked for");
  std::vector<std::int64_t> values(static_cast<std::size_t>(count));
  if (count == 0) return values;
  select_rows(space.get(), all, begin, count, path_);
  const Id memory = space_for(extent_of(Shape{count}));
  h5_ok(H5Dread(dataset.get(), H5T_NATIVE_INT64, memory.get(), space.get(), H5P_DEFAULT, values.data()), path_, "read " + name);
  return values;
}

void Hdf5File::write_unsigned(const std::string& name, int bits, const std::vector<std::int64_t>& values) {
  check(bits == 16 || bits == 32, "hdf5: unsigned integers have 16 or 32 bits here", {{"bits", bits}});
  const std::int64_t limit = (std::int64_t{1} << bits) - 1;
  for (std::size_t i = 0; i < values.size(); ++i)
    check(values[i] >= 0 && values[i] <= limit, "hdf5: a value does not fit its type",
          {{"position", std::int64_t(i)}, {"value", values[i]}, {"limit", limit}});
  const Id space = space_for(extent_of(Shape{std::int64_t(values.size())}));
  const Id dataset = own(H5Dcreate2(file_.get(), name.c_str(), bits == 16 ? H5T_STD_U16LE : H5T_STD_U32LE, space.get(),
                                    link_creation().get(), H5P_DEFAULT, H5P_DEFAULT),
                         path_, "create " + name);
  if (!values.empty())
    h5_ok(H5Dwrite(dataset.get(), H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), path_, "write " + name);
}

void Hdf5File::create_appendable(const std::string& name, DType dtype, Shape row_shape, std::int64_t chunk_rows) {
  check(row_shape.rank() < Shape::kMaxRank && row_shape.count() > 0 && chunk_rows > 0, "hdf5: an appendable data set needs rows",
        {{"row", row_shape.count()}, {"chunk_rows", chunk_rows}});
  Extent start{row_shape.rank() + 1, {}};
  for (int i = 0; i < row_shape.rank(); ++i) start.dims[std::size_t(i) + 1] = hsize_t(row_shape[i]);
  Extent limit = start, chunk = start;
  limit.dims[0] = H5S_UNLIMITED;
  chunk.dims[0] = hsize_t(chunk_rows);
  const Id space = own(H5Screate_simple(start.rank, start.dims.data(), limit.dims.data()), path_, "shape " + name);
  const Id layout(H5Pcreate(H5P_DATASET_CREATE));
  h5_ok(H5Pset_chunk(layout.get(), chunk.rank, chunk.dims.data()), path_, "chunk " + name);
  own(H5Dcreate2(file_.get(), name.c_str(), type_for(dtype).get(), space.get(), link_creation().get(), layout.get(), H5P_DEFAULT),
      path_, "create " + name);
}

void Hdf5File::set_rows(const std::string& name, std::int64_t rows) {
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  Extent extent = extent_of(space.get(), path_);
  check(extent.rank > 0 && rows >= 0, "hdf5: rows cannot be set", {{"rank", extent.rank}, {"rows", rows}});
  extent.dims[0] = hsize_t(rows);
  h5_ok(H5Dset_extent(dataset.get(), extent.dims.data()), path_, "resize " + name);
}

void Hdf5File::append_row(const std::string& name, ConstTensor row) {
  const Shape shape = info(name).shape;
  check(shape.rank() > 0 && shape.row() == row.count(), "hdf5: the row does not fit the data set",
        {{"row", row.count()}, {"needed", shape.rank() > 0 ? shape.row() : 0}});
  set_rows(name, shape[0] + 1);
  write_rows(name, shape[0], row.reshape(shape.with_dim0(1)));
}

void Hdf5File::create_virtual(const std::string& name, DType dtype, Shape shape, const std::vector<VirtualSource>& sources) {
  check(shape.rank() > 0, "hdf5: a virtual data set has rows");
  const Id type = type_for(dtype);
  const Id layout(H5Pcreate(H5P_DATASET_CREATE));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (H5Tget_class(type.get()) == H5T_FLOAT)
    h5_ok(H5Pset_fill_value(layout.get(), H5T_NATIVE_DOUBLE, &nan), path_, "set the fill value of " + name);
  const Extent all = extent_of(shape);
  for (const auto& source : sources) {
    check(source.row_begin >= 0 && source.rows >= 0 && source.row_begin + source.rows <= shape[0],
          "hdf5: rows of a source lie outside the virtual data set",
          {{"row_begin", source.row_begin}, {"rows", source.rows}, {"of", shape[0]}});
    if (source.rows == 0) continue;
    const Id here = space_for(all), there = space_for(extent_of(shape.with_dim0(source.rows)));
    select_rows(here.get(), all, source.row_begin, source.rows, path_);
    h5_ok(H5Pset_virtual(layout.get(), here.get(), source.file.c_str(), source.dataset.c_str(), there.get()), path_,
          "map " + name + " to " + source.file);
  }
  own(H5Dcreate2(file_.get(), name.c_str(), type.get(), space_for(all).get(), link_creation().get(), layout.get(), H5P_DEFAULT),
      path_, "create " + name);
}

// The library reads a missing source as fill without a word; so each is looked at before its rows are read.
void Hdf5File::check_sources(const std::string& name, std::int64_t dataset, std::int64_t row_begin, std::int64_t row_end) const {
  const Id layout = own(H5Dget_create_plist(dataset), path_, "ask for the layout of " + name);
  if (H5Pget_layout(layout.get()) != H5D_VIRTUAL) return;
  std::size_t count = 0;
  h5_ok(H5Pget_virtual_count(layout.get(), &count), path_, "ask for the sources of " + name);
  for (std::size_t i = 0; i < count; ++i) {
    const Id part = own(H5Pget_virtual_vspace(layout.get(), i), path_, "ask for the sources of " + name);
    std::array<hsize_t, H5S_MAX_RANK> first{}, last{};
    h5_ok(H5Sget_select_bounds(part.get(), first.data(), last.data()), path_, "ask for the sources of " + name);
    if (std::int64_t(last[0]) < row_begin || std::int64_t(first[0]) >= row_end) continue;
    const auto text_of = [&](auto ask) {
      const auto length = h5_ok(ask(layout.get(), i, nullptr, std::size_t{0}), path_, "ask for the sources of " + name);
      std::string text(std::size_t(length) + 1, '\0');
      h5_ok(ask(layout.get(), i, text.data(), text.size()), path_, "ask for the sources of " + name);
      text.pop_back();
      return text;
    };
    const std::string source = text_of(H5Pget_virtual_filename), inside = text_of(H5Pget_virtual_dsetname);
    if (!sources_seen_.insert(source + '\0' + inside).second) continue;
    try {
      const auto file = open((std::filesystem::path(path_).parent_path() / source).string());
      const Shape found = file.info(inside).shape;
      const std::int64_t rows = std::int64_t(last[0] - first[0]) + 1;
      if (found.rank() == 0 || found[0] < rows)
        throw Error(file.path() + ": " + inside + " is " + found.text() + ", " + std::to_string(rows) + " rows are needed");
    } catch (const Error& wrong) {
      sources_seen_.erase(source + '\0' + inside);
      throw Error(path_ + ": " + name + " has a part that cannot be read: " + wrong.what());
    }
  }
}

void Hdf5File::set_attribute(const std::string& name, std::int64_t value) {
  if (h5_ok(H5Aexists(file_.get(), name.c_str()), path_, "look for " + name) > 0)
    h5_ok(H5Adelete(file_.get(), name.c_str()), path_, "replace " + name);
  const Id space(H5Screate(H5S_SCALAR));
  const Id made =
      own(H5Acreate2(file_.get(), name.c_str(), H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT), path_, "create " + name);
  h5_ok(H5Awrite(made.get(), H5T_NATIVE_INT64, &value), path_, "write " + name);
}

void Hdf5File::set_attribute(const std::string& name, const std::string& value) {
  if (h5_ok(H5Aexists(file_.get(), name.c_str()), path_, "look for " + name) > 0)
    h5_ok(H5Adelete(file_.get(), name.c_str()), path_, "replace " + name);
  const Id space(H5Screate(H5S_SCALAR)), type = variable_text();
  const Id made =
      own(H5Acreate2(file_.get(), name.c_str(), type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), path_, "create " + name);
  const char* text = value.c_str();
  h5_ok(H5Awrite(made.get(), type.get(), &text), path_, "write " + name);
}

std::optional<std::int64_t> Hdf5File::integer_attribute(const std::string& name, const std::string& object) const {
  if (h5_ok(H5Aexists_by_name(file_.get(), object.c_str(), name.c_str(), H5P_DEFAULT), path_, "look for " + name) == 0) return {};
  const Id found = own(H5Aopen_by_name(file_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), path_, "open " + name);
  const Id type = own(H5Aget_type(found.get()), path_, "ask for the type of " + name);
  const Id space = own(H5Aget_space(found.get()), path_, "ask for the shape of " + name);
  if (H5Tget_class(type.get()) != H5T_INTEGER || H5Sget_simple_extent_npoints(space.get()) != 1)
    throw Error(path_ + ": attribute " + name + " is " + words_for(type.get()) + ", one integer is needed");
  std::int64_t value = 0;
  h5_ok(H5Aread(found.get(), H5T_NATIVE_INT64, &value), path_, "read " + name);
  return value;
}

std::optional<std::string> Hdf5File::text_attribute(const std::string& name, const std::string& object) const {
  if (h5_ok(H5Aexists_by_name(file_.get(), object.c_str(), name.c_str(), H5P_DEFAULT), path_, "look for " + name) == 0) return {};
  const Id found = own(H5Aopen_by_name(file_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), path_, "open " + name);
  const Id type = own(H5Aget_type(found.get()), path_, "ask for the type of " + name);
  return text_by(type.get(), path_, name, [&](hid_t memory, void* out) { return H5Aread(found.get(), memory, out); });
}

void Hdf5File::write_text(const std::string& name, const std::string& text) {
  check(text.find('\0') == std::string::npos, "hdf5: a text with a zero byte would be cut there");
  if (has(name)) h5_ok(H5Ldelete(file_.get(), name.c_str(), H5P_DEFAULT), path_, "replace " + name);
  const Id space(H5Screate(H5S_SCALAR)), type = variable_text();
  const Id dataset =
      own(H5Dcreate2(file_.get(), name.c_str(), type.get(), space.get(), link_creation().get(), H5P_DEFAULT, H5P_DEFAULT), path_,
          "create " + name);
  const char* bytes = text.c_str();
  h5_ok(H5Dwrite(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, &bytes), path_, "write " + name);
}

std::string Hdf5File::read_text(const std::string& name) const {
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id type = own(H5Dget_type(dataset.get()), path_, "ask for the type of " + name);
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  if (H5Sget_simple_extent_npoints(space.get()) != 1) throw Error(path_ + ": " + name + " is not one text");
  return text_by(type.get(), path_, name,
                 [&](hid_t memory, void* out) { return H5Dread(dataset.get(), memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, out); });
}

std::string hdf5_version() {
  unsigned major = 0, minor = 0, release = 0;
  h5_ok(H5get_libversion(&major, &minor, &release), "HDF5", "tell its version");
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

}  // namespace moetrain::io
