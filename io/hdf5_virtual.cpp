// hdf5_virtual.cpp -- data sets whose rows lie in other files, and that no row is read which nobody wrote.
#include <algorithm>
#include <filesystem>
#include <limits>

#include "io/hdf5_file.h"
#include "io/hdf5_types.h"

namespace moetrain::io {
namespace {

struct Source {  // one mapping of a virtual data set
  std::string file, dataset;
  std::int64_t row_begin, row_end;  // in the virtual data set
  std::int64_t values;
  std::int64_t source_rows;  // that the source must have; 0: whatever makes up the values
};

// Nothing for a data set that is not virtual.
std::vector<Source> sources_of(hid_t dataset, const std::string& path, const std::string& name) {
  const std::string what = "ask for the sources of " + name;
  const Id layout = own(H5Dget_create_plist(dataset), path, what);
  std::vector<Source> sources;
  if (H5Pget_layout(layout.get()) != H5D_VIRTUAL) return sources;
  std::size_t count = 0;
  h5_ok(H5Pget_virtual_count(layout.get(), &count), path, what);
  for (std::size_t i = 0; i < count; ++i) {
    const auto text_of = [&](auto ask) {
      const auto length = h5_ok(ask(layout.get(), i, nullptr, std::size_t{0}), path, what);
      std::string text(std::size_t(length) + 1, '\0');
      h5_ok(ask(layout.get(), i, text.data(), text.size()), path, what);
      text.pop_back();
      return text;
    };
    std::array<hsize_t, H5S_MAX_RANK> first{}, last{}, from{}, to{};
    const Id here = own(H5Pget_virtual_vspace(layout.get(), i), path, what);
    const Id there = own(H5Pget_virtual_srcspace(layout.get(), i), path, what);
    h5_ok(H5Sget_select_bounds(here.get(), first.data(), last.data()), path, what);
    h5_ok(H5Sget_select_bounds(there.get(), from.data(), to.data()), path, what);
    // Of a source that is taken whole, the library keeps no shape.
    const bool whole = H5Sget_select_type(there.get()) == H5S_SEL_ALL;
    sources.push_back({text_of(H5Pget_virtual_filename), text_of(H5Pget_virtual_dsetname), std::int64_t(first[0]),
                       std::int64_t(last[0]) + 1, std::int64_t(h5_ok(H5Sget_select_npoints(here.get()), path, what)),
                       whole ? 0 : std::int64_t(to[0]) + 1});
  }
  return sources;
}

Hdf5File open_source(const std::string& path, const Source& source) {
  auto file = Hdf5File::open(source.file == "." ? path : (std::filesystem::path(path).parent_path() / source.file).string());
  const Shape found = file.info(source.dataset).shape;
  const std::int64_t row = found.rank() > 0 ? std::max<std::int64_t>(1, found.row()) : 1;
  const std::int64_t rows = source.source_rows > 0 ? source.source_rows : (source.values + row - 1) / row;
  if (found.rank() == 0 || found[0] < rows)
    throw Error(file.path() + ": " + source.dataset + " is " + found.text() + ", " + std::to_string(rows) + " rows are needed");
  return file;
}

[[noreturn]] void refuse_part(const std::string& path, const std::string& name, const Error& wrong) {
  throw Error(path + ": " + name + " has a part that cannot be read: " + wrong.what());
}

// What of a data set that is not virtual has a place in its file. Chunks are counted, since the library (1.10) compares bytes, and
// takes a last chunk that reaches past the end, or compressed ones, for a data set written in part.
H5D_space_status_t written_of(hid_t dataset, hid_t layout, hid_t space, const std::string& path, const std::string& name) {
  const std::string what = "ask for the storage of " + name;
  H5D_space_status_t written{};
  if (H5Pget_layout(layout) != H5D_CHUNKED) {
    h5_ok(H5Dget_space_status(dataset, &written), path, what);
    return written;
  }
  const Extent all = extent_of(space, path);
  std::array<hsize_t, H5S_MAX_RANK> chunk{};
  h5_ok(H5Pget_chunk(layout, all.rank, chunk.data()), path, what);
  hsize_t needed = 1, found = 0;
  for (std::size_t d = 0; d < std::size_t(all.rank); ++d) needed *= (all.dims[d] + chunk[d] - 1) / chunk[d];
  h5_ok(H5Dget_num_chunks(dataset, space, &found), path, what);
  if (found >= needed) return H5D_SPACE_STATUS_ALLOCATED;
  return found > 0 ? H5D_SPACE_STATUS_PART_ALLOCATED : H5D_SPACE_STATUS_NOT_ALLOCATED;
}

}  // namespace

void Hdf5File::create_virtual(const std::string& name, DType dtype, Shape shape, const std::vector<VirtualSource>& sources) {
  const InHdf5 turn;
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
    const bool columns = source.columns > 0;
    check(!columns || (shape.rank() == 2 && source.column_begin >= 0 && source.column_begin + source.columns <= shape[1]),
          "hdf5: columns of a source lie outside the virtual data set",
          {{"column_begin", source.column_begin}, {"columns", source.columns}, {"of", shape.rank() == 2 ? shape[1] : 0}});
    const Shape part = columns ? Shape{source.rows, source.columns} : shape.with_dim0(source.rows);
    const Id here = space_for(all), there = space_for(extent_of(part));
    if (columns)
      select_block(here.get(), source.row_begin, source.rows, {source.column_begin, source.columns}, path_);
    else
      select_rows(here.get(), all, source.row_begin, source.rows, path_);
    h5_ok(H5Pset_virtual(layout.get(), here.get(), source.file.c_str(), source.dataset.c_str(), there.get()), path_,
          "map " + name + " to " + source.file);
  }
  own(H5Dcreate2(file_.get(), name.c_str(), type.get(), space_for(all).get(), link_creation().get(), layout.get(), H5P_DEFAULT),
      path_, "create " + name);
}

