#include "tests/support/handshake_fuzzer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/fd.h"
#include "common/transport/endpoint.h"
#include "tests/support/message_mutator.h"
#include "tests/support/sample_messages.h"

namespace k3::test {

namespace {

constexpr int kPerConnection = 5;
constexpr std::size_t kGreetingBytes = 64;

std::string greeting_of(std::string_view mechanism) {
    std::string out(kGreetingBytes, '\0');
    out[0] = '\xff';
    out[8] = 1;
    out[9] = '\x7f';
    out[10] = 3;
    std::copy(mechanism.begin(), mechanism.end(), out.begin() + 12);
    return out;
}

/// A ZMTP frame: flags (2: long size, 4: command), size, body.
std::string frame_of(unsigned flags, std::string_view body) {
    std::string out;
    out += static_cast<char>(flags | 2U);
    for (int shift = 56; shift >= 0; shift -= 8)
        out += static_cast<char>(static_cast<std::uint64_t>(body.size()) >> shift);
    return out.append(body);
}

std::string command_of(std::string_view name, std::size_t bytes, MessageMutator& random) {
    std::string body(1, static_cast<char>(name.size()));
    body.append(name);
    while (body.size() < bytes) body += static_cast<char>(random.next());
    return frame_of(4, body);
}

std::string as_text(const msg::Bytes& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Fd connect_to(const transport::Endpoint& endpoint) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(endpoint.port)));
    ::inet_pton(AF_INET, endpoint.host.c_str(), &address.sin_addr);
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return {};
    return fd;
}

class HandshakeFuzzer {
  public:
    explicit HandshakeFuzzer(std::uint64_t seed) : random_(seed) {
        for (SampleMessage& sample : sample_messages())
            requests_.push_back(msg::encode(sample.envelope));
    }

    /// What one connection says, and in how many messages.
    std::pair<std::string, int> speech() {
        const std::uint64_t kind = random_.below(6);
        if (kind == 0) return {noise(random_.below(300)), 1};
        std::string text = greeting_of(random_.below(4) == 0 ? "NULL" : "CURVE");
        if (kind == 1) return {text.substr(0, random_.below(kGreetingBytes)), 1};
        if (kind == 2) {
            char& byte = text[random_.below(kGreetingBytes)];
            byte = static_cast<char>(byte ^ (1 << random_.below(8)));
        }
        for (int i = 1; i < kPerConnection; ++i) text += message();
        return {std::move(text), kPerConnection};
    }

  private:
    std::string noise(std::size_t bytes) {
        std::string out;
        while (out.size() < bytes) out += static_cast<char>(random_.next());
        return out;
    }

    std::string message() {
        const msg::Bytes& request = requests_[random_.below(requests_.size())];
        switch (random_.below(6)) {
            case 0:
                return command_of("HELLO", 200, random_);  // of the right size, sealed by nobody
            case 1:
                return command_of("HELLO", random_.below(400), random_);
            case 2:
                return command_of("INITIATE", 257 + random_.below(300), random_);
            case 3:
                return command_of("MESSAGE", 33 + random_.below(200), random_);
            case 4:
                return frame_of(0, as_text(request));
            default:
                return frame_of(static_cast<unsigned>(random_.below(8)),
                                as_text(random_.damage(request)));
        }
    }

    MessageMutator random_;
    std::vector<msg::Bytes> requests_;
};

/// True if the peer says anything behind its greeting but the commands of a handshake.
bool is_served(int fd) {
    std::string heard;
    std::array<char, 4096> buffer{};
    ::shutdown(fd, SHUT_WR);
    pollfd item{fd, POLLIN, 0};
    while (::poll(&item, 1, 1000) == 1) {
        const ssize_t n = ::recv(fd, buffer.data(), buffer.size(), 0);
        if (n <= 0) break;
        heard.append(buffer.data(), static_cast<std::size_t>(n));
    }
    if (heard.size() <= kGreetingBytes) return false;
    const std::string rest = heard.substr(kGreetingBytes);
    // Short commands: flags, size, length of the name, name.
    return rest.size() < 3 || (rest[0] != 4 && rest[0] != 6) ||
           (rest.find("WELCOME") == std::string::npos && rest.find("ERROR") == std::string::npos);
}

}  // namespace

HandshakeFuzzReport fuzz_handshakes(const std::string& endpoint, int n_messages,
                                    std::uint64_t seed) {
    const transport::Endpoint parsed = transport::parse_endpoint(endpoint).value();
    HandshakeFuzzer fuzzer(seed);
    HandshakeFuzzReport report;
    while (report.n_messages < n_messages) {
        const auto [speech, n_said] = fuzzer.speech();
        const Fd fd = connect_to(parsed);
        if (!fd.valid()) return report;
        ++report.n_connections;
        report.n_messages += n_said;
        // A peer that has hung up already has heard enough.
        [[maybe_unused]] const ssize_t sent =
            ::send(fd.get(), speech.data(), speech.size(), MSG_NOSIGNAL);
        if (is_served(fd.get())) ++report.n_served;
    }
    return report;
}

}  // namespace k3::test
