// mpi_check.h -- turns an MPI status into an Error that names place and cause.
#pragma once
#include <source_location>

namespace moetrain::parallel {

void mpi_ok(int status, std::source_location where = std::source_location::current());

}  // namespace moetrain::parallel
