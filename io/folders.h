// folders.h -- folders: which files one holds, and whether one can be made.
#pragma once
#include <string>
#include <vector>

namespace moetrain::io {

// Files below a folder, at any depth, in the order of their paths; names that begin with a dot are left out. Symbolic links are
// followed, to files and to folders, but what is listed under its own name is not listed again, and what several links lead to only
// under the first one's. A link that leads nowhere is listed: whoever opens it says so.
std::vector<std::string> files_of_folder(const std::string& path);

void make_folder(const std::string& path);  // and those above it; it may be there

// Why nothing can be written in a folder that is there or is to be made; empty: it can.
std::string folder_fault(const std::string& path);

}  // namespace moetrain::io
