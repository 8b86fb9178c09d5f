#pragma once
// What can go wrong in a correct program, as a value.
//
// One value goes from the disk to the client: an error raised in an expert server travels as a
// message to the trunk, the gateway and the terminal without being reworded on the way. So it
// carries everything the last reader needs: a code to act on, a sentence to read, a remedy.

#include <cstdint>
#include <string>
#include <string_view>

namespace k3 {

/// The closed set of reasons. The numbers travel in messages (proto/types.capnp): never renumber.
enum class ErrorCode : std::uint8_t {
    invalid_argument = 0,    // the caller asked for something that cannot be meant
    not_found = 1,           // a named thing does not exist
    corrupt = 2,             // bytes are there, but they cannot be right
    io = 3,                  // the operating system refused or failed
    unavailable = 4,         // a peer is gone, restarting or still loading: asking again may work
    deadline_exceeded = 5,   // the time granted ran out
    resource_exhausted = 6,  // a budget, queue or limit is used up
    stale = 7,               // the thing existed, but has been replaced since
    incompatible = 8,        // two parts do not fit together (versions, fingerprints, shapes)
    unsupported = 9,         // understood, and not built
    cancelled = 10,          // the caller withdrew
    internal = 11,           // a bug, reported instead of hidden
};

inline constexpr std::uint8_t kErrorCodeCount = 12;

/// "corrupt", "deadline_exceeded", ...
std::string_view to_string(ErrorCode code) noexcept;

struct Error {
    ErrorCode code = ErrorCode::internal;
    std::string message;  // one sentence with the names and numbers in it, no full stop needed
    std::string remedy;   // what to do next; may be empty when there is nothing to do

    bool operator==(const Error&) const = default;

    /// The same error one level up: "layer 41: <message>". Only a level that knows more adds it.
    Error with_context(std::string_view context) &&;

    /// "<message>; <remedy>", for a terminal or a log line.
    std::string sentence() const;
};

/// The process exit code that stands for `code`; the table is in docs/operating.md.
/// Only bad settings (2) and a bad model (3) tell the supervisor not to restart.
int exit_code(ErrorCode code) noexcept;

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;         // the request failed, or an internal error
inline constexpr int kExitUsage = 2;          // flags, settings or request cannot be meant
inline constexpr int kExitModel = 3;          // checkpoint missing, corrupt or incompatible
inline constexpr int kExitResources = 4;      // in use, no memory, no disk, not permitted
inline constexpr int kExitUnavailable = 5;    // a service is gone or did not answer in time
inline constexpr int kExitInterrupted = 130;  // Ctrl-C

}  // namespace k3
