#include "launcher/doctor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "common/base/memory.h"
#include "common/base/settings.h"
#include "common/kernels/isa.h"
#include "common/kernels/kernel_table.h"
#include "common/model/config.h"
#include "common/pack/holdings.h"
#include "common/storage/direct_file.h"
#include "common/storage/file.h"
#include "common/storage/safetensors.h"
#include "launcher/manifest.h"
#include "launcher/plan_model.h"
#include "launcher/speed.h"

namespace k3::launcher {

namespace fs = std::filesystem;

namespace {

constexpr double kExamineDiskSeconds = 2.0;
constexpr double kExamineMemorySeconds = 0.2;
constexpr std::size_t kExamineMemoryBytes = std::size_t{64} << 20U;  // of a thread
constexpr std::uint64_t kOtherFiles = 256;  // sockets, pipes, segments and libraries of a service
constexpr std::uint64_t kLittleShm = std::uint64_t{64} << 20U;
constexpr std::size_t kMostNamed = 20;

std::string first_line_after(const fs::path& path, std::string_view key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);)
        if (line.starts_with(key)) {
            const std::size_t colon = line.find(':');
            return colon == std::string::npos ? line
                                              : line.substr(std::min(colon + 2, line.size()));
        }
    return "unknown";
}

std::string limit_text(rlim_t limit) {
    return limit == RLIM_INFINITY ? "no limit" : grouped(limit);
}

Diagnosis examine_processor(const fs::path& root) {
    const MachineCores cores = machine_cores();
    const std::string where =
        fmt::format("{}; {} of {} cores may be used ({})",
                    first_line_after(root / "proc/cpuinfo", "model name"), cores.allowed.size(),
                    cores.n_cores, format_cores(cores.allowed));
    if (const Status status = kernels::check_isa(); !status.has_value())
        return {Grade::failure, "processor", fmt::format("{}; {}", where, status.error().message),
                status.error().remedy, status.error().code};
    const std::string isa = kernels::kernels().isa;
    if (isa == "scalar")
        return {Grade::advice, "processor", where + "; without AVX2, AVX-512 or NEON",
                "expect a tenth of the speed, or use another machine", ErrorCode::internal};
    return {Grade::fine, "processor", fmt::format("{}; kernels: {}", where, isa), "", {}};
}

Diagnosis examine_memory(const fs::path& root) {
    const auto available = available_memory(root);
    if (!available.has_value())
        return {Grade::failure, "memory", available.error().message, available.error().remedy,
                available.error().code};
    return {Grade::fine,
            "memory",
            fmt::format("{} bytes ({}) are free, limited by {}", grouped(available->bytes),
                        format_bytes(available->bytes), available->limited_by),
            "",
            {}};
}

Diagnosis examine_huge_pages(const fs::path& root) {
    std::ifstream file(root / "sys/kernel/mm/transparent_hugepage/enabled");
    std::string modes;
    std::getline(file, modes);
    const std::size_t begin = modes.find('[');
    const std::size_t end = modes.find(']');
    if (begin == std::string::npos || end == std::string::npos)
        return {Grade::advice,
                "huge pages",
                "this kernel has none",
                "reading weights will cost some 10 % more processor time",
                {}};
    const std::string mode = modes.substr(begin + 1, end - begin - 1);
    if (mode == "never")
        return {Grade::advice,
                "huge pages",
                "switched off",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
                {}};
    return {Grade::fine, "huge pages", mode, "", {}};
}

Diagnosis examine_locked_memory() {
    rlimit limit = {};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    return {Grade::fine,
            "locked memory",
            fmt::format("limit {}; no service locks memory", limit_text(limit.rlim_cur)),
            "",
            {}};
}

