// json.h -- the JSON library under the room's own names.
#pragma once
#include <nlohmann/json.hpp>

namespace moetrain::io {

using Json = nlohmann::ordered_json;  // objects keep the order in which they were filled
using KeyedJson = nlohmann::json;     // objects find a key among hundreds of thousands; their order is that of the names

}  // namespace moetrain::io
