#include "common/base/memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace k3 {

namespace {

std::optional<std::string> read_text(const std::filesystem::path& path) {
    std::ifstream file(path);
    if (!file) return std::nullopt;
    std::ostringstream text;
    text << file.rdbuf();
    if (file.bad()) return std::nullopt;
    return std::move(text).str();
}

std::optional<std::uint64_t> parse_number(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    std::uint64_t value = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end == text.data()) return std::nullopt;
    return value;
}

/// The number after `key` at the beginning of a line ("MemAvailable:", "inactive_file ").
std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key) {
    while (!text.empty()) {
        std::string_view line = text.substr(0, text.find('\n'));
        if (line.starts_with(key)) return parse_number(line.substr(key.size()));
        text.remove_prefix(std::min(text.size(), line.size() + 1));
    }
    return std::nullopt;
}

std::optional<std::uint64_t> number_in(const std::filesystem::path& path) {
    std::optional<std::string> text = read_text(path);
    return text ? parse_number(*text) : std::nullopt;  // "max" is no number: no limit
}

struct CgroupFiles {
    std::string_view limit;
    std::string_view usage;
    std::string_view inactive_file;  // key in memory.stat, descendants included
};
constexpr CgroupFiles kVersion2{"memory.max", "memory.current", "inactive_file "};
constexpr CgroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file "};

enum class Of { limit, what_is_left };

/// Lowers `memory` to what the groups from `group` up to `mount` allow, or leave.
void apply_limits(const MemoryCgroup& cgroup, Of of, AvailableMemory& memory) {
    const CgroupFiles& files = cgroup.version == 1 ? kVersion1 : kVersion2;
    std::filesystem::path relative = cgroup.group.relative_path();
    while (true) {
        // Inside a container /proc/self/cgroup may name a path that only the host sees; the
        // ancestors are tried all the same, and the mount itself is the container's own group.
        const std::filesystem::path directory = cgroup.mount / relative;
        const std::optional<std::uint64_t> limit = number_in(directory / files.limit);
        const std::optional<std::uint64_t> usage = number_in(directory / files.usage);
        if (limit && usage) {
            std::uint64_t left = *limit;
            if (of == Of::what_is_left) {
                std::uint64_t cache = 0;
                if (auto stat = read_text(directory / "memory.stat"))
                    cache = number_after(*stat, files.inactive_file).value_or(0);
                left -= std::min(left, *usage - std::min(*usage, cache));
            }
            if (left < memory.bytes) memory = {left, (directory / files.limit).string()};
        }
        if (relative.empty()) return;
        relative = relative.parent_path();
    }
}

Result<AvailableMemory> read_memory(const std::filesystem::path& root, Of of) {
    const std::filesystem::path meminfo = root / "proc/meminfo";
    const std::optional<std::string> text = read_text(meminfo);
    if (!text)
        return Error{ErrorCode::io, fmt::format("cannot read {}", meminfo.string()),
                     "give memory budgets explicitly"};
    const char* name = of == Of::limit ? "MemTotal" : "MemAvailable";
    const std::optional<std::uint64_t> kib = number_after(*text, fmt::format("{}:", name));
    if (!kib)
        return Error{ErrorCode::corrupt, fmt::format("{} has no {}", meminfo.string(), name),
                     "give memory budgets explicitly"};
    AvailableMemory memory{*kib * 1024, meminfo.string()};
    for (const MemoryCgroup& cgroup : memory_cgroups(root)) apply_limits(cgroup, of, memory);
    return memory;
}

}  // namespace

std::vector<MemoryCgroup> memory_cgroups(const std::filesystem::path& root) {
    std::vector<MemoryCgroup> found;
    std::istringstream groups(read_text(root / "proc/self/cgroup").value_or(""));
    for (std::string line; std::getline(groups, line);) {
        // "0::/path" in version 2, "5:memory:/path" in version 1.
        const std::size_t first = line.find(':');
        const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const std::filesystem::path group = line.substr(second + 1);
        if (line.starts_with("0::"))
            found.push_back({2, root / "sys/fs/cgroup", group});
        else if (controllers.find(",memory,") != std::string::npos)
            found.push_back({1, root / "sys/fs/cgroup/memory", group});
    }
    return found;
}

Result<AvailableMemory> available_memory(const std::filesystem::path& root) {
    return read_memory(root, Of::what_is_left);
}

Result<AvailableMemory> memory_limit(const std::filesystem::path& root) {
    return read_memory(root, Of::limit);
}

Status check_address_space(std::uint64_t least_bytes) {
    rlimit limit = {};
    if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        limit.rlim_cur >= least_bytes)
        return Status::ok();
    return Error{
        ErrorCode::resource_exhausted,
        fmt::format("the address space is limited to {} bytes, and the threads of this program "
                    "reserve up to {}, of which they use little",
                    std::uint64_t{limit.rlim_cur}, least_bytes),
        "raise the limit (ulimit -v); memory itself is bounded by the budgets of the services"};
}

void prefer_huge_pages(std::span<std::byte> memory) noexcept {
    // The kernel wants whole small pages and uses the whole huge ones among them.
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto first = (reinterpret_cast<std::uintptr_t>(memory.data()) + page - 1) / page * page;
    const auto last = reinterpret_cast<std::uintptr_t>(memory.data() + memory.size()) / page * page;
    if (first < last) (void)::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace k3
