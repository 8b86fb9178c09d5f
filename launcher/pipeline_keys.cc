#include "launcher/pipeline_keys.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <string.h>
#include <sys/file.h>

#include <array>
#include <cerrno>
#include <span>

#include "common/base/fd.h"
#include "common/storage/atomic_file.h"
#include "common/storage/file.h"
#include "common/transport/curve_keys.h"
#include "launcher/paths.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using transport::CurveKeys;

namespace {

/// Two makers at once: the second one sees what the first has written.
Result<Fd> lock_directory(const fs::path& directory) {
    Fd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd.valid()) return storage::system_error(errno, "open", directory);
    while (::flock(fd.get(), LOCK_EX) != 0)
        if (errno != EINTR) return storage::system_error(errno, "lock", directory);
    return fd;
}

Status write_keys(const CurveKeys& keys, const fs::path& path) {
    ASSIGN_OR_RETURN(storage::AtomicFile file,
                     storage::AtomicFile::create(path, CurveKeys::kFileBytes));
    std::array<char, CurveKeys::kFileBytes> text{};
    keys.write(text);
    Status written = file.append(std::as_bytes(std::span(text)));
    ::explicit_bzero(text.data(), text.size());
    RETURN_IF_ERROR(std::move(written));
    return file.commit();
}

}  // namespace

fs::path key_file_of(const PipelineSpec& spec) {
    if (!spec.keys.empty()) return spec.keys;
    const fs::path directory = default_key_directory();
    return directory.empty() ? fs::path() : directory / (spec.name + ".keys");
}

Result<std::string> make_key_file(const fs::path& path, bool replace) {
    const fs::path directory = path.parent_path();
    ASSIGN_OR_RETURN(const Fd lock, lock_directory(directory.empty() ? "." : directory));
    std::error_code code;
    RETURN_IF_ERROR(storage::check_replaceable(path, CurveKeys::kMagic, "a key file"));
    if (!replace && fs::symlink_status(path, code).type() != fs::file_type::not_found)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("key file {} exists, and new keys would lock out all who have these",
                        path.string()),
            "use it as it is, or make new keys for every box with --replace"};
    ASSIGN_OR_RETURN(const auto keys, CurveKeys::generate());
    RETURN_IF_ERROR(write_keys(*keys, path));
    return keys->fingerprint();
}

std::string describe_keys(const fs::path& path) {
    const auto keys = CurveKeys::load(path.string());
    if (!keys.has_value()) return "keys cannot be used: " + keys.error().sentence();
    return fmt::format("keys: {}, fingerprint {}", path.string(), (*keys)->fingerprint());
}

}  // namespace k3::launcher
