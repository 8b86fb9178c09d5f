#pragma once
// Plain forms of proto/tokenizer.capnp, which documents every field.

#include <cstdint>
#include <string>
#include <vector>

namespace k3::msg {

struct Encode {
    std::string text;
    bool recognise_specials = false;
    bool keep_invalid_bytes = false;
};

struct Encoded {
    std::vector<std::uint32_t> ids;
};

struct RenderChat {
    std::string json;
};

struct RenderedChat {
    std::vector<std::uint32_t> ids;
    std::string channel;
};

struct Decode {
    std::vector<std::uint32_t> ids;
    std::string pending;
    bool final = false;
    bool skip_specials = false;
};

struct Decoded {
    std::string text;
    std::string pending;
};

}  // namespace k3::msg
