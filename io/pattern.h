// pattern.h -- the patterns of a job, for names of files and of parameters alike.
#pragma once
#include <string_view>

namespace moetrain::io {

// * is any run of characters, ? any one character (a byte); everything else, [ too, stands for itself. The whole name must match.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace moetrain::io
