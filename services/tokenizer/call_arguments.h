#pragma once
// The arguments of a tool call, as the chat format shows them to the model (spec section 4.4).
//
// Clients send them as a JSON object or, as the usual APIs do, as a string that holds one. The
// string was written by the model itself, so what it said must come back byte for byte: numbers,
// nested objects and arrays keep their spelling, repeated keys are all kept. No JSON library does
// that, hence the scanner here, which looks one level deep and only validates what lies deeper.

#include <string>
#include <string_view>
#include <vector>

#include "services/tokenizer/json.h"

namespace k3::tokenizer {

struct CallArgument {
    std::string key;
    std::string_view type;  // string, number, boolean, null, object or array
    std::string text;       // of a string its characters, of anything else its JSON
};

struct CallArguments {
    std::vector<CallArgument> members;
    std::string
        raw;  // a string that is not a JSON object, as it is; empty: there are members or none
};

/// Of an object value: nested values are printed with ", " and ": ".
CallArguments arguments_of_object(const Json& object);

/// Of a string, well-formed UTF-8. What follows the closing brace is ignored; a \u escape that is
/// half of a surrogate pair becomes U+FFFD. Never fails: anything else is `raw`.
CallArguments arguments_of_string(std::string_view text);

}  // namespace k3::tokenizer
