// main.cpp -- runs the tests of a room; exit 77 (skipped, for ctest) when only [cuda] tests were asked and no device is here.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include "tests/support/catch.h"

#include <cstdio>
#include <string_view>

#include "memory/cuda_memory.h"
#include "memory/device.h"

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (std::string_view(argv[i]) == "[cuda]") {
      int devices = 0;
      if constexpr (moetrain::kHasCuda) devices = moetrain::cuda::devices();
      if (devices == 0) {
        std::puts("no CUDA device: skipped");
        return 77;
      }
    }
  return Catch::Session().run(argc, argv);
}
