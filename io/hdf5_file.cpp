// hdf5_file.cpp -- data sets, rows, attributes and texts of one file; its virtual data sets are in hdf5_virtual.cpp.
#include "io/hdf5_file.h"

#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "io/hdf5_disk.h"
#include "io/hdf5_types.h"

namespace moetrain::io {

namespace {

// The library opens the sources of a virtual data set by itself, with its own driver, weak closing and its own way of locking, and
// one process cannot hold a file in two ways (the source would read as fill). So a file that is only read is opened as the library
// would; it keeps some sources open, or each would be opened anew at every read.
Id file_access(bool writes) {
  constexpr unsigned kSourcesKeptOpen = 16;
  Id access(H5Pcreate(H5P_FILE_ACCESS));
  const herr_t set =
      writes ? H5Pset_file_locking(access.get(), false, true) : H5Pset_elink_file_cache_size(access.get(), kSourcesKeptOpen);
  if (set < 0 || H5Pset_fclose_degree(access.get(), writes ? H5F_CLOSE_STRONG : H5F_CLOSE_WEAK) < 0)
    throw Error("HDF5: cannot set how files are opened: " + reason());
  if (writes) use_disk(access.get());
  return access;
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
  const InHdf5 turn;
  if (H5Fclose(file) < 0) spdlog::warn("HDF5: a file was not closed well: {}", reason());
}

Hdf5File::Hdf5File(std::string path, File file, bool writes)
    : path_(std::move(path)), file_(std::move(file)), disk_(writes ? disk_failure_of(file_.get()) : std::make_shared<int>(0)) {}

Hdf5File Hdf5File::create(const std::string& path) {
  const InHdf5 turn;
  return {path, File(h5_ok(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, file_access(true).get()), path, "create the file")),
          true};
}

Hdf5File Hdf5File::open(const std::string& path, Access access) {
  const InHdf5 turn;
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
  const InHdf5 turn;
  h5_ok(H5Fflush(file_.get(), H5F_SCOPE_GLOBAL), path_, "write to disk");
  check_disk();
}

void Hdf5File::close() {
  const InHdf5 turn;
  flush();
  h5_ok(H5Fclose(file_.release()), path_, "close");
  check_disk();
}

bool Hdf5File::has(const std::string& name) const {
  const InHdf5 turn;
  // The library asks for every group on the way by itself.
  for (std::size_t slash = name.find('/', 1);; slash = name.find('/', slash + 1)) {
    const std::string part = name.substr(0, slash);
    if (h5_ok(H5Lexists(file_.get(), part.c_str(), H5P_DEFAULT), path_, "look for " + name) == 0) return false;
    if (slash == std::string::npos) return true;
  }
}

std::vector<std::string> Hdf5File::links(const std::string& group, int kind) const {
  const InHdf5 turn;
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
  const InHdf5 turn;
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id type = own(H5Dget_type(dataset.get()), path_, "ask for the type of " + name);
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  return {dtype_of(type.get()), words_for(type.get()), shape_of(extent_of(space.get(), path_)),
          H5Tget_class(type.get()) == H5T_INTEGER};
}

void Hdf5File::create_dataset(const std::string& name, DType dtype, Shape shape) {
  const InHdf5 turn;
  own(H5Dcreate2(file_.get(), name.c_str(), type_for(dtype).get(), space_for(extent_of(shape)).get(), link_creation().get(),
                 H5P_DEFAULT, H5P_DEFAULT),
      path_, "create " + name);
}

std::int64_t Hdf5File::reserve(const std::string& name, DType dtype, Shape shape) {
  const InHdf5 turn;
  check(shape.count() > 0, "hdf5: a data set without values has no place");
  const Id layout(H5Pcreate(H5P_DATASET_CREATE));
  if (H5Pset_layout(layout.get(), H5D_CONTIGUOUS) < 0 || H5Pset_alloc_time(layout.get(), H5D_ALLOC_TIME_EARLY) < 0 ||
      H5Pset_fill_time(layout.get(), H5D_FILL_TIME_NEVER) < 0 || H5Pset_obj_track_times(layout.get(), false) < 0)
    throw Error("HDF5: cannot set how a place is made: " + reason());
  const Id made = own(H5Dcreate2(file_.get(), name.c_str(), type_for(dtype).get(), space_for(extent_of(shape)).get(),
                                 link_creation().get(), layout.get(), H5P_DEFAULT),
                      path_, "create " + name);
  const haddr_t place = H5Dget_offset(made.get());
  if (place == HADDR_UNDEF) throw Error(path_ + ": cannot find the place of " + name + ": HDF5: " + reason());
  return std::int64_t(place);
}

void Hdf5File::write(const std::string& name, ConstTensor all) {
  const InHdf5 turn;
  if (!has(name)) create_dataset(name, all.dtype, all.shape);
  transfer(name, {Part::Of::all}, all.shape, all.dtype, nullptr, all.data);
}

void Hdf5File::write_rows(const std::string& name, std::int64_t row_begin, ConstTensor rows) {
  const InHdf5 turn;
  transfer(name, {Part::Of::rows, row_begin}, rows.shape, rows.dtype, nullptr, rows.data);
}

void Hdf5File::read(const std::string& name, Tensor all) const {
  transfer(name, {Part::Of::all}, all.shape, all.dtype, all.data, nullptr);
}

void Hdf5File::read_rows(const std::string& name, std::int64_t row_begin, Tensor rows) const {
  const InHdf5 turn;
  transfer(name, {Part::Of::rows, row_begin}, rows.shape, rows.dtype, rows.data, nullptr);
}

void Hdf5File::read_block(const std::string& name, std::int64_t row_begin, std::int64_t column_begin, Tensor block) const {
  const InHdf5 turn;
  transfer(name, {Part::Of::columns, row_begin, column_begin}, block.shape, block.dtype, block.data, nullptr);
}

// Rows in either direction: into `to` if it is there, else out of `from`.
void Hdf5File::transfer(const std::string& name, const Part& part, const Shape& rows, DType dtype, void* to,
                        const void* from) const {
  const InHdf5 turn;
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id stored = own(H5Dget_type(dataset.get()), path_, "ask for the type of " + name);
  const Id type = type_for(dtype);
  if (H5Tequal(stored.get(), type.get()) <= 0)
    throw Error(path_ + ": " + name + " holds " + words_for(stored.get()) + ", " + name_of(dtype) + " is asked for");
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  const Extent all = extent_of(space.get(), path_);
  const Shape shape = shape_of(all);
  const bool whole = part.of == Part::Of::all, columns = part.of == Part::Of::columns;
  const std::int64_t row_begin = part.row_begin;
  bool fits =
      whole ? shape == rows : shape.rank() > 0 && shape.rank() == rows.rank() && (columns || shape.with_dim0(rows[0]) == rows);
  fits = fits && (whole || (row_begin >= 0 && row_begin + rows[0] <= shape[0]));
  fits = fits && (!columns || (rows.rank() == 2 && part.column_begin >= 0 && part.column_begin + rows[1] <= shape[1]));
  if (!fits)
    throw Error(path_ + ": " + name + " is " + shape.text() + ", " + rows.text() + " at row " + std::to_string(row_begin) +
                (columns ? ", column " + std::to_string(part.column_begin) : "") + " does not fit");
  if (rows.count() == 0) return;
  const std::int64_t row_end = row_begin + (rows.rank() > 0 ? rows[0] : 1);
  if (columns)
    select_block(space.get(), row_begin, rows[0], {part.column_begin, rows[1]}, path_);
  else if (rows.rank() > 0)
    select_rows(space.get(), all, row_begin, row_end - row_begin, path_);
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
  const InHdf5 turn;
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
  check_sources(name, dataset.get(), begin, begin + count);
  const Id memory = space_for(extent_of(Shape{count}));
  h5_ok(H5Dread(dataset.get(), H5T_NATIVE_INT64, memory.get(), space.get(), H5P_DEFAULT, values.data()), path_, "read " + name);
  return values;
}

void Hdf5File::write_unsigned(const std::string& name, int bits, const std::vector<std::int64_t>& values) {
  const InHdf5 turn;
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
  const InHdf5 turn;
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
  const InHdf5 turn;
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  Extent extent = extent_of(space.get(), path_);
  check(extent.rank > 0 && rows >= 0, "hdf5: rows cannot be set", {{"rank", extent.rank}, {"rows", rows}});
  extent.dims[0] = hsize_t(rows);
  h5_ok(H5Dset_extent(dataset.get(), extent.dims.data()), path_, "resize " + name);
}

void Hdf5File::append_row(const std::string& name, ConstTensor row) {
  const InHdf5 turn;
  const Shape shape = info(name).shape;
  check(shape.rank() > 0 && shape.row() == row.count(), "hdf5: the row does not fit the data set",
        {{"row", row.count()}, {"needed", shape.rank() > 0 ? shape.row() : 0}});
  set_rows(name, shape[0] + 1);
  write_rows(name, shape[0], row.reshape(shape.with_dim0(1)));
}

void Hdf5File::set_attribute(const std::string& name, std::int64_t value) {
  const InHdf5 turn;
  if (h5_ok(H5Aexists(file_.get(), name.c_str()), path_, "look for " + name) > 0)
    h5_ok(H5Adelete(file_.get(), name.c_str()), path_, "replace " + name);
  const Id space(H5Screate(H5S_SCALAR));
  const Id made =
      own(H5Acreate2(file_.get(), name.c_str(), H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT), path_, "create " + name);
  h5_ok(H5Awrite(made.get(), H5T_NATIVE_INT64, &value), path_, "write " + name);
}

void Hdf5File::set_attribute(const std::string& name, const std::string& value) {
  const InHdf5 turn;
  if (h5_ok(H5Aexists(file_.get(), name.c_str()), path_, "look for " + name) > 0)
    h5_ok(H5Adelete(file_.get(), name.c_str()), path_, "replace " + name);
  const Id space(H5Screate(H5S_SCALAR)), type = variable_text();
  const Id made =
      own(H5Acreate2(file_.get(), name.c_str(), type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), path_, "create " + name);
  const char* text = value.c_str();
  h5_ok(H5Awrite(made.get(), type.get(), &text), path_, "write " + name);
}

std::optional<std::int64_t> Hdf5File::integer_attribute(const std::string& name, const std::string& object) const {
  const InHdf5 turn;
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
  const InHdf5 turn;
  if (h5_ok(H5Aexists_by_name(file_.get(), object.c_str(), name.c_str(), H5P_DEFAULT), path_, "look for " + name) == 0) return {};
  const Id found = own(H5Aopen_by_name(file_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), path_, "open " + name);
  const Id type = own(H5Aget_type(found.get()), path_, "ask for the type of " + name);
  return text_by(type.get(), path_, name, [&](hid_t memory, void* out) { return H5Aread(found.get(), memory, out); });
}

void Hdf5File::write_text(const std::string& name, const std::string& text) {
  const InHdf5 turn;
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
  const InHdf5 turn;
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id type = own(H5Dget_type(dataset.get()), path_, "ask for the type of " + name);
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  if (H5Sget_simple_extent_npoints(space.get()) != 1) throw Error(path_ + ": " + name + " is not one text");
  return text_by(type.get(), path_, name,
                 [&](hid_t memory, void* out) { return H5Dread(dataset.get(), memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, out); });
}

std::string hdf5_version() {
  const InHdf5 turn;
  unsigned major = 0, minor = 0, release = 0;
  h5_ok(H5get_libversion(&major, &minor, &release), "HDF5", "tell its version");
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

}  // namespace moetrain::io
