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
    bool operator==(const Encode&) const = default;
};

struct Encoded {
    std::vector<std::uint32_t> ids;
    bool operator==(const Encoded&) const = default;
};

struct RenderChat {
    std::string json;
    bool operator==(const RenderChat&) const = default;
};

struct RenderedChat {
    std::vector<std::uint32_t> ids;
    std::string channel;
    bool operator==(const RenderedChat&) const = default;
};

struct Decode {
    std::vector<std::uint32_t> ids;
    std::string pending;
    bool final = false;
    bool skip_specials = false;
    bool operator==(const Decode&) const = default;
};

struct Decoded {
    std::string text;
    std::string pending;
    bool operator==(const Decoded&) const = default;
};

}  // namespace k3::msg
