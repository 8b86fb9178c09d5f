#include "launcher/plan_time.h"

#include <fmt/format.h>

#include <iterator>

#include "common/model/model_sizes.h"
#include "launcher/plan_model.h"

namespace k3::launcher {

namespace {

std::string rate_of(const Speed& speed) {
    if (speed.bytes_per_s <= 0) return speed.how;
    return fmt::format("{:.2f} GB/s ({})", speed.bytes_per_s / 1e9, speed.how);
}

void add_row(std::string& text, const char* what, std::uint64_t bytes, const Speed& speed) {
    fmt::format_to(std::back_inserter(text), "  {:<24}{:>19}", what, grouped(bytes));
    if (bytes == 0)
        text += "          -";
    else if (speed.bytes_per_s > 0)
        fmt::format_to(std::back_inserter(text), "{:>11.3f}",
                       static_cast<double>(bytes) / speed.bytes_per_s);
    else
        text += "          ?";
    fmt::format_to(std::back_inserter(text), "  {}\n", bytes == 0 ? "" : rate_of(speed));
}

}  // namespace

TokenReads token_reads(const model::ModelConfig& config, const PipelineMemory& memory) {
    const model::ModelSizes sizes = model::model_sizes(config);
    TokenReads reads;
    reads.touched_bytes = sizes.touched_bytes;
    reads.trunk_bytes = memory.trunk_token_bytes;
    if (memory.expert_slots < memory.experts_held) reads.expert_bytes = sizes.picked_bytes;
    return reads;
}

std::string time_table(const TokenReads& reads, const Speed& memory, const Speed& disk) {
    std::string text =
        fmt::format("{:<26}{:>19}{:>11}\n", "one token of one request", "bytes", "seconds");
    add_row(text, "from memory", reads.touched_bytes, memory);
    add_row(text, "trunk from disk", reads.trunk_bytes, disk);
    add_row(text, "experts from disk", reads.expert_bytes, disk);
    const std::uint64_t disk_bytes = reads.disk_bytes();
    const bool is_known = memory.bytes_per_s > 0 && (disk_bytes == 0 || disk.bytes_per_s > 0);
    if (is_known) {
        double seconds = static_cast<double>(reads.touched_bytes) / memory.bytes_per_s;
        if (disk_bytes > 0) seconds += static_cast<double>(disk_bytes) / disk.bytes_per_s;
        fmt::format_to(std::back_inserter(text), "  {:<24}{:>19}{:>11.3f}  {}\n",
                       "predicted, at most", "", seconds,
                       reads.expert_bytes == 0 ? "all experts stay in memory"
                                               : "without what the cache holds by then");
    } else {
        text += "  no prediction: give --memory-rate and --disk-rate in bytes per second\n";
    }
    return text;
}

}  // namespace k3::launcher
