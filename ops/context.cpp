// context.cpp -- what a context borrows from the device, and the refusal of an op without a CUDA backend.
#include "ops/context.h"

#ifdef MOETRAIN_HAS_CUDA
#include "ops/cuda/blas.h"
#endif

namespace moetrain::ops {

void no_cuda(const char* op) { throw Error(std::string("op ") + op + " has no CUDA backend in this build"); }

void wait_for(const Context& ctx) {
  if constexpr (kHasCuda)
    if (ctx.device() == Device::cuda) moetrain::cuda::synchronize(ctx.stream);
}

#ifdef MOETRAIN_HAS_CUDA
void BlasDeleter::operator()(cuda::Blas* blas) const { delete blas; }
OwnedBlas make_blas(Memory& memory) { return OwnedBlas(memory.device() == Device::cuda ? new cuda::Blas(memory) : nullptr); }
#else
void BlasDeleter::operator()(cuda::Blas*) const {}
OwnedBlas make_blas(Memory&) { return nullptr; }
#endif

}  // namespace moetrain::ops
