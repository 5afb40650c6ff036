// verify.h -- the operators that a job's model runs, a file a family; each tells what it found of every pass.
#pragma once
#include "app/verify/op_case.h"

namespace moetrain::app {

void verify_linear(const Verification&);
void verify_norms(const Verification&);
void verify_attn_res(const Verification&);
void verify_elementwise(const Verification&);
void verify_kda(const Verification&);
void verify_attention(const Verification&);
void verify_sparse_attention(const Verification&);
void verify_indexer(const Verification&);
void verify_router(const Verification&);
void verify_capacity(const Verification&);
void verify_permute(const Verification&);
void verify_grouped_linear(const Verification&);
void verify_glu(const Verification&);
void verify_balance(const Verification&);
void verify_embedding(const Verification&);
void verify_cross_entropy(const Verification&);
void verify_optimizer(const Verification&);

void verify_all(const Verification&);  // those of the above that the model has

}  // namespace moetrain::app
