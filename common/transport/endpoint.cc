#include "common/transport/endpoint.h"

#include <algorithm>
#include <charconv>

namespace k3::transport {

namespace {

constexpr std::string_view kIpc = "ipc://";
constexpr std::string_view kTcp = "tcp://";

Error malformed(std::string_view text, const std::string& why) {
    return {ErrorCode::invalid_argument, "endpoint \"" + std::string(text) + "\" " + why,
            "write ipc:///folder/name.sock or tcp://address:port"};
}

bool legal_port(std::string_view port) {
    if (port == "*") return true;
    unsigned number = 0;
    auto [end, problem] = std::from_chars(port.data(), port.data() + port.size(), number);
    return problem == std::errc{} && end == port.data() + port.size() && number <= 65535;
}

Result<Endpoint> parse_ipc(std::string_view text) {
    Endpoint out;
    out.kind = Endpoint::Kind::ipc;
    out.text = text;
    out.path = text.substr(kIpc.size());
    if (out.path.empty() || out.path == "*") return malformed(text, "names no socket file");
    // Abstract sockets have no permissions: every user of the box could speak to the service.
    if (out.path.front() == '@')
        return malformed(text, "is an abstract socket, which has no owner");
    if (out.path.find('\0') != std::string::npos) return malformed(text, "holds a zero byte");
    if (out.path.size() > kMaxSocketPath)
        return Error{ErrorCode::invalid_argument,
                     "the socket path " + out.path + " has " + std::to_string(out.path.size()) +
                         " bytes, the limit of the system is " + std::to_string(kMaxSocketPath),
                     "use a shorter run directory"};
    return out;
}

Result<Endpoint> parse_tcp(std::string_view text) {
    Endpoint out;
    out.kind = Endpoint::Kind::tcp;
    out.text = text;
    std::string_view rest = text.substr(kTcp.size());
    std::size_t colon = rest.rfind(':');
    if (colon == std::string_view::npos) return malformed(text, "names no port");
    std::string_view host = rest.substr(0, colon);
    if (host.size() >= 2 && host.front() == '[' && host.back() == ']')
        host = host.substr(1, host.size() - 2);
    out.host = host;
    out.port = rest.substr(colon + 1);
    if (out.host.empty()) return malformed(text, "names no address");
    if (!legal_port(out.port))
        return malformed(text, "has port \"" + out.port + "\", not a number from 0 to 65535");
    return out;
}

}  // namespace

bool Endpoint::is_local() const {
    return kind == Kind::ipc || host == "localhost" || host == "lo" || host == "::1" ||
           host.starts_with("127.");
}

Result<Endpoint> parse_endpoint(std::string_view text) {
    if (text.starts_with(kIpc)) return parse_ipc(text);
    if (text.starts_with(kTcp)) return parse_tcp(text);
    return malformed(text, "has no known transport");
}

}  // namespace k3::transport
