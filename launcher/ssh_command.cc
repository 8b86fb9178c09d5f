#include "launcher/ssh_command.h"

#include <algorithm>

#include "launcher/words.h"

namespace k3::launcher {

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

}  // namespace k3::launcher
