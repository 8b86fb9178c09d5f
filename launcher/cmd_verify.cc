// `k3pipe verify`: checksums of a checkpoint or a pack, at the rate of the disk.

#include <fmt/format.h>

#include <functional>
#include <system_error>

#include "common/base/settings.h"
#include "common/storage/file.h"
#include "launcher/commands.h"
#include "launcher/progress_line.h"
#include "launcher/verification.h"

namespace k3::launcher {

namespace {

Result<Verified> verify_path(const VerifyCommand& command, const VerifyOptions& options) {
    std::error_code ignored;
    if (!std::filesystem::exists(command.path, ignored) && !ignored)
        RETURN_IF_ERROR(storage::check_checkpoint_directory(command.path));
    const bool is_directory = std::filesystem::is_directory(command.path, ignored);
    if (!is_directory && (command.record || !command.sha256.empty()))
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{} is no directory, and {} is for checkpoints",
                                 command.path.string(), command.record ? "--record" : "--sha256"),
                     "give the directory of a checkpoint; a pack carries its own checksums"};
    if (!is_directory) return verify_pack(command.path, options);
    if (command.sha256.empty())
        return command.record ? record_checkpoint(command.path, options)
                              : verify_checkpoint(command.path, options);
    ASSIGN_OR_RETURN(Verified verified, verify_sha256(command.path, command.sha256, options));
    if (!command.record) return verified;
    // What was just found to be right is what is recorded.
    ASSIGN_OR_RETURN(const Verified recorded, record_checkpoint(command.path, options));
    verified.what += "; " + recorded.what;
    verified.resumed_bytes += recorded.resumed_bytes;
    return verified;
}

}  // namespace

int verify(const VerifyCommand& command) {
    auto progress = ProgressLine::begin("reading");
    if (!progress) return report(progress.error());
    VerifyOptions options;
    options.progress = std::ref(*progress);
    const Result<Verified> verified = verify_path(command, options);
    progress->end();
    if (!verified) return report(verified.error());
    fmt::print("{}: {}", command.path.string(), verified->what);
    if (verified->resumed_bytes > 0)
        fmt::print(" ({} of it were read by an earlier attempt)",
                   format_bytes(verified->resumed_bytes));
    fmt::print("\n");
    return kExitOk;
}

}  // namespace k3::launcher
