// check.cpp -- puts place, cause and numbers of a failure into one line.
#include "memory/check.h"

#include <string_view>

namespace moetrain {

void fail(At why, std::initializer_list<Named> values) {
  // The path as seen from the root of the repository: the last two parts.
  std::string_view file = why.where.file_name();
  if (const auto slash = file.rfind('/'); slash != file.npos && slash > 0)
    if (const auto room = file.rfind('/', slash - 1); room != file.npos) file.remove_prefix(room + 1);
  std::string text = std::string(file) + ":" + std::to_string(why.where.line()) + ": " + why.text;
  const char* open = " (";
  for (const Named& v : values) {
    text += open + std::string(v.name) + "=" + std::to_string(v.value);
    open = ", ";
  }
  if (values.size() != 0) text += ")";
  throw Error(text);
}

}  // namespace moetrain
