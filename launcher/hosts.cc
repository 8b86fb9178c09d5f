#include "launcher/hosts.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "launcher/paths.h"
#include "launcher/run_program.h"
#include "launcher/ssh_remote.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kSshSettingsMs = 5000;

struct SocketAddress {
    sockaddr_storage bytes = {};
    socklen_t size = 0;
};

std::string numeric(const SocketAddress& address) {
    std::array<char, NI_MAXHOST> text = {};
    if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address.bytes), address.size, text.data(),
                      text.size(), nullptr, 0, NI_NUMERICHOST) != 0)
        return {};
    return text.data();
}

/// The first address of a name, as a connection would use it.
Result<SocketAddress> resolve(const std::string& name) {
    addrinfo hints = {};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int code = ::getaddrinfo(name.c_str(), nullptr, &hints, &found);
    if (code != 0 || found == nullptr)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{} has no address here: {}", name, ::gai_strerror(code)), ""};
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
    SocketAddress address;
    std::memcpy(&address.bytes, found->ai_addr, found->ai_addrlen);
    address.size = found->ai_addrlen;
    return address;
}

/// The address of this box on the way to another: what a datagram would be sent from.
Result<std::string> own_address(const std::string& other) {
    ASSIGN_OR_RETURN(SocketAddress to, resolve(other));
    constexpr in_port_t kAnyPort = 9;  // of both families at the same place
    reinterpret_cast<sockaddr_in*>(&to.bytes)->sin_port = htons(kAnyPort);
    const Fd fd(::socket(to.bytes.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    SocketAddress from;
    from.size = sizeof from.bytes;
    if (!fd.valid() ||
        ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to.bytes), to.size) != 0 ||
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&from.bytes), &from.size) != 0)
        return Error{ErrorCode::unavailable,
                     fmt::format("this box has no way to {}: {}", other, std::strerror(errno)),
                     "check the network, or set address in [pipeline]"};
    return numeric(from);
}

Error in_table_of(const PipelineSpec& spec, const HostSpec& host, Error error) {
    const std::string where =
        host.line == 0 ? spec.file.string() : fmt::format("{}:{}", spec.file.string(), host.line);
    error.remedy = fmt::format("correct the name, or set address in [hosts.\"{}\"]", host.name);
    return std::move(error).with_context(fmt::format("{}: host {}", where, host.name));
}

Status resolve_host(const PipelineSpec& spec, HostSpec* host) {
    std::string name = host->address;
    if (name.empty()) {
        std::vector<std::string> words = spec.ssh;
        for (const char* word : {"-G", "--"}) words.emplace_back(word);
        words.push_back(host->name);
        ASSIGN_OR_RETURN(const ProgramRun run,
                         run_program(words, Deadline::after_ms(kSshSettingsMs)));
        name = hostname_of(run.output);
        if (name.empty())
            return in_table_of(spec, *host,
                               Error{ErrorCode::invalid_argument,
                                     fmt::format("{} -G names no host name ({})", spec.ssh.front(),
                                                 run.ending.text()),
                                     ""});
    }
    auto address = resolve(name);
    if (!address.has_value()) return in_table_of(spec, *host, std::move(address).error());
    host->address = numeric(*address);
    return Status::ok();
}

bool is_used(const PipelineSpec& spec, const HostSpec& host) {
    return std::any_of(spec.stages.begin(), spec.stages.end(),
                       [&host](const StageSpec& stage) { return stage.host == host.name; });
}

}  // namespace

Status resolve_addresses(PipelineSpec* spec) {
    if (!spec->has_remote()) return Status::ok();
    if (spec->client == "ssh") {
        ASSIGN_OR_RETURN(const std::filesystem::path program,
                         find_program(spec->ssh.front(), "ssh of [pipeline]"));
        spec->ssh.front() = program.string();
    }
    std::string first;
    for (HostSpec& host : spec->hosts) {
        if (!is_used(*spec, host)) continue;
        RETURN_IF_ERROR(resolve_host(*spec, &host));
        if (first.empty()) first = host.address;
    }
    if (spec->address.empty()) {
        ASSIGN_OR_RETURN(spec->address, own_address(first));
    } else {
        ASSIGN_OR_RETURN(const SocketAddress address, resolve(spec->address));
        spec->address = numeric(address);
    }
    return Status::ok();
}

}  // namespace k3::launcher
