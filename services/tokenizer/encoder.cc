#include "services/tokenizer/encoder.h"

#include <fmt/format.h>

#include <optional>

#include "services/tokenizer/utf8.h"

namespace k3::tokenizer {

Encoder::Encoder(const Vocabulary& vocabulary) : vocabulary_(vocabulary), specials_(vocabulary) {}

Result<std::vector<std::uint32_t>> Encoder::encode(std::string_view text,
                                                   const EncodeOptions& options) const {
    if (text.size() > kMaxEncodeBytes)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("the text has {} bytes; at most {} are encoded in one call",
                                 text.size(), kMaxEncodeBytes),
                     "send less text"};
    BytePairMerger merger(vocabulary_);
    std::vector<std::uint32_t> ids;
    std::optional<std::size_t> bad = first_invalid_utf8(text);
    if (bad && !options.keep_invalid_bytes)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("the text is not UTF-8: byte 0x{:02X} at offset {} of {} begins no "
                        "whole character",
                        static_cast<std::uint8_t>(text[*bad]), *bad, text.size()),
            "send UTF-8, or ask for invalid bytes to be kept"};
    if (bad) {
        append_broken(text, *bad, merger, ids);
    } else if (options.recognise_specials) {
        append_with_specials(text, merger, ids);
    } else {
        append(text, merger, ids);
    }
    return ids;
}

void Encoder::append(std::string_view text, BytePairMerger& merger,
                     std::vector<std::uint32_t>& ids) const {
    std::vector<std::string_view> pieces;
    for (std::string_view stretch : cut_long_text(text)) {
        pieces.clear();
        pretokenizer_.split(stretch, pieces);
        for (std::string_view piece : pieces) merger.encode(piece, ids);
    }
}

/// Special tokens are looked for inside a stretch, so one that lies across a cut of a long text is
/// ordinary text, as in the released tokenizer.
void Encoder::append_with_specials(std::string_view text, BytePairMerger& merger,
                                   std::vector<std::uint32_t>& ids) const {
    std::vector<std::string_view> pieces;
    for (std::string_view stretch : cut_long_text(text)) {
        std::size_t at = 0;
        while (at < stretch.size()) {
            auto special = specials_.find(stretch, at);
            std::size_t end = special ? special->begin : stretch.size();
            pieces.clear();
            pretokenizer_.split(stretch.substr(at, end - at), pieces);
            for (std::string_view piece : pieces) merger.encode(piece, ids);
            if (!special) break;
            ids.push_back(special->id);
            at = special->begin + special->bytes;
        }
    }
}

void Encoder::append_broken(std::string_view text, std::size_t first_bad, BytePairMerger& merger,
                            std::vector<std::uint32_t>& ids) const {
    std::vector<std::string_view> pieces;
    for (std::string_view stretch : cut_long_text(text.substr(0, first_bad)))
        pretokenizer_.split(stretch, pieces);
    std::size_t last_begin = 0;
    if (!pieces.empty()) {
        last_begin = first_bad - pieces.back().size();
        pieces.pop_back();
    }
    for (std::string_view piece : pieces) merger.encode(piece, ids);
    merger.encode(text.substr(last_begin), ids);
}

}  // namespace k3::tokenizer
