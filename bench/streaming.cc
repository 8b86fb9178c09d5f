#include "bench/streaming.h"

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/base/settings.h"
#include "common/storage/direct_file.h"
#include "common/storage/read_probe.h"

namespace k3::bench {

namespace {

namespace fs = std::filesystem;

constexpr double kMeasureSeconds = 2.0;
constexpr double kGiB = 1024.0 * 1024 * 1024;

std::uint64_t counted(const Counts& counts, const std::string& name) {
    const auto at = counts.find(name);
    return at == counts.end() ? 0 : at->second;
}

std::uint64_t count_of(const Counts& counts, const std::string& name) {
    return counted(counts, "trunk." + name);
}

}  // namespace

storage::ReadShape read_shape(const Counts& counts) {
    return {count_of(counts, "trunk_read_request_bytes"),
            static_cast<std::uint32_t>(count_of(counts, "trunk_read_threads"))};
}

Result<double> DeviceRate::measure() {
    fs::path largest;
    std::uint64_t most = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator(model_)) {
        if (!entry.is_regular_file() || entry.file_size() <= most) continue;
        largest = entry.path();
        most = entry.file_size();
    }
    ASSIGN_OR_RETURN(const storage::DirectFile file, storage::DirectFile::open(largest));
    ASSIGN_OR_RETURN(
        const storage::ReadRate rate,
        storage::measure_reads(file, shape_, offset_, ~std::uint64_t{0}, kMeasureSeconds));
    offset_ += rate.bytes;
    return rate.bytes_per_s();
}

std::uint64_t peak_memory(const launcher::RunRecord& record) {
    std::vector<std::int64_t> pids = {record.pid};
    for (const launcher::StageRecord& stage : record.stages) pids.push_back(stage.pid);
    std::uint64_t kib = 0;
    for (const std::int64_t pid : pids) {
        std::ifstream status(fmt::format("/proc/{}/status", pid));
        std::string word;
        while (status >> word) {
            if (word != "VmHWM:") continue;
            std::uint64_t of_process = 0;
            status >> of_process;
            kib += of_process;
            break;
        }
    }
    return kib * 1024;
}

nlohmann::json report(const Streamed& streamed) {
    const auto n = static_cast<double>(streamed.n_tokens);
    const std::uint64_t used = count_of(streamed.spent, "trunk_read_bytes");
    const auto read = static_cast<double>(count_of(streamed.spent, "trunk_read_device_bytes"));
    const double wait_s = static_cast<double>(count_of(streamed.spent, "trunk_read_wait_ns")) / 1e9;
    const double busy_s = static_cast<double>(count_of(streamed.spent, "trunk_read_busy_ns")) / 1e9;
    const double cpu_s = static_cast<double>(count_of(streamed.spent, "trunk_read_cpu_ns")) / 1e9;
    double device = 0;
    for (const double rate : streamed.device_bytes_per_s) device += rate;
    device /= static_cast<double>(streamed.device_bytes_per_s.size());
    // On one box, experts are read from the same device meanwhile.
    const auto experts = static_cast<double>(counted(streamed.spent, "experts.expert_read_bytes"));
    const double rate = (read + experts) / streamed.wall_s;

    fmt::print("\nstreaming, {} tokens, {} requests of {} at a time:\n", streamed.n_tokens,
               streamed.shape.n_threads, format_bytes(streamed.shape.request_bytes));
    fmt::print("  weights read again for a token {:>24} bytes, the plan says {}: {}\n",
               used / streamed.n_tokens, streamed.token_bytes,
               used == streamed.n_tokens * streamed.token_bytes ? "equal" : "DIFFERENT");
    fmt::print("  whole blocks read during this {:>25.0f} bytes a token, and {:.0f} of experts\n",
               read / n, experts / n);
    fmt::print(
        "  read rate {:.2f} GB/s, the device alone {}: {:.2f} of it\n", rate / 1e9,
        [&] {
            std::string rates;
            for (const double each : streamed.device_bytes_per_s)
                rates += fmt::format("{}{:.2f}", rates.empty() ? "" : " and ", each / 1e9);
            return rates;
        }(),
        rate / device);
    fmt::print("  some read under way {:.1f} % of the time, the step waits for reads {:.1f} %\n",
               100 * busy_s / streamed.wall_s, 100 * wait_s / streamed.wall_s);
    fmt::print("  {:.3f} CPU seconds for each GiB read\n", read > 0 ? cpu_s / (read / kGiB) : 0.0);
    fmt::print("  peak memory of all processes {:.3f} GB\n",
               static_cast<double>(streamed.peak_bytes) / 1e9);
    return {{"token_bytes", used / streamed.n_tokens},
            {"planned_token_bytes", streamed.token_bytes},
            {"request_bytes", streamed.shape.request_bytes},
            {"requests", streamed.shape.n_threads},
            {"device_bytes", read},
            {"expert_bytes", experts},
            {"read_bytes_per_s", rate},
            {"device_bytes_per_s", streamed.device_bytes_per_s},
            {"of_device", rate / device},
            {"busy_s", busy_s},
            {"wait_s", wait_s},
            {"cpu_s_per_gib", read > 0 ? cpu_s / (read / kGiB) : 0.0},
            {"peak_bytes", streamed.peak_bytes}};
}

}  // namespace k3::bench
