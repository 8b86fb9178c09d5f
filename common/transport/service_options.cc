#include "common/transport/service_options.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "common/base/build_id.h"
#include "common/base/cores.h"
#include "common/base/log.h"
#include "common/base/memory.h"
#include "common/transport/arena.h"

namespace k3::transport {

namespace {

constexpr std::size_t kMaxServiceName = 64;
// A row is at most the logits of 262,144 tokens. Between trunk stages it is 9 vectors of 7,168.
constexpr std::size_t kMaxRowBytes = std::size_t{1} << 20U;
constexpr std::size_t kMaxTensorBytes = std::size_t{1} << 30U;
constexpr std::size_t kFrameOverheadBytes = 1024;  // of encryption: 33 bytes
constexpr unsigned kSayFailureMs = 300;
/// Stacks and heaps of the threads of ZeroMQ and of computing ones.
constexpr std::uint64_t kLeastAddressSpace = std::uint64_t{1} << 30U;

std::optional<std::uint64_t> parse_hex(const std::string& text) {
    std::uint64_t number = 0;
    const char* end = text.data() + text.size();
    auto [stop, problem] = std::from_chars(text.data(), end, number, 16);
    if (problem != std::errc{} || stop != end) return std::nullopt;
    return number;
}

bool legal_name(const std::string& name) {
    auto legal = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '-' || c == '_' || c == '.';
    };
    return !name.empty() && name.size() <= kMaxServiceName &&
           std::all_of(name.begin(), name.end(), legal);
}

/// What the settings parser cannot judge.
std::optional<Error> refusal(const ServiceOptions& options) {
    if (!parse_hex(options.run_id))
        return Error{ErrorCode::invalid_argument,
                     "run_id \"" + options.run_id + "\" is not a hexadecimal number of 64 bits",
                     "write up to 16 digits 0-9, a-f, or leave run_id out"};
    if (!legal_name(options.name))
        return Error{ErrorCode::invalid_argument,
                     "name \"" + options.name + "\" is not 1 to " +
                         std::to_string(kMaxServiceName) + " letters, digits, '-', '_' or '.'",
                     "choose a name like experts-1"};
    return std::nullopt;
}

}  // namespace

std::uint64_t ServiceOptions::run() const noexcept { return parse_hex(run_id).value_or(0); }

Server::Options ServiceOptions::server(msg::ServiceKind kind) const {
    Server::Options out;
    out.endpoint = listen;
    out.run_id = run();
    out.announcement.kind = kind;
    out.announcement.name = name;
    out.announcement.version = version();
    out.announcement.build = build_id();
    out.keys = curve_keys;
    out.insecure = insecure;
    out.warn = [](const std::string& line) { log::warn(line); };
    out.max_message_bytes = max_frame_bytes(0);
    out.lifeline_fd = static_cast<int>(lifeline_fd);
    out.refused = refusal(*this);
    return out;
}

void add_service_settings(Settings& settings, ServiceOptions& options) {
    settings.add_text("listen", &options.listen,
                      "endpoint to serve on: ipc:///folder/name.sock or tcp://address:port", true);
    settings.add_text("name", &options.name, "how this service is called in logs and errors");
    settings.add_text("run_id", &options.run_id,
                      "hexadecimal number of the pipeline run; names shared-memory segments");
    settings.add_choice("payload", &options.payload, {"shm", "inline"},
                        "where tensors of replies go: shared memory if the caller can read it, "
                        "or always into the message");
    settings.add_choice("log_level", &options.log_level, {"debug", "info", "warn", "error"},
                        "least important log lines to print");
    settings.add_text("cores", &options.cores,
                      "cores to run on, like 0-7,16; otherwise all that it may");
    settings.add_integer("lifeline_fd", &options.lifeline_fd, -1, 1 << 20,
                         "descriptor whose end of file ends this service; -1: none");
    settings.add_text(
        "keys", &options.keys,
        "key file of the pipeline (k3pipe keys makes it): on tcp, only processes that "
        "have it are served and called");
    settings.add_flag("insecure", &options.insecure,
                      "allow a tcp address that other boxes can reach without keys: everyone there "
                      "may use this service");
    settings.add_flag("check", &options.check,
                      "read the settings, say what is wrong with them, and end");
}

std::size_t max_frame_bytes(std::int64_t max_rows) noexcept {
    const std::size_t tensor = static_cast<std::size_t>(max_rows) * kMaxRowBytes;
    return std::clamp(tensor, msg::kMaxEnvelopeBytes, kMaxTensorBytes) + kFrameOverheadBytes;
}

Status begin_service(ServiceOptions& options) {
    const std::string& name = options.log_level;
    const log::Level level = name == "debug"   ? log::Level::debug
                             : name == "warn"  ? log::Level::warn
                             : name == "error" ? log::Level::error
                                               : log::Level::info;
    log::init(options.name, options.run_id == "0" ? "" : options.run_id, level);
    RETURN_IF_ERROR(check_address_space(kLeastAddressSpace));
    if (!options.keys.empty()) {
        ASSIGN_OR_RETURN(options.curve_keys, CurveKeys::load(options.keys));
    }
    // A launcher does this itself. Of services that nobody or another manager starts, those of this
    // run that were killed have left theirs.
    if (options.check) {
        if (auto wrong = refusal(options)) return *std::move(wrong);
        return keep_to_cores(options.cores);
    }
    if (options.lifeline_fd < 0) sweep_dead_segments(options.run());
    return keep_to_cores(options.cores);
}

int fail(const Error& error, Server* server) {
    log::error(error.sentence());
    if (server != nullptr) {
        server->set_failed(error);
        // Long enough for a caller that asks every 50 ms to hear the reason and not just silence.
        ::usleep(kSayFailureMs * 1000);
    }
    return exit_code(error.code);
}

}  // namespace k3::transport
