#include "common/experts/trace_replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace k3::experts {

namespace {

std::optional<std::uint32_t> take_digits(std::string_view& line) {
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    if (error != std::errc()) return std::nullopt;
    line.remove_prefix(static_cast<std::size_t>(end - line.data()));
    return value;
}

/// Takes the end of a cell; false if there is more in it.
bool take_separator(std::string_view& line) {
    if (line.empty()) return true;
    if (line.front() != ',' && line.front() != '\r') return false;
    line.remove_prefix(1);
    return true;
}

/// Takes the next cell of a line; nothing if it is no number.
std::optional<std::uint32_t> take_number(std::string_view& line) {
    const std::optional<std::uint32_t> value = take_digits(line);
    return value && take_separator(line) ? value : std::nullopt;
}

/// "12", whose rank is its place in the line, or "12:3".
std::optional<ExpertUse> take_use(std::string_view& line, std::size_t place) {
    const std::optional<std::uint32_t> expert = take_digits(line);
    std::optional<std::uint32_t> rank = static_cast<std::uint32_t>(place);
    if (line.starts_with(':')) {
        line.remove_prefix(1);
        rank = take_digits(line);
    }
    if (!expert || !rank || !take_separator(line)) return std::nullopt;
    return ExpertUse{*expert, *rank};
}

std::optional<RoutingTrace::Visit> parse_visit(std::string_view line) {
    const std::optional<std::uint32_t> position = take_number(line);
    const std::optional<std::uint32_t> layer = take_number(line);
    if (!position || !layer) return std::nullopt;
    RoutingTrace::Visit visit{*position, *layer, {}};
    while (!line.empty()) {
        const std::optional<ExpertUse> use = take_use(line, visit.uses.size());
        if (!use) return std::nullopt;
        visit.uses.push_back(*use);
    }
    return visit;
}

}  // namespace

std::size_t RoutingTrace::n_requests() const noexcept {
    std::size_t n = 0;
    for (const Visit& visit : visits) n += visit.uses.size();
    return n;
}

std::uint32_t RoutingTrace::n_positions() const noexcept {
    std::set<std::uint32_t> positions;
    for (const Visit& visit : visits) positions.insert(visit.position);
    return static_cast<std::uint32_t>(positions.size());
}

EvictionPolicy::Shape RoutingTrace::shape(std::size_t capacity) const noexcept {
    EvictionPolicy::Shape shape{1, 1, capacity};
    for (const Visit& visit : visits) {
        shape.n_layers = std::max(shape.n_layers, visit.layer + 1);
        for (const ExpertUse& use : visit.uses)
            shape.n_experts = std::max(shape.n_experts, use.expert + 1);
    }
    return shape;
}

Result<RoutingTrace> read_trace(const std::filesystem::path& path) {
    std::ifstream file(path);
    if (!file)
        return Error{ErrorCode::not_found, fmt::format("cannot open {}", path.string()),
                     "give a CSV file of routing: position, layer, experts in order of rank"};
    RoutingTrace trace;
    std::string line;
    std::getline(file, line);  // names
    for (std::size_t number = 2; std::getline(file, line); ++number) {
        std::optional<RoutingTrace::Visit> visit = parse_visit(line);
        if (!visit || visit->layer >= 65536)
            return Error{ErrorCode::corrupt,
                         fmt::format("{} line {}: not position, layer and experts as numbers",
                                     path.string(), number),
                         "check how the file was written"};
        trace.visits.push_back(*std::move(visit));
    }
    if (file.bad())
        return Error{ErrorCode::io, fmt::format("cannot read {}", path.string()),
                     "check the disk it lies on"};
    if (trace.visits.empty())
        return Error{
            ErrorCode::corrupt,
            fmt::format("{} holds no routing: there is no line after its first", path.string()),
            "record one with trace of [experts], and ask for some tokens meanwhile"};
    return trace;
}

ReplayCounts replay(const RoutingTrace& trace, EvictionPolicy& policy) {
    ReplayCounts counts;
    std::vector<ExpertKey> missed;
    for (const RoutingTrace::Visit& visit : trace.visits) {
        policy.visit(visit.layer, visit.uses);
        missed.clear();
        for (const ExpertUse& use : visit.uses) {
            const ExpertKey key{visit.layer, use.expert};
            if (policy.keeps(key))
                ++counts.hits;
            else
                missed.push_back(key);
        }
        for (ExpertKey key : missed) {
            const EvictionPolicy::Admission admission = policy.admit(key);
            if (!admission.admitted) ++counts.refused;
            if (admission.evicts) ++counts.evictions;
        }
    }
    return counts;
}

std::size_t best_possible_hits(const RoutingTrace& trace, std::size_t capacity) {
    constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
    std::vector<std::uint64_t> requests;
    for (const RoutingTrace::Visit& visit : trace.visits)
        for (const ExpertUse& use : visit.uses)
            requests.push_back((std::uint64_t{visit.layer} << 32U) | use.expert);
    std::vector<std::size_t> next_use(requests.size(), kNever);
    std::unordered_map<std::uint64_t, std::size_t> seen;
    for (std::size_t i = requests.size(); i-- > 0;) {
        const auto [at, is_new] = seen.try_emplace(requests[i], i);
        if (!is_new) next_use[i] = std::exchange(at->second, i);
    }

    std::size_t hits = 0;
    std::set<std::pair<std::size_t, std::uint64_t>> kept;  // by next use
    std::size_t first = 0;
    for (const RoutingTrace::Visit& visit : trace.visits) {
        // All uses of a visit are looked up before any of its experts takes a place.
        const std::size_t end = first + visit.uses.size();
        for (std::size_t i = first; i < end; ++i) hits += kept.erase({i, requests[i]});
        for (std::size_t i = first; i < end; ++i)
            if (next_use[i] != kNever) kept.insert({next_use[i], requests[i]});
        while (kept.size() > capacity) kept.erase(std::prev(kept.end()));
        first = end;
    }
    return hits;
}

}  // namespace k3::experts
