#pragma once
// What a launcher and `k3pipe host-stage` say to each other over one connection (ssh, srun).
//
//   launcher -> box   "k3pipe-stage 2 <bytes> <key bytes> <placement bytes>\n", then so many
//                     bytes: a StageDescription as JSON; then the content of the pipeline's key
//                     file, if its stage needs it, and that of its placement file, likewise. After
//                     that lines, the only ones there are:
//                       "pulse\n"         every kPulseMs: the launcher and the link are alive
//                       "signal <n>\n"    to the group of the service
//                       "resume\n"        to those of the group that are stopped
//   box -> launcher   what the service writes, as it is
//   exit status       how the service ended, see relayed_code()
//
// The end of the first stream, and kSilenceMs without a line, mean that the launcher is gone: the
// box then stops the service and removes what it left. ssh's own keep-alive (ssh_remote.cc) ends
// the other side of a dead link a little later, so that a restart finds the place free.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/result.h"
#include "launcher/starter.h"

namespace k3::launcher {

inline constexpr int kHostProtocolVersion = 2;
/// Of a description, its head and the keys: a pipe takes them at once.
inline constexpr std::size_t kMaxDescriptionBytes = 60000;
inline constexpr std::size_t kMaxControlLine = 64;
inline constexpr std::int64_t kPulseMs = 1000;
inline constexpr std::int64_t kSilenceMs = 6000;

/// One service, as its box is told.
struct StageDescription {
    std::string pipeline;
    std::string stage;
    std::uint64_t run_id = 0;
    std::vector<std::string> argv;  // programs are looked for on the box
    std::size_t n_wrap = 0;         // words of argv in front of the service's program
    std::vector<std::pair<std::string, std::string>> env;
    bool own_sessions = false;  // add --session-dir with the box's default
    // The file whose content comes with it, as argv calls it ("@FILE#NAME"); empty: none does.
    std::string placement;
};

struct DescriptionSizes {
    std::size_t body = 0;
    std::size_t keys = 0;       // 0, or that of a key file
    std::size_t placement = 0;  // 0, or that of a placement file
};

/// Head and body; what `sizes` says of the others is to follow.
/// Error: invalid_argument (over kMaxDescriptionBytes).
Result<std::string> encode_description(const StageDescription& description, DescriptionSizes sizes);

/// The sizes in a head, without its newline.
/// Errors: incompatible (another version), corrupt (no head, or over the bound).
Result<DescriptionSizes> parse_head(std::string_view head);
/// Error: corrupt (not such a JSON, or without a program).
Result<StageDescription> parse_description(std::string_view body);

/// The exit status that stands for an ending: 0 to 127 an exit code, 128 + n signal n. Codes from
/// 128 on, which no service of ours has, become 127.
int relayed_code(const Ending& ending) noexcept;
/// The inverse. 255 is ssh's own: the connection failed, or ended before the service did. srun says
/// 1 when it cannot begin, and 128 + n of a host-stage that signal n has killed.
Ending relayed_ending(int code) noexcept;

}  // namespace k3::launcher
