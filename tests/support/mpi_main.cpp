// mpi_main.cpp -- runs the tests of several ranks: every rank runs all of them in one order, and the first failure ends all ranks.
// Exit 77 (skipped, for ctest) when only [cuda] tests were asked and there is no device.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include <cstdio>
#include <iostream>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>

#include "memory/cuda_memory.h"
#include "memory/device.h"
#include "parallel/mpi_session.h"
#include "tests/support/catch.h"

int main(int argc, char** argv) {
  moetrain::parallel::MpiSession mpi(argc, argv);
  for (int i = 1; i < argc; ++i)
    if (std::string_view(argv[i]) == "[cuda]") {
      int devices = 0;
      if constexpr (moetrain::kHasCuda) devices = moetrain::cuda::devices();
      if (devices == 0) {
        if (mpi.rank() == 0) std::printf("no CUDA device for %d ranks: skipped\n", mpi.size());
        return 77;
      }
    }
  Catch::Session session;
  if (const int wrong = session.applyCommandLine(argc, argv); wrong != 0) mpi.abort(wrong);
  session.configData().abortAfter = 1;  // past a failure this rank's collectives would no longer meet those of the others

  std::ostringstream report;  // ranks that print at the same time would be unreadable
  std::streambuf* const terminal = std::cout.rdbuf(report.rdbuf());
  const int failed = session.run();
  std::cout.rdbuf(terminal);

  const std::string text = std::regex_replace(report.str(), std::regex("\x1b\\[[0-9;]*m"), "");  // colours do not survive prefixes
  std::string line;
  for (std::istringstream lines(text); (failed != 0 || mpi.rank() == 0) && std::getline(lines, line);)
    std::printf("[rank %d] %s\n", mpi.rank(), line.c_str());
  if (failed != 0) mpi.abort(1);  // the others may wait for this rank in a collective
  return 0;
}
