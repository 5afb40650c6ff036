# embed_presets.cmake -- writes OUTPUT, the C++ source of core/presets.h, from every FOLDER/*.yaml: name without suffix -> text.
file(GLOB names ${FOLDER}/*.yaml)
list(TRANSFORM names REPLACE "^.*/(.*)\\.yaml$" "\\1")  # a name may hold a dot: kimi-k3.1
list(SORT names)
list(LENGTH names count)
set(entries "")
foreach(name IN LISTS names)
  file(READ "${FOLDER}/${name}.yaml" text)
  string(FIND "${text}" ")yaml\"" closing)
  if(NOT closing EQUAL -1)
    message(FATAL_ERROR "${name}.yaml holds the mark that ends a preset's text")
  endif()
  string(APPEND entries "    {\"${name}\", R\"yaml(${text})yaml\"},\n")
endforeach()
file(WRITE "${OUTPUT}"
"// presets.cpp -- the model presets of configs/models; written by core/embed_presets.cmake.
#include \"core/presets.h\"

#include <array>

namespace moetrain::core {
namespace {

using Preset = std::pair<std::string_view, std::string_view>;
constexpr std::array<Preset, ${count}> kPresets{{
${entries}}};

}  // namespace

std::span<const Preset> preset_texts() { return kPresets; }

}  // namespace moetrain::core
")
