// in_hdf5.h -- one thread at a time inside the HDF5 library, which need not be thread-safe.
#pragma once

namespace moetrain::io {

// While one lives, its thread alone is inside. Threads are let in in the order in which they came, so that who writes many data sets
// lets the others in between two of them. They nest.
class InHdf5 {
 public:
  InHdf5();
  ~InHdf5();
  InHdf5(const InHdf5&) = delete;
  InHdf5& operator=(const InHdf5&) = delete;
};

}  // namespace moetrain::io
