#pragma once
// Plain forms of proto/gateway.capnp, which documents every field.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/transport/messages/sampler.h"
#include "common/transport/messages/types.h"

namespace k3::msg {

enum class WantLogits : std::uint16_t { none, generated, all };
enum class FinishReason : std::uint16_t {
    stop_id,
    stop_string,
    max_tokens,
    context_full,
    cancelled
};

std::string_view to_string(FinishReason reason) noexcept;

struct TextInput {
    std::string text;
    bool operator==(const TextInput&) const = default;
};
struct IdsInput {
    std::vector<std::uint32_t> ids;
    bool operator==(const IdsInput&) const = default;
};
struct ChatInput {
    std::string json;
    bool operator==(const ChatInput&) const = default;
};

struct Submit {
    std::variant<TextInput, IdsInput, ChatInput> input;
    bool recognise_specials = false;
    SamplingParams params;
    std::uint32_t max_tokens = 0;
    std::vector<std::string> stop_strings;
    std::vector<std::uint32_t> stop_ids;
    bool ignore_eos = false;
    std::uint32_t n_logprobs = 0;
    WantLogits want_logits = WantLogits::none;
    bool skip_specials = false;
    std::string load_session;  // empty: begins with nothing
    std::string save_session;  // empty: is not saved
    bool operator==(const Submit&) const = default;
};

struct Accepted {
    std::uint64_t request = 0;
    std::vector<std::uint32_t> prompt_ids;
    bool operator==(const Accepted&) const = default;
};

struct PrefillProgress {
    std::uint32_t prompt_done = 0;
    std::uint32_t prompt_total = 0;
    bool operator==(const PrefillProgress&) const = default;
};

struct TokenEvent {
    std::vector<std::uint32_t> ids;
    std::string text;
    std::vector<SampledRow> logprobs;
    Tensor logits;
    bool operator==(const TokenEvent&) const = default;
};

struct Finished {
    FinishReason reason = FinishReason::stop_id;
    std::uint32_t n_prompt = 0;
    std::uint32_t n_generated = 0;
    std::uint32_t stop_id = 0;
    std::string stop_string;
    std::uint64_t prefill_ns = 0;
    std::uint64_t decode_ns = 0;
    bool operator==(const Finished&) const = default;
};

struct SessionLoaded {
    std::uint32_t n_ids = 0;
    std::uint32_t n_agreed = 0;
    std::uint32_t n_reused = 0;
    bool operator==(const SessionLoaded&) const = default;
};

struct SessionSaved {
    std::uint32_t n_ids = 0;
    std::uint64_t bytes = 0;
    std::optional<Failure> failure;  // why it is not saved
    bool operator==(const SessionSaved&) const = default;
};

struct Cancel {
    std::uint64_t request = 0;
    bool operator==(const Cancel&) const = default;
};

}  // namespace k3::msg
