// cache: hit rates of every cache policy on a recorded routing, with the best possible beside them.
//
//     build/bench/cache --trace tests/golden/routing-trace/decode_order.csv --cache-bytes 8GB
//
// No experts are read: the answer is how many reads a cache of that size would have saved.

#include <fmt/format.h>

#include <string>
#include <vector>

#include "bench/machine.h"
#include "bench/settings_main.h"
#include "common/base/deadline.h"
#include "common/base/settings.h"
#include "common/experts/trace_replay.h"

namespace {

using namespace k3;

struct BenchSettings {
    std::string trace = "tests/golden/routing-trace/decode_order.csv";
    std::vector<std::string> cache_bytes = {"4GB", "8GB", "16GB", "32GB", "64GB"};
    std::vector<std::string> slots;
    std::uint64_t expert_bytes = 17'547'264;  // of the released model
};

Result<Settings::Action> read_settings(int argc, const char* const* argv, BenchSettings& out) {
    Settings settings("cache", "Replays a recorded routing through the expert cache's policies.");
    settings.add_text("trace", &out.trace, "CSV file: position, layer, experts in order of rank");
    settings.add_list("cache_bytes", &out.cache_bytes, "memory for experts, may be repeated");
    settings.add_list("slots", &out.slots, "number of experts in memory, instead of bytes");
    settings.add_bytes("expert_bytes", &out.expert_bytes, "bytes of one expert");
    return settings.parse(argc, argv);
}

Result<std::vector<std::size_t>> capacities(const BenchSettings& settings) {
    std::vector<std::size_t> out;
    // A plain number parses as bytes, and is one.
    for (const std::string& text : settings.slots) {
        ASSIGN_OR_RETURN(const std::uint64_t n, parse_bytes(text));
        out.push_back(n);
    }
    if (!out.empty()) return out;
    for (const std::string& text : settings.cache_bytes) {
        ASSIGN_OR_RETURN(const std::uint64_t bytes, parse_bytes(text));
        out.push_back(bytes / settings.expert_bytes);
    }
    return out;
}

void print_line(const BenchSettings& settings, const experts::RoutingTrace& trace,
                const char* policy, std::size_t capacity, std::size_t hits, double ns) {
    const auto n_requests = static_cast<double>(trace.n_requests());
    const double reads = n_requests - static_cast<double>(hits);
    fmt::print("{},{},{:.1f},{},{},{:.2f},{:.2f},{:.0f}\n", policy, capacity,
               static_cast<double>(capacity * settings.expert_bytes) / 1e9, trace.n_requests(),
               hits, 100.0 * static_cast<double>(hits) / n_requests,
               reads * static_cast<double>(settings.expert_bytes) / 1e9 / trace.n_positions(),
               ns / n_requests);
}

Status run(const BenchSettings& settings) {
    ASSIGN_OR_RETURN(const std::vector<std::size_t> sizes, capacities(settings));
    ASSIGN_OR_RETURN(const experts::RoutingTrace trace, experts::read_trace(settings.trace));
    if (trace.visits.empty())
        return Error{ErrorCode::invalid_argument, settings.trace + " holds no visit", ""};
    fmt::print("# machine: {}\n", bench::cpu_model());
    fmt::print("# trace: {}: {} positions, {} visits, {} requests; cold start counted\n",
               settings.trace, trace.n_positions(), trace.visits.size(), trace.n_requests());
    fmt::print("# expert: {} bytes\n", settings.expert_bytes);
    fmt::print(
        "policy,experts,gb,requests,hits,hit_percent,read_gb_per_position,"
        "ns_per_request\n");
    for (const std::size_t capacity : sizes) {
        for (const char* name : {"lru", "rank-weighted"}) {
            ASSIGN_OR_RETURN(auto policy, experts::make_policy(name, trace.shape(capacity)));
            const Clock::time_point start = Clock::now();
            const experts::ReplayCounts counts = experts::replay(trace, *policy);
            const std::chrono::duration<double, std::nano> taken = Clock::now() - start;
            print_line(settings, trace, name, capacity, counts.hits, taken.count());
        }
        print_line(settings, trace, "best-possible", capacity,
                   experts::best_possible_hits(trace, capacity), 0);
    }
    return Status::ok();
}

}  // namespace

int main(int argc, char** argv) {
    return bench::settings_main<BenchSettings>(argc, argv, read_settings, run);
}
