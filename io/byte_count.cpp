// byte_count.cpp -- a number and its unit.
#include "io/byte_count.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

namespace moetrain::io {
namespace {

constexpr const char* kUnits = "BKMGTP";

}  // namespace

std::optional<ByteCount> parse_byte_count(const std::string& text) {
  double n = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, n);
  std::string unit(stop, end);
  unit.erase(0, unit.find_first_not_of(' '));
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return char(std::toupper(c)); });
  const auto power = unit.empty() ? 0 : std::string(kUnits).find(unit[0]);
  const std::string rest = unit.empty() ? "B" : unit[0] == 'B' ? unit : unit.substr(1);
  const bool known = power != std::string::npos && (rest.empty() || rest == "B" || (rest == "IB" && power > 0));
  const double bytes = n * std::pow(rest == "IB" ? 1024 : 1000, double(power));
  if (error != std::errc() || !known || !(bytes >= 0 && bytes < 0x1p63)) return {};
  return ByteCount{std::int64_t(bytes)};
}

std::string text_of(ByteCount size) {
  for (int power = 5; power > 0 && size.bytes > 0; --power)
    for (const std::int64_t base : {1024, 1000}) {
      std::int64_t unit = 1;
      for (int i = 0; i < power; ++i) unit *= base;
      if (size.bytes % unit == 0) return std::to_string(size.bytes / unit) + kUnits[power] + (base == 1024 ? "iB" : "B");
    }
  return std::to_string(size.bytes);
}

}  // namespace moetrain::io
