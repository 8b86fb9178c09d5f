#pragma once
// Plain forms of proto/control.capnp, which documents every field.

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/transport/messages/types.h"

namespace k3::msg {

enum class ServiceKind : std::uint16_t { unknown, gateway, tokenizer, trunk, experts, sampler };
enum class State : std::uint16_t { loading, ready, stopping, failed };

std::string_view to_string(ServiceKind kind) noexcept;
std::string_view to_string(State state) noexcept;

struct Hello {
    std::vector<SegmentProbe> probes;
    std::uint64_t lane_key = 0;
    bool operator==(const Hello&) const = default;
};

struct TrunkFacts {
    std::uint32_t first_layer = 0;
    std::uint32_t n_layers = 0;  // of this stage
    std::uint32_t total_layers = 0;
    std::uint32_t hidden_size = 0;
    std::uint32_t vocab_size = 0;
    std::uint64_t max_positions = 0;
    std::uint32_t max_step_rows = 0;
    std::uint32_t max_sessions = 0;
    std::uint32_t in_vectors = 0;   // 0: tokens come in
    std::uint32_t out_vectors = 0;  // 0: logits go out
    bool mla_bf16 = false;
    bool operator==(const TrunkFacts&) const = default;
};

struct ExpertHolding {
    std::uint32_t layer = 0;
    std::vector<std::uint8_t> experts;  // bit e % 8 of byte e / 8
    bool holds(std::uint32_t expert) const noexcept {
        return expert / 8 < experts.size() && ((experts[expert / 8] >> (expert % 8)) & 1U) != 0;
    }
    bool operator==(const ExpertHolding&) const = default;
};

inline constexpr std::uint32_t kMaxExpertWeight = 1'000'000;

struct ExpertFacts {
    std::uint32_t n_experts = 0;
    std::uint32_t latent_size = 0;
    std::vector<ExpertHolding> holdings;
    std::uint32_t max_call_rows = 0;
    std::uint32_t weight = 1;  // 1 to kMaxExpertWeight
    bool operator==(const ExpertFacts&) const = default;
};

struct TokenizerFacts {
    std::uint32_t vocab_size = 0;
    std::uint32_t n_ranks = 0;
    std::vector<std::uint32_t> stop_ids;
    bool operator==(const TokenizerFacts&) const = default;
};

struct SamplerFacts {
    std::uint32_t max_rows = 0;
    bool operator==(const SamplerFacts&) const = default;
};

struct GatewayFacts {
    std::string model_name;
    std::uint64_t max_positions = 0;
    std::uint32_t vocab_size = 0;
    std::uint32_t max_requests = 0;
    bool mla_bf16 = false;
    bool operator==(const GatewayFacts&) const = default;
};

struct LaneOffer {
    std::uint32_t pid = 0;
    std::uint32_t fd = 0;
    std::uint64_t nonce = 0;
    std::uint32_t index = 0;
    std::uint64_t token = 0;
    std::uint32_t compute_threads = 0;
    std::string cores;
    bool operator==(const LaneOffer&) const = default;
};

struct Announcement {
    ServiceKind kind = ServiceKind::unknown;
    std::string name;
    std::string version;
    std::uint64_t instance = 0;
    State state = State::loading;
    std::string fingerprint;
    SegmentProbe arena;
    std::vector<bool> probes;
    std::variant<std::monostate, GatewayFacts, TokenizerFacts, TrunkFacts, ExpertFacts,
                 SamplerFacts>
        facts;
    LaneOffer lane;
    std::string build;
    bool operator==(const Announcement&) const = default;
};

struct Ping {
    bool operator==(const Ping&) const = default;
};

struct Pong {
    std::uint64_t instance = 0;
    State state = State::loading;
    std::uint32_t progress_permille = 0;
    std::string detail = {};
    std::uint64_t work = 0;
    bool waits_for_reads = false;
    std::string waiting_for = {};
    bool operator==(const Pong&) const = default;
};

struct Counter {
    std::string name;
    std::uint64_t value = 0;
    bool operator==(const Counter&) const = default;
};

struct GetStatistics {
    bool operator==(const GetStatistics&) const = default;
};

struct Statistics {
    std::uint64_t uptime_ms = 0;
    std::uint64_t resident_bytes = 0;
    std::uint32_t queued = 0;
    std::vector<Counter> counters;
    bool operator==(const Statistics&) const = default;
};

struct Shutdown {
    bool operator==(const Shutdown&) const = default;
};
struct Done {
    bool operator==(const Done&) const = default;
};

}  // namespace k3::msg
