// byte_count.h -- sizes as people write them: 8GiB, 141GB, 4096.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace moetrain::io {

struct ByteCount {
  std::int64_t bytes = 0;
  bool operator==(const ByteCount&) const = default;
};

// GB is 1000^3, GiB 1024^3, a bare number bytes; case and a space before the unit do not matter. Nothing: not a size.
std::optional<ByteCount> parse_byte_count(const std::string& text);
// The shortest that parses to the same: 32MiB, 141GB, 4097.
std::string text_of(ByteCount size);

}  // namespace moetrain::io
