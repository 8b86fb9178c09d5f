#include "services/tokenizer/decoder.h"

#include <fmt/format.h>

#include "services/tokenizer/utf8.h"

namespace k3::tokenizer {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

Error too_long() {
    return {ErrorCode::resource_exhausted,
            fmt::format("the ids stand for more than {} bytes of text, the most that is decoded "
                        "in one call",
                        kMaxDecodeBytes),
            "decode the ids in several calls"};
}

DecodedText make_well_formed(std::string_view bytes, bool final) {
    DecodedText out;
    out.text.reserve(bytes.size());
    for (std::size_t at = 0; at < bytes.size();) {
        Utf8Step step = utf8_step(bytes, at);
        std::string_view part = bytes.substr(at, step.bytes);
        at += step.bytes;
        if (step.kind == Utf8Step::Kind::character) {
            out.text += part;
        } else if (step.kind == Utf8Step::Kind::ill_formed || final) {
            out.text += kReplacement;
        } else {
            out.pending = part;
        }
    }
    return out;
}

}  // namespace

Result<std::string> Decoder::bytes_of(std::span<const std::uint32_t> ids,
                                      bool skip_specials) const {
    std::string bytes;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] >= vocabulary_.size())
            return Error{ErrorCode::invalid_argument,
                         fmt::format("id {} at position {} is outside the vocabulary of {} ids (0 "
                                     "to {})",
                                     ids[i], i, vocabulary_.size(), vocabulary_.size() - 1),
                         "send ids of this model's vocabulary"};
        if (skip_specials && vocabulary_.is_marked_special(ids[i])) continue;
        bytes += vocabulary_.token(ids[i]);
        if (bytes.size() > kMaxDecodeBytes) return too_long();
    }
    return bytes;
}

Result<DecodedText> Decoder::decode(std::string_view pending, std::span<const std::uint32_t> ids,
                                    const DecodeOptions& options) const {
    if (pending.size() > 3)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("pending has {} bytes, but at most 3 are ever held back", pending.size()),
            "hand back what the previous call of this stream returned"};
    ASSIGN_OR_RETURN(std::string bytes, bytes_of(ids, options.skip_specials));
    bytes.insert(0, pending);
    DecodedText decoded = make_well_formed(bytes, options.final);
    if (decoded.text.size() > kMaxDecodeBytes) return too_long();
    return decoded;
}

}  // namespace k3::tokenizer
