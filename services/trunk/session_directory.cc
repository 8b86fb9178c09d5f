#include "services/trunk/session_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/base/log.h"
#include "common/model/session_name.h"
#include "common/storage/atomic_file.h"
#include "common/storage/file.h"
#include "services/trunk/session_retention.h"

namespace k3::trunk {

namespace fs = std::filesystem;

namespace {

/// The directory with its parents; private, because what people wrote can be read from a state.
Status make_directory(const fs::path& path) {
    std::error_code error;
    if (path.has_parent_path()) fs::create_directories(path.parent_path(), error);
    if (error) return storage::system_error(error.value(), "create", path.parent_path());
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
        return storage::system_error(errno, "create", path);
    if (::access(path.c_str(), W_OK | X_OK) != 0)
        return storage::system_error(errno, "write to", path);
    return Status::ok();
}

}  // namespace

Status SessionDirectory::check_place(const fs::path& path) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (path.empty() || !fs::exists(status) || fs::is_directory(status)) return Status::ok();
    return Error{ErrorCode::invalid_argument,
                 path.string() + " is to keep sessions and is not a directory",
                 "give session_dir another name, or remove it"};
}

Status SessionDirectory::check(const std::string& name) const {
    RETURN_IF_ERROR(model::check_session_name(name));
    if (!path_.empty()) return Status::ok();
    return Error{ErrorCode::unsupported,
                 "this trunk keeps no sessions: '" + name + "' can be neither saved nor loaded",
                 "start k3-trunk with --session-dir DIRECTORY"};
}

/// A stage that has all layers owns the plain name; parts of the model say which they are.
fs::path SessionDirectory::file_of(const std::string& name) const {
    const LayerRange range = origin_.range;
    if (range.first == 0 && range.count == origin_.total_layers) return path_ / name;
    return path_ / (name + std::string(model::kSessionLayersMark) + std::to_string(range.first) +
                    "-" + std::to_string(range.end() - 1));
}

Status SessionDirectory::check_save(const std::string& name) const {
    RETURN_IF_ERROR(check(name));
    RETURN_IF_ERROR(make_directory(path_));
    const fs::path file = file_of(name);
    std::error_code error;
    const fs::file_type type = fs::symlink_status(file, error).type();
    if (type == fs::file_type::not_found) return Status::ok();
    if (type == fs::file_type::regular && is_session_file(file)) return Status::ok();
    return Error{ErrorCode::invalid_argument,
                 file.string() + " is there and not a saved session, so it is not replaced",
                 "choose another name, or remove it"};
}

Result<std::uint64_t> SessionDirectory::save(const std::string& name,
                                             std::span<const std::uint32_t> ids, Session& session,
                                             const GiveUp& give_up) const {
    if (ids.size() != session.position() || ids.empty())
        return Error{ErrorCode::invalid_argument,
                     "session " + std::to_string(session.id()) + " has " +
                         std::to_string(session.position()) + " positions and cannot be saved as " +
                         std::to_string(ids.size()) + " ids",
                     "give the id of every position, of at least one"};
    RETURN_IF_ERROR(check_save(name));
    if (limit_bytes_ > 0) {
        ASSIGN_OR_RETURN(
            const std::vector<std::string> removed,
            make_room(path_, limit_bytes_, file_of(name), session_file_bytes(layout_, ids.size())));
        for (const std::string& old : removed)
            log::info("removed a saved session that was not used for the longest time name=" + old);
    }
    return write_session_file(file_of(name), origin_, layout_, ids, session, give_up);
}

Result<SessionFile> SessionDirectory::open(const std::string& name) const {
    RETURN_IF_ERROR(check(name));
    const fs::path file = file_of(name);
    std::error_code error;
    if (fs::symlink_status(file, error).type() == fs::file_type::not_found) return absent(name);
    return SessionFile::open(file, origin_, layout_, max_positions_);
}

void SessionDirectory::sweep() const {
    if (path_.empty()) return;
    storage::sweep_partial_files(path_, [](const std::string& name, const fs::path& partial) {
        std::error_code error;
        return model::check_session_name(name).has_value() &&
               (fs::file_size(partial, error) == 0 || is_session_file(partial));
    });
}

Error SessionDirectory::absent(const std::string& name) const {
    std::vector<std::string> others;
    std::error_code error;
    for (fs::directory_iterator at(path_, error), end; !error && at != end; at.increment(error)) {
        const std::string other = at->path().filename().string();
        if (other == name || other.starts_with(name + std::string(model::kSessionLayersMark)))
            others.push_back(other);
    }
    std::sort(others.begin(), others.end());
    std::string found;
    for (const std::string& other : others) found += (found.empty() ? "" : ", ") + other;
    const LayerRange range = origin_.range;
    return Error{ErrorCode::not_found,
                 "there is no saved session '" + name + "' of layers " +
                     std::to_string(range.first) + "-" + std::to_string(range.end() - 1) + " in " +
                     path_.string() + (found.empty() ? "" : ", only " + found),
                 others.empty() ? "save it first"
                                : "cut the layers into stages as they were when it was saved"};
}

}  // namespace k3::trunk