Diagnosis examine_shared_memory() {
    struct statvfs disk = {};
    if (::statvfs("/dev/shm", &disk) != 0)
        return {Grade::advice,
                "shared memory",
                "there is no /dev/shm",
                "set payload = \"inline\" in the pipeline file; it is slower",
                {}};
    const std::uint64_t free = std::uint64_t{disk.f_bavail} * disk.f_frsize;
    const std::string text = fmt::format("{} bytes are free in /dev/shm", grouped(free));
    if (free < kLittleShm)
        return {Grade::advice,
                "shared memory",
                text,
                "enlarge it (docker: --shm-size=256m); tensors that do not fit go through sockets",
                {}};
    return {Grade::fine, "shared memory", text, "", {}};
}

/// Number and total of "model-00003-of-000096.safetensors".
struct ShardName {
    std::uint32_t number = 0;
    std::uint32_t total = 0;
};
std::optional<ShardName> parse_shard_name(const std::string& file) {
    constexpr std::string_view kBegin = "model-";
    constexpr std::string_view kMiddle = "-of-";
    constexpr std::string_view kEnd = ".safetensors";
    if (!file.starts_with(kBegin) || !file.ends_with(kEnd)) return std::nullopt;
    const std::size_t middle = file.find(kMiddle);
    if (middle == std::string::npos) return std::nullopt;
    const auto number = [&](std::size_t first, std::size_t last) -> std::optional<std::uint32_t> {
        std::uint32_t value = 0;
        const char* end = file.data() + last;
        const auto [stop, problem] = std::from_chars(file.data() + first, end, value);
        if (problem != std::errc() || stop != end) return std::nullopt;
        return value;
    };
    const auto n = number(kBegin.size(), middle);
    const auto total = number(middle + kMiddle.size(), file.size() - kEnd.size());
    if (!n || !total) return std::nullopt;
    return ShardName{*n, *total};
}

/// Reads the header: a shard that ends early says so.
Status check_header(const fs::path& path) {
    ASSIGN_OR_RETURN(const storage::OpenFile file, storage::open_regular(path));
    storage::NamePool names;
    ASSIGN_OR_RETURN(const auto tensors,
                     storage::read_safetensors_header(file.fd.get(), file.bytes, path, names));
    static_cast<void>(tensors);
    return Status::ok();
}

}  // namespace

std::vector<Diagnosis> examine_machine(const fs::path& root) {
    return {examine_processor(root), examine_memory(root), examine_huge_pages(root),
            examine_locked_memory(), examine_shared_memory()};
}

std::vector<Diagnosis> examine_shards(const fs::path& directory) {
    if (const Status found = model::check_model_directory(directory); !found.has_value())
        return {{Grade::failure, "checkpoint", found.error().message, found.error().remedy,
                 found.error().code}};
    std::vector<Diagnosis> findings;
    std::map<std::uint32_t, std::set<std::uint32_t>> present;  // numbers by total
    std::error_code failure;
    std::vector<fs::path> files;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory, failure))
        if (const auto name = parse_shard_name(entry.path().filename().string())) {
            present[name->total].insert(name->number);
            files.push_back(entry.path());
        }
    if (files.empty())
        return {
            {Grade::failure, "checkpoint",
             fmt::format("{} holds no file model-NNNNN-of-NNNNNN.safetensors", directory.string()),
             "name the directory of the released files", ErrorCode::not_found}};
    for (const auto& [total, numbers] : present) {
        std::vector<std::uint32_t> absent;
        for (std::uint32_t n = 1; n <= total; ++n)
            if (!numbers.contains(n)) absent.push_back(n);
        if (absent.empty()) continue;
        const std::size_t n_absent = absent.size();
        absent.resize(std::min(n_absent, kMostNamed));
        findings.push_back(
            {Grade::failure, "checkpoint",
             fmt::format("{} of {} shards are missing: {}{}", n_absent, total,
                         fmt::join(absent, ", "), n_absent > kMostNamed ? ", ..." : ""),
             fmt::format("copy them into {}", directory.string()), ErrorCode::not_found});
    }
    std::sort(files.begin(), files.end());
    for (const fs::path& path : files)
        if (const Status status = check_header(path); !status.has_value())
            findings.push_back({Grade::failure, "checkpoint", status.error().message,
                                status.error().remedy, status.error().code});
    return findings;
}

