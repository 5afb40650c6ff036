# embed_presets.cmake -- writes OUTPUT, the C++ source of core/presets.h: of every FOLDER/models/*.yaml and FOLDER/machines/*.yaml the
# name without suffix -> text.
function(entries_of folder result)
  file(GLOB names ${folder}/*.yaml)
  list(TRANSFORM names REPLACE "^.*/(.*)\\.yaml$" "\\1")  # a name may hold a dot: kimi-k3.1
  list(SORT names)
  set(entries "")
  foreach(name IN LISTS names)
    file(READ "${folder}/${name}.yaml" text)
    string(FIND "${text}" ")yaml\"" closing)
    if(NOT closing EQUAL -1)
      message(FATAL_ERROR "${name}.yaml holds the mark that ends an embedded text")
    endif()
    string(APPEND entries "    {\"${name}\", R\"yaml(${text})yaml\"},\n")
  endforeach()
  set(${result} "${entries}" PARENT_SCOPE)
endfunction()
entries_of(${FOLDER}/models models)
entries_of(${FOLDER}/machines machines)
file(WRITE "${OUTPUT}"
"// presets.cpp -- the texts of configs/models and configs/machines; written by core/embed_presets.cmake.
#include \"core/presets.h\"

namespace moetrain::core {
namespace {

using Named = std::pair<std::string_view, std::string_view>;
constexpr Named kModels[] = {
${models}};
constexpr Named kMachines[] = {
${machines}};

}  // namespace

std::span<const Named> preset_texts() { return kModels; }
std::span<const Named> machine_texts() { return kMachines; }

}  // namespace moetrain::core
")
