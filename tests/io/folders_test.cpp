// folders_test.cpp -- is every file of a folder listed once, whatever links lead where, and is a folder that cannot be made told
// before?
#include "io/folders.h"

#include <filesystem>

#include "io/pattern.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
namespace fs = std::filesystem;
using Names = std::vector<std::string>;

namespace {

Names below(const test::TempFolder& folder, const std::string& name) {
  Names names;
  for (const auto& file : io::files_of_folder(folder / name)) names.push_back(file.substr((folder / name).size() + 1));
  return names;
}

}  // namespace

TEST_CASE("a folder is listed in the order of paths, and what a link leads to inside it only once", "[io][cpu]") {
  const test::TempFolder folder;
  for (const char* name : {"b.txt", "a/z.txt", "a/b.txt", "B.txt", ".hidden", ".git/x"}) folder.file(std::string("f/") + name, "1");
  fs::create_symlink(folder / "f/b.txt", folder / "f/a.txt");
  fs::create_directory_symlink(folder / "f", folder / "f/loop");
  fs::create_directory_symlink(folder / "f/a", folder / "f/0");
  CHECK(below(folder, "f") == Names{"B.txt", "a/b.txt", "a/z.txt", "b.txt"});
  fs::create_directory_symlink(folder / "f", folder / "given");
  CHECK(below(folder, "given") == Names{"B.txt", "a/b.txt", "a/z.txt", "b.txt"});
}

TEST_CASE("links of a folder that lead out of it are followed, each target once, and a dead one is listed", "[io][cpu]") {
  const test::TempFolder folder;
  // As the cache of the Hugging Face hub lies: names that are links into a store.
  for (const char* name : {"blobs/1", "blobs/2", "other/deep/3", "f/plain"}) folder.file(name, "1");
  fs::create_symlink("../blobs/1", folder / "f/train.h5");
  fs::create_symlink("../blobs/1", folder / "f/again.h5");
  fs::create_symlink("../blobs/absent", folder / "f/lost.h5");
  fs::create_directory_symlink(folder / "other", folder / "f/more");
  fs::create_directory_symlink(folder / "f", folder / "other/back");
  CHECK(below(folder, "f") == Names{"again.h5", "lost.h5", "more/deep/3", "plain"});
}

TEST_CASE("a folder that cannot be made says what stands in its way", "[io][cpu]") {
  const test::TempFolder folder;
  const auto file = folder.file("file", "1");
  fs::create_symlink(folder / "absent", folder / "dead");
  CHECK(io::folder_fault(folder.path()).empty());
  CHECK(io::folder_fault(folder / "a/b/c").empty());
  CHECK(io::folder_fault("not/there").empty());
  CHECK(io::folder_fault(file) == file + " is no folder");
  CHECK(io::folder_fault(file + "/a/b") == file + " is no folder");
  CHECK(io::folder_fault(folder / "dead/a") == folder / "dead" + " is a link that leads nowhere");
  CHECK(test::contains(io::folder_fault(folder / std::string(300, 'x')), ": File name too long"));
}

TEST_CASE("a pattern knows * and ?, and every other character stands for itself", "[io][cpu]") {
  for (const auto& [pattern, name] : std::vector<std::pair<std::string, std::string>>{{"", ""},
                                                                                      {"*", ""},
                                                                                      {"*", "a.b"},
                                                                                      {"a?c", "abc"},
                                                                                      {"*.w1", "x.w1"},
                                                                                      {"a*b*c", "a1b2b3c"},
                                                                                      {"[ab]", "[ab]"},
                                                                                      {"part[1*", "part[12].txt"},
                                                                                      {"a\\b", "a\\b"},
                                                                                      {"*a", "*ba"}})
    CHECK(io::matches(pattern, name));
  for (const auto& [pattern, name] : std::vector<std::pair<std::string, std::string>>{
           {"", "a"}, {"?", ""}, {"a", "ab"}, {"[ab]", "a"}, {"a*b", "a1c"}, {"A", "a"}, {"\\*", "*"}})
    CHECK_FALSE(io::matches(pattern, name));
}
