// json.h -- the JSON library under the room's own name; objects keep the order in which they were filled.
#pragma once
#include <nlohmann/json.hpp>

namespace moetrain::io {

using Json = nlohmann::ordered_json;

}  // namespace moetrain::io
