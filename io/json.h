// json.h -- the JSON library under the room's own names.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <vector>

#include "memory/check.h"

namespace moetrain::io {

using Json = nlohmann::ordered_json;  // objects keep the order in which they were filled
using KeyedJson = nlohmann::json;     // objects find a key among hundreds of thousands; their order is that of the names

// JSON in which no object has a key twice: a reader of the format may take either.
template <class AnyJson>
AnyJson parse_json(const std::string& text) {
  std::vector<std::unordered_set<std::string>> keys;  // of the objects that are open
  return AnyJson::parse(text, [&](int, typename AnyJson::parse_event_t event, AnyJson& value) {
    using Event = typename AnyJson::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.template get<std::string>()).second)
      throw Error("the key '" + value.template get<std::string>() + "' stands there twice");
    return true;
  });
}

}  // namespace moetrain::io
