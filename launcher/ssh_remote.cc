#include "launcher/ssh_remote.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "launcher/words.h"

namespace k3::launcher {

namespace {

constexpr int kConnectionFailed = 255;  // the exit code of ssh itself

class SshRemote final : public Remote {
  public:
    explicit SshRemote(std::vector<std::string> ssh) : ssh_(std::move(ssh)) {}

    std::vector<std::string> command(const std::string& host,
                                     std::string_view script) const override {
        return ssh_command(ssh_, host, script);
    }
    std::optional<Error> fault(const std::string& host, const ProgramRun& run) const override {
        if (run.ending.exit_code() != kConnectionFailed) return std::nullopt;
        return ssh_fault(host, run.output);
    }
    std::string by_hand(const std::string& host) const override {
        return fmt::format("ssh {}", host);
    }

  private:
    std::vector<std::string> ssh_;
};

}  // namespace

std::unique_ptr<Remote> make_ssh_remote(std::vector<std::string> ssh) {
    return std::make_unique<SshRemote>(std::move(ssh));
}

std::vector<std::string> ssh_command(const std::vector<std::string>& ssh, const std::string& host,
                                     std::string_view script) {
    std::vector<std::string> words = ssh;
    words.emplace_back("-T");
    // A shared connection (ControlMaster) would outlive its client, and the remote command with it.
    for (const char* option :
         {"BatchMode=yes", "ConnectTimeout=5", "ServerAliveInterval=2", "ServerAliveCountMax=3",
          "ControlMaster=no", "ControlPath=none", "ClearAllForwardings=yes", "ForwardAgent=no",
          "ForwardX11=no", "PermitLocalCommand=no", "RemoteCommand=none"}) {
        words.emplace_back("-o");
        words.emplace_back(option);
    }
    words.emplace_back("--");
    words.push_back(host);
    // The user's login shell there may be any.
    words.push_back("exec " + shell_line({"sh", "-c", std::string(script)}));
    return words;
}

std::string hostname_of(std::string_view ssh_g_output) {
    constexpr std::string_view kKey = "hostname ";
    while (!ssh_g_output.empty()) {
        std::string_view line = ssh_g_output.substr(0, ssh_g_output.find('\n'));
        if (line.starts_with(kKey)) return std::string(line.substr(kKey.size()));
        ssh_g_output.remove_prefix(std::min(line.size() + 1, ssh_g_output.size()));
    }
    return {};
}

Error ssh_fault(const std::string& host, const std::string& output) {
    std::string_view text = output;
    while (text.ends_with('\n') || text.ends_with('\r')) text.remove_suffix(1);
    const std::string_view last = text.substr(text.rfind('\n') + 1);
    auto says = [&output](std::string_view part) { return output.find(part) != std::string::npos; };
    if (says("REMOTE HOST IDENTIFICATION HAS CHANGED"))
        return {
            ErrorCode::incompatible,
            fmt::format("host {} shows another host key than it did before", host),
            fmt::format("find out why; if it was installed anew, `ssh-keygen -R {}` forgets the "
                        "old key",
                        host)};
    if (says("Host key verification failed"))
        return {ErrorCode::unavailable, fmt::format("the host key of {} is not known here", host),
                fmt::format("run `ssh {}` once and compare the fingerprint that it shows", host)};
    if (says("Permission denied"))
        return {
            ErrorCode::unavailable, fmt::format("host {} does not let us in: {}", host, last),
            fmt::format("`ssh-copy-id {0}` installs your key there; `ssh {0}` must work without "
                        "a question",
                        host)};
    return {ErrorCode::unavailable, fmt::format("host {} cannot be reached: {}", host, last),
            fmt::format("switch it on and check its sshd; `ssh {}` must work without a question",
                        host)};
}

}  // namespace k3::launcher
