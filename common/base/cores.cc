#include "common/base/cores.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <iterator>
#include <optional>

namespace k3 {

namespace {

constexpr int kMostCores = 8192;  // what Linux can be built for

/// As sched_setaffinity takes them; cpu_set_t alone ends at core 1023.
class CoreBits {
  public:
    CoreBits() { CPU_ZERO_S(kBytes, bits_.data()); }
    void add(int core) { CPU_SET_S(static_cast<std::size_t>(core), kBytes, bits_.data()); }
    bool has(int core) const {
        return CPU_ISSET_S(static_cast<std::size_t>(core), kBytes, bits_.data());
    }
    bool read() { return ::sched_getaffinity(0, kBytes, bits_.data()) == 0; }
    bool apply() const { return ::sched_setaffinity(0, kBytes, bits_.data()) == 0; }

  private:
    static constexpr std::size_t kBytes = kMostCores / 8;
    std::array<cpu_set_t, kBytes / sizeof(cpu_set_t)> bits_;
};

Error no_core_list(std::string_view text, const std::string& why) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("cores '{}' is not a list of cores: {}", text, why),
                 "write numbers and ranges, like 0-7,16"};
}

/// The number of a core at the beginning of `text`, which it is taken from.
std::optional<int> take_number(std::string_view& text) {
    int number = 0;
    auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (code != std::errc{} || number < 0 || number >= kMostCores) return std::nullopt;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return number;
}

std::string_view trimmed(std::string_view text) {
    while (text.starts_with(' ')) text.remove_prefix(1);
    while (text.ends_with(' ')) text.remove_suffix(1);
    return text;
}

/// One number or range.
Status add_item(std::string_view item, std::string_view text, CoreSet* cores) {
    std::string_view rest = item;
    const std::optional<int> first = take_number(rest);
    std::optional<int> last = first;
    if (rest.starts_with('-')) {
        rest.remove_prefix(1);
        last = take_number(rest);
    }
    if (!first || !last || !rest.empty())
        return no_core_list(text, fmt::format("'{}' is neither a number from 0 to {} nor a range",
                                              item, kMostCores - 1));
    if (*last < *first) return no_core_list(text, fmt::format("'{}' runs backwards", item));
    for (int core = *first; core <= *last; ++core) cores->push_back(core);
    return Status::ok();
}

}  // namespace

Result<CoreSet> parse_cores(std::string_view text) {
    CoreSet cores;
    for (std::string_view rest = text;;) {
        const std::size_t comma = std::min(rest.find(','), rest.size());
        RETURN_IF_ERROR(add_item(trimmed(rest.substr(0, comma)), text, &cores));
        if (comma == rest.size()) break;
        rest.remove_prefix(comma + 1);
    }
    std::sort(cores.begin(), cores.end());
    cores.erase(std::unique(cores.begin(), cores.end()), cores.end());
    return cores;
}

std::string format_cores(const CoreSet& cores) {
    std::string text;
    for (std::size_t first = 0; first < cores.size();) {
        std::size_t last = first;
        while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
        fmt::format_to(std::back_inserter(text), "{}{}", text.empty() ? "" : ",", cores[first]);
        if (last > first) fmt::format_to(std::back_inserter(text), "-{}", cores[last]);
        first = last + 1;
    }
    return text;
}

MachineCores machine_cores() {
    MachineCores machine;
    machine.n_cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_CONF));
    CoreBits bits;
    if (!bits.read()) return machine;
    for (int core = 0; core < kMostCores; ++core)
        if (bits.has(core)) machine.allowed.push_back(core);
    return machine;
}

Status check_cores(const CoreSet& cores, const MachineCores& machine) {
    CoreSet refused;
    std::set_difference(cores.begin(), cores.end(), machine.allowed.begin(), machine.allowed.end(),
                        std::back_inserter(refused));
    if (refused.empty()) return Status::ok();
    if (refused.back() >= machine.n_cores)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("cores '{}' names core {}, and the last one of this machine is {}",
                                 format_cores(cores), refused.back(), machine.n_cores - 1),
                     "name cores that lscpu shows"};
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("cores '{}' names core{} {}, and this process may run on {} only",
                    format_cores(cores), refused.size() == 1 ? "" : "s", format_cores(refused),
                    format_cores(machine.allowed)),
        "name cores among those, or widen what taskset, the container or its cpuset allow"};
}

bool has_core_for_each(std::span<const CoreUse> processes) {
    std::vector<int> all;
    std::size_t n_threads = 0;
    for (const CoreUse& process : processes) {
        if (process.n_threads > process.cores.size()) return false;
        n_threads += process.n_threads;
        all.insert(all.end(), process.cores.begin(), process.cores.end());
    }
    std::sort(all.begin(), all.end());
    const auto last = std::unique(all.begin(), all.end());
    return n_threads <= static_cast<std::size_t>(last - all.begin());
}

Status keep_to_cores(std::string_view text) {
    if (text.empty()) return Status::ok();
    ASSIGN_OR_RETURN(const CoreSet cores, parse_cores(text));
    RETURN_IF_ERROR(check_cores(cores, machine_cores()));
    CoreBits bits;
    for (int core : cores) bits.add(core);
    if (bits.apply()) return Status::ok();
    return Error{ErrorCode::invalid_argument,
                 fmt::format("the system refuses to keep this process to cores '{}': {}", text,
                             std::strerror(errno)),
                 "leave cores out to use all that are allowed"};
}

}  // namespace k3
