// mpi_session.cpp -- starts and ends MPI, and turns its statuses into Errors.
#include "parallel/mpi_session.h"

#include <mpi.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>

#include "memory/check.h"
#include "parallel/mpi_check.h"

namespace moetrain::parallel {
namespace {

std::string text_of(int status) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(status, text, &length) != MPI_SUCCESS) return "status " + std::to_string(status);
  return std::string(text, std::size_t(length));
}

}  // namespace

void mpi_ok(int status, std::source_location where) {
  if (status == MPI_SUCCESS) [[likely]]
    return;
  int kind = MPI_ERR_UNKNOWN;
  MPI_Error_class(status, &kind);
  // MPI has no word for a peer that died: these are what it answers then, and the last where one sends more than was asked for.
  // Others are mistakes in a call.
  const bool peer_lost = kind == MPI_ERR_OTHER || kind == MPI_ERR_INTERN || kind == MPI_ERR_UNKNOWN || kind == MPI_ERR_TRUNCATE;
  throw Error(std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": MPI: " + text_of(status),
              peer_lost ? ExitCode::rank_lost : ExitCode::run_failed);
}

MpiSession::MpiSession(int& argc, char**& argv, std::shared_ptr<Journal> journal) : journal_(std::move(journal)) {
  const Journal::Wait waiting(journal_.get(), {.op = Op::start});
  int provided = 0;
  mpi_ok(MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided));
  check(provided >= MPI_THREAD_SERIALIZED, "mpi: this MPI cannot serve more than one thread", {{"level", provided}});
  mpi_ok(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  mpi_ok(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN));
  mpi_ok(MPI_Comm_rank(MPI_COMM_WORLD, &rank_));
  mpi_ok(MPI_Comm_size(MPI_COMM_WORLD, &size_));
  MPI_Comm host = MPI_COMM_NULL;
  mpi_ok(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &host));
  mpi_ok(MPI_Comm_rank(host, &local_rank_));
  mpi_ok(MPI_Comm_size(host, &local_size_));
  mpi_ok(MPI_Comm_free(&host));
}

MpiSession::~MpiSession() {
  // Finalize waits for all ranks. After an exception the others may wait in a collective for us: leave, and the launcher ends them.
  if (std::uncaught_exceptions() > 0) {
    spdlog::warn("mpi: left without finalize because of an error");
    return;
  }
  const Journal::Wait waiting(journal_.get(), {.place = {Phase::exit}, .op = Op::end});
  if (const int status = MPI_Finalize(); status != MPI_SUCCESS) spdlog::warn("mpi: finalize failed with status {}", status);
}

void MpiSession::abort(int exit_code) {
  spdlog::apply_all([](const std::shared_ptr<spdlog::logger>& logger) { logger->flush(); });
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);  // MPI_Abort may return; this function may not
}

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  mpi_ok(MPI_Get_library_version(text, &length));
  const std::string whole(text, std::size_t(length));
  return whole.substr(0, whole.find_first_of(",\n"));
}

}  // namespace moetrain::parallel
