// temp_folder.h -- a folder of one test, gone with it, and the message of the Error that something throws.
#pragma once
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "memory/check.h"

namespace moetrain::test {

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "moetrain_test_XXXXXX").string();
    check(::mkdtemp(pattern.data()) != nullptr, "test: no temporary folder can be made");
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::string file(const std::string& name, const std::string& contents) const {  // written; its path
    const std::string at = *this / name;
    std::filesystem::create_directories(std::filesystem::path(at).parent_path());
    std::ofstream(at, std::ios::binary) << contents;
    return at;
  }

 private:
  std::string path_;
};

// What the Error says, prefixed with its exit code: "2: ..."; "nothing was thrown" else.
template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return std::to_string(int(error.code())) + ": " + error.what();
  }
  return "nothing was thrown";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace moetrain::test