Diagnosis examine_open_files(std::size_t n_shards) {
    rlimit limit = {};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    // Each shard twice: read through the page cache and past it.
    const std::uint64_t needed = 2 * n_shards + kOtherFiles;
    const std::string text = fmt::format("limit {}, a service needs up to {}",
                                         limit_text(limit.rlim_cur), grouped(needed));
    if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < needed)
        return {Grade::failure, "open files", text, fmt::format("ulimit -n {}", needed),
                ErrorCode::resource_exhausted};
    return {Grade::fine, "open files", text, "", {}};
}

Diagnosis examine_tokenizer(const fs::path& directory) {
    std::vector<std::string_view> absent;
    std::error_code ignored;
    for (const std::string_view file : {"config.json", "tiktoken.model", "tokenizer_config.json"})
        if (!fs::exists(directory / file, ignored)) absent.push_back(file);
    if (absent.empty())
        return {Grade::fine, "tokenizer", directory.string() + ": its files are there", "", {}};
    return {Grade::failure, "tokenizer",
            fmt::format("{} lacks {}", directory.string(), fmt::join(absent, ", ")),
            "copy them from the release: they are small", ErrorCode::not_found};
}

std::vector<Diagnosis> examine_packs(const Packs& packs) {
    std::vector<Diagnosis> findings;
    for (const auto& [path, pack] : packs)
        findings.push_back({Grade::fine,
                            "pack",
                            fmt::format("{}: {}, {} bytes", path.string(), pack::contents(*pack),
                                        grouped(pack->file_bytes())),
                            "",
                            {}});
    return findings;
}

std::vector<Diagnosis> examine_disk(const StageWeights& weights) {
    const std::size_t n_threads = machine_cores().allowed.size();
    const Speed memory =
        measure_memory(n_threads, n_threads * kExamineMemoryBytes, kExamineMemorySeconds);
    std::vector<Diagnosis> findings = {
        {Grade::fine,
         "memory speed",
         fmt::format("{:.2f} GB/s ({})", memory.bytes_per_s / 1e9, memory.how),
         "",
         {}}};
    const std::vector<fs::path> files = weights.files();
    const Speed disk = measure_disk(files, kExamineDiskSeconds);
    if (disk.bytes_per_s > 0)
        findings.push_back({Grade::fine,
                            "disk speed",
                            fmt::format("{:.2f} GB/s ({})", disk.bytes_per_s / 1e9, disk.how),
                            "",
                            {}});
    else
        findings.push_back({Grade::fine, "disk speed", disk.how, "", {}});
    const auto direct = storage::DirectFile::open(files.front());
    if (direct.has_value() && !direct->is_direct())
        findings.push_back({Grade::advice,
                            "disk reads",
                            "go through the page cache: " + direct->why_buffered(),
                            "a local disk with ext4 or xfs reads directly",
                            {}});
    if (!weights.packs.empty())
        findings.push_back({Grade::fine, "checksums", "of packs: compared on every read", "", {}});
    for (const fs::path& directory : weights.checkpoints) {
        if (fs::exists(directory / kManifestName))
            findings.push_back(
                {Grade::fine,
                 "checksums",
                 fmt::format("recorded; k3pipe verify {} compares every byte", directory.string()),
                 "",
                 {}});
        else
            findings.push_back(
                {Grade::advice,
                 "checksums",
                 "the shards carry none: a bit that flips on the disk is not noticed",
                 fmt::format(
                     "k3pipe verify {} --record, once; or read from packs, which are checked",
                     directory.string()),
                 {}});
    }
    return findings;
}

}  // namespace k3::launcher
