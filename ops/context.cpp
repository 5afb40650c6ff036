// context.cpp -- the refusal of an op without a CUDA backend.
#include "ops/context.h"

namespace moetrain::ops {

void no_cuda(const char* op) { throw Error(std::string("op ") + op + " has no CUDA backend in this build"); }

}  // namespace moetrain::ops
