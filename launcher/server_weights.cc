#include "launcher/server_weights.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/base/settings.h"

namespace k3::launcher {

namespace {

constexpr std::uint64_t kWeightBytes = std::uint64_t{64} << 20U;  // of memory: a weight of 1

bool has_value(const ServiceSetting* setting) {
    return setting != nullptr && !setting->values.empty();
}

}  // namespace

Result<std::vector<std::uint32_t>> server_weights(const PipelineSpec& spec) {
    const std::vector<const StageSpec*> servers = spec.of_kind(msg::ServiceKind::experts);
    const auto n_weighted =
        std::count_if(servers.begin(), servers.end(), [](auto* s) { return s->weight > 0; });
    const bool all_have_memory = std::all_of(
        servers.begin(), servers.end(), [](auto* s) { return has_value(s->find("cache_bytes")); });
    std::vector<std::uint32_t> weights;
    for (const StageSpec* server : servers) {
        if (n_weighted > 0 && server->weight == 0)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{}:{}: '{}' has no weight, and {} of the {} expert servers "
                                     "have one",
                                     spec.file.string(), server->line, server->name, n_weighted,
                                     servers.size()),
                         "give a weight to every server, or to none"};
        std::uint64_t weight = n_weighted > 0 ? static_cast<std::uint64_t>(server->weight) : 1;
        if (n_weighted == 0 && all_have_memory) {
            auto bytes = parse_bytes(server->find("cache_bytes")->values.back());
            if (!bytes.has_value())
                return std::move(bytes).error().with_context(
                    fmt::format("{}:{}", spec.file.string(), server->line));
            weight = std::clamp<std::uint64_t>(*bytes / kWeightBytes, 1, msg::kMaxExpertWeight);
        }
        weights.push_back(static_cast<std::uint32_t>(weight));
    }
    return weights;
}

}  // namespace k3::launcher
