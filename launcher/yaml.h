#pragma once
// JSON values written as YAML: blocks and lists, and every text in quotes, so that none of YAML's
// guesses ("no", "1e3", "0644") can apply.

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace k3::launcher {

/// A document that ends in a newline. A text of several lines becomes a literal block if that
/// gives the very same text back.
std::string to_yaml(const nlohmann::ordered_json& value);

}  // namespace k3::launcher
