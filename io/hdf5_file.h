// hdf5_file.h -- one HDF5 file: data sets with the exact types of memory/dtype.h, rows read and written in place, no silent
// conversion.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "memory/handle.h"
#include "memory/tensor.h"

namespace moetrain::io {

enum class Access : std::uint8_t { read, write };

struct DatasetInfo {
  DType dtype = DType::none;  // none: a type that is not in memory/dtype.h
  std::string type;           // in words, whatever it is: "bf16", "uint16", "text"
  Shape shape;
  bool integers = false;  // of any width and sign
};

// Rows [row_begin, row_begin + rows) of a virtual data set, or of those the columns [column_begin, column_begin + columns), are the
// whole of `dataset` in `file`, a path relative to the folder of the file that holds the virtual one. Columns are those of dim 1,
// of two.
struct VirtualSource {
  std::string file;
  std::string dataset;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t column_begin = 0, columns = 0;  // 0: all
};

void close_hdf5_file(std::int64_t file) noexcept;

// Every failure is an Error that names the file, the data set and the library's own reason. A '/' in a name makes groups, a dot
// means nothing. Writers do not lock: each file has one by design, and readers may look on while it grows. Threads may use different
// files: one at a time is inside the library.
class Hdf5File {
 public:
  static Hdf5File create(const std::string& path);  // replaces what is there
  static Hdf5File open(const std::string& path, Access access = Access::read);
  const std::string& path() const { return path_; }
  void flush();  // all that was written has reached the operating system
  void close();  // as the end of its life does, but a failure throws

  bool has(const std::string& name) const;
  std::vector<std::string> names(const std::string& group = "/") const;   // data sets that lie directly in the group, sorted
  std::vector<std::string> groups(const std::string& group = "/") const;  // groups that lie directly in it, sorted
  DatasetInfo info(const std::string& name) const;

  void create_dataset(const std::string& name, DType dtype, Shape shape);
  // Makes the place of a data set alone, at the byte of the file that is returned: its values are written there past the library once
  // the file is closed, by a RawFile. The same calls make the same bytes.
  std::int64_t reserve(const std::string& name, DType dtype, Shape shape);
  void write(const std::string& name, ConstTensor all);  // made if it is not there
  void write_rows(const std::string& name, std::int64_t row_begin, ConstTensor rows);
  void read(const std::string& name, Tensor all) const;
  void read_rows(const std::string& name, std::int64_t row_begin, Tensor rows) const;
  // Of rows of two dims the columns from column_begin on that `block` has.
  void read_block(const std::string& name, std::int64_t row_begin, std::int64_t column_begin, Tensor block) const;
  std::vector<std::int64_t> read_integers(const std::string& name, std::int64_t begin, std::int64_t count) const;  // 1-D, any width
  void write_unsigned(const std::string& name, int bits, const std::vector<std::int64_t>& values);  // 1-D of 16 or 32 bits

  // Grows by rows of a fixed shape (rank 0 for a column of numbers), kept in chunks of chunk_rows.
  void create_appendable(const std::string& name, DType dtype, Shape row_shape, std::int64_t chunk_rows);
  void append_row(const std::string& name, ConstTensor row);
  void set_rows(const std::string& name, std::int64_t rows);  // cut or grown

  // Reads of rows whose source file or data set is missing or too small are an Error; rows of no source are NaN (integers: 0).
  void create_virtual(const std::string& name, DType dtype, Shape shape, const std::vector<VirtualSource>& sources);
  // Every value was written, here or in a source, and sources of sources likewise: else the library would read fill for it.
  void check_complete(const std::string& name) const { check_complete(name, 0); }

  void set_attribute(const std::string& name, std::int64_t value);  // of the root; replaces
  void set_attribute(const std::string& name, const std::string& value);
  std::optional<std::int64_t> integer_attribute(const std::string& name, const std::string& object = "/") const;
  std::optional<std::string> text_attribute(const std::string& name, const std::string& object = "/") const;
  void write_text(const std::string& name, const std::string& text);  // a scalar data set of any length; replaces
  std::string read_text(const std::string& name) const;

 private:
  using File = Handle<std::int64_t, close_hdf5_file, std::int64_t{-1}>;
  Hdf5File(std::string path, File file, bool writes);
  void check_disk() const;  // every write so far has been taken
  std::vector<std::string> links(const std::string& group, int kind) const;
  struct Part {  // of a data set that is moved
    enum class Of : std::uint8_t { all, rows, columns } of;
    std::int64_t row_begin = 0, column_begin = 0;
  };
  void transfer(const std::string& name, const Part& part, const Shape& rows, DType dtype, void* to, const void* from) const;
  void check_complete(const std::string& name, int depth) const;
  void check_sources(const std::string& name, std::int64_t dataset, std::int64_t row_begin, std::int64_t row_end) const;

  std::string path_;
  File file_;
  std::shared_ptr<int> disk_;                   // io/hdf5_disk.h
  mutable std::set<std::string> sources_seen_;  // sources of virtual data sets that were found whole
};

std::string hdf5_version();  // of the library in use

}  // namespace moetrain::io