// The library reads a missing source as fill without a word; so each is looked at before its rows are read.
void Hdf5File::check_sources(const std::string& name, std::int64_t dataset, std::int64_t row_begin, std::int64_t row_end) const {
  for (const Source& source : sources_of(dataset, path_, name)) {
    if (source.row_end <= row_begin || source.row_begin >= row_end) continue;
    const std::string place = source.file + '\0' + source.dataset;
    if (sources_seen_.contains(place)) continue;
    try {
      open_source(path_, source);
    } catch (const Error& wrong) {
      refuse_part(path_, name, wrong);
    }
    sources_seen_.insert(place);
  }
}

void Hdf5File::check_complete(const std::string& name, int depth) const {
  const InHdf5 turn;
  constexpr int kDeepest = 8;  // a data set may be its own source
  if (depth > kDeepest) throw Error(path_ + ": " + name + " comes from sources of sources, more than " + std::to_string(kDeepest));
  const Id dataset = own(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT), path_, "open " + name);
  const Id space = own(H5Dget_space(dataset.get()), path_, "ask for the shape of " + name);
  const std::int64_t values = h5_ok(H5Sget_simple_extent_npoints(space.get()), path_, "ask for the shape of " + name);
  const Id layout = own(H5Dget_create_plist(dataset.get()), path_, "ask for the layout of " + name);
  if (H5Pget_layout(layout.get()) != H5D_VIRTUAL) {
    const auto written = written_of(dataset.get(), layout.get(), space.get(), path_, name);
    if (values > 0 && written != H5D_SPACE_STATUS_ALLOCATED)
      throw Error(path_ + ": " + name + " was " +
                  (written == H5D_SPACE_STATUS_PART_ALLOCATED ? "written only in part" : "never written") + ": it has a shape of " +
                  std::to_string(values) + " values and no contents");
    return;
  }
  std::int64_t mapped = 0;
  for (const Source& source : sources_of(dataset.get(), path_, name)) {
    mapped += source.values;
    try {
      open_source(path_, source).check_complete(source.dataset, depth + 1);
    } catch (const Error& wrong) {
      refuse_part(path_, name, wrong);
    }
  }
  if (mapped < values)
    throw Error(path_ + ": " + name + " has " + std::to_string(values) + " values, of which " + std::to_string(values - mapped) +
                " come from no source");
}

}  // namespace moetrain::io
