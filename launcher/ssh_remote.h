#pragma once
// Commands on other boxes over ssh.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/remote.h"

namespace k3::launcher {

/// `ssh`: the program and the user's own words, argv[0] a path.
std::unique_ptr<Remote> make_ssh_remote(std::vector<std::string> ssh);

/// The command line of its clients: they ask nothing, open a connection of their own (so that
/// ending one ends its command), forward nothing, and give up a dead link within ten seconds.
std::vector<std::string> ssh_command(const std::vector<std::string>& ssh, const std::string& host,
                                     std::string_view script);

/// Why a client failed: `output` is what it printed, the reason in its last line.
Error ssh_fault(const std::string& host, const std::string& output);

/// Where ssh says that it goes: the `hostname` line of `ssh -G` output; empty if there is none.
std::string hostname_of(std::string_view ssh_g_output);

}  // namespace k3::launcher
