// `k3pipe init`: writes a pipeline file with budgets for some memory.

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>

#include "common/base/fd.h"
#include "common/base/memory.h"
#include "common/storage/file.h"
#include "launcher/commands.h"
#include "launcher/preset.h"

namespace k3::launcher {

namespace {

/// A file that must not exist yet.
Status write_new(const std::filesystem::path& path, std::string_view text) {
    Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd.valid() && errno == EEXIST)
        return Error{ErrorCode::invalid_argument, fmt::format("{} exists already", path.string()),
                     "choose another name, or remove it"};
    if (!fd.valid()) return storage::system_error(errno, "create", path);
    while (!text.empty()) {
        const ssize_t n = ::write(fd.get(), text.data(), text.size());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            const int problem = errno;
            ::unlink(path.c_str());
            return storage::system_error(problem, "write", path);
        }
        text.remove_prefix(static_cast<std::size_t>(n));
    }
    return Status::ok();
}

Status write_preset(const InitCommand& command) {
    ASSIGN_OR_RETURN(const AvailableMemory available, available_memory());
    ASSIGN_OR_RETURN(const Preset preset, find_preset(command.preset, available));
    ASSIGN_OR_RETURN(const StageWeights weights, open_files(command.files));
    ASSIGN_OR_RETURN(const std::string text,
                     preset_file(preset, command.files, weights, machine_cores()));
    if (command.output.empty()) {
        fmt::print("{}", text);
        return Status::ok();
    }
    RETURN_IF_ERROR(write_new(command.output, text));
    fmt::print("wrote {}; k3pipe plan -c {} shows its memory\n", command.output.string(),
               command.output.string());
    return Status::ok();
}

}  // namespace

int init(const InitCommand& command) {
    const Status written = write_preset(command);
    return written.has_value() ? kExitOk : report(written.error());
}

}  // namespace k3::launcher
