#pragma once
// The settings every service has, and the start and end that all of them share.

#include <cstdint>
#include <memory>
#include <string>

#include "common/base/settings.h"
#include "common/transport/curve_keys.h"
#include "common/transport/server.h"

namespace k3::transport {

struct ServiceOptions {
    std::string name;          // in logs, errors and announcements: "experts-1"
    std::string listen;        // endpoint to bind; required
    std::string run_id = "0";  // hex; names the shared-memory segments
    std::string payload =
        "shm";  // where replies' tensors go if the caller can read them, or "inline"
    std::string log_level = "info";
    std::string cores;  // "0-7,16"; empty: all that it was given
    std::int64_t lifeline_fd = -1;
    std::string keys;  // key file; empty: none
    bool insecure = false;
    bool check = false;                           // only look at the settings, and end
    std::shared_ptr<const CurveKeys> curve_keys;  // read from it by begin_service()

    std::uint64_t run() const noexcept;
    /// A run_id or name that cannot be meant makes Server::create() refuse.
    Server::Options server(msg::ServiceKind kind) const;
};

/// Declares them; `options.name` should hold the service's default name.
void add_service_settings(Settings& settings, ServiceOptions& options);

/// The largest frame that a service may be sent which takes tensors of so many rows (0: none); a
/// larger one costs its sender the connection. For Server::Options.
std::size_t max_frame_bytes(std::int64_t max_rows) noexcept;

/// To be called before anything starts a thread: log::init() with the name, run and level of the
/// options, the keys read, this process kept to its cores, and what killed services of its run left
/// in shared memory removed, unless a launcher sees to that.
/// Errors: those of CurveKeys::load() and keep_to_cores().
Status begin_service(ServiceOptions& options);

/// Logs the error as the last line, says it to callers for a moment if the server runs (state
/// failed) and returns the exit code: `return fail(error, server.get());`
int fail(const Error& error, Server* server);

}  // namespace k3::transport
