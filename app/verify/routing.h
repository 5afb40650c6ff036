// routing.h -- experts that tokens could have been given: some get many, some few.
#pragma once
#include "app/verify/op_case.h"

namespace moetrain::app {

std::vector<std::int32_t> random_experts(OpCase& c, std::int64_t T, std::int64_t E,
                                         std::int64_t K);  // (T, K), K different ones each

}  // namespace moetrain::app
