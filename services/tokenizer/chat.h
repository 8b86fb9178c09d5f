#pragma once
// Conversations to ids: the chat format of Kimi K3 (spec section 4.4).
//
// A prompt is a sequence of pieces. Control tokens are ids that only this file puts there; every
// other piece is encoded on its own as ordinary text, so nothing a user, a tool or the model wrote
// can forge structure.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "services/tokenizer/chat_request.h"
#include "services/tokenizer/encoder.h"

namespace k3::tokenizer {

enum class Control : std::uint8_t { open, close, sep, end_of_msg };
inline constexpr std::size_t kControlCount = 4;

/// "<|open|>", ...: as the vocabulary spells it.
std::string_view to_string(Control control) noexcept;

struct Piece {
    std::optional<Control> control;
    std::string text;  // not empty if this is no control token
};

struct ChatPrompt {
    std::vector<Piece> pieces;
    std::string channel;  // that the end of the prompt opens: "think", "response", or "" for none
};

/// No context is longer: 2^20 positions, and a piece takes at least one.
inline constexpr std::size_t kMaxPromptPieces = std::size_t{1} << 20U;

/// Errors: invalid_argument (a tool result that answers no call), resource_exhausted (too long).
Result<ChatPrompt> render_chat(const ChatRequest& request);

/// Immutable: any number of threads may use it. Borrows vocabulary and encoder.
class ChatEncoder {
  public:
    /// Errors: incompatible if the vocabulary lacks one of the control tokens.
    static Result<ChatEncoder> create(const Vocabulary& vocabulary, const Encoder& encoder);

    /// Error: resource_exhausted (more than kMaxEncodeBytes of text).
    Result<std::vector<std::uint32_t>> encode(std::span<const Piece> pieces) const;

    std::uint32_t id_of(Control control) const noexcept {
        return ids_[static_cast<std::size_t>(control)];
    }

  private:
    ChatEncoder(const Vocabulary& vocabulary, const Encoder& encoder)
        : vocabulary_(&vocabulary), encoder_(&encoder) {}

    const Vocabulary* vocabulary_;  // never null
    const Encoder* encoder_;        // never null
    std::uint32_t ids_[kControlCount] = {};
};

}  // namespace k3::tokenizer
