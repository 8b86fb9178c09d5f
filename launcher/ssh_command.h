#pragma once
// The command line of an ssh client that runs one command of ours on another box.

#include <string>
#include <string_view>
#include <vector>

namespace k3::launcher {

/// `ssh`: the program and the user's own words, argv[0] a path. The client asks nothing, opens a
/// connection of its own (so that ending it ends the remote command), forwards nothing, and gives
/// up a dead link within ten seconds. `script` is run by the POSIX shell of the box.
std::vector<std::string> ssh_command(const std::vector<std::string>& ssh, const std::string& host,
                                     std::string_view script);

/// Where ssh says that it goes: the `hostname` line of `ssh -G` output; empty if there is none.
std::string hostname_of(std::string_view ssh_g_output);

}  // namespace k3::launcher
