// mpi_session.h -- MPI from init to finalize, and what MPI knows about this process.
#pragma once
#include <string>

#include "parallel/journal.h"

namespace moetrain::parallel {

// One per process, made first and destroyed last. Sets MPI_ERRORS_RETURN, so that every status reaches mpi_ok; thread level
// MPI_THREAD_SERIALIZED at least. Without a launcher it is a world of one. A journal is told when it waits for the other ranks.
class MpiSession {
 public:
  MpiSession(int& argc, char**& argv, std::shared_ptr<Journal> journal = {});
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }  // among the ranks of this host
  int local_size() const { return local_size_; }
  [[noreturn]] void abort(int exit_code);  // ends every rank: one rank's failure must not leave the others waiting
 private:
  std::shared_ptr<Journal> journal_;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
};

std::string mpi_version();

}  // namespace moetrain::parallel
