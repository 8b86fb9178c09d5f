#include "services/trunk/session_retention.h"

#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <system_error>
#include <utility>

#include "common/base/settings.h"
#include "common/model/session_name.h"
#include "common/storage/file.h"
#include "services/trunk/session_file.h"

namespace k3::trunk {

namespace fs = std::filesystem;

namespace {

/// "chat-1" of "chat-1.layers-0-45".
std::string session_of(const std::string& file_name) {
    const std::size_t mark = file_name.rfind(model::kSessionLayersMark);
    if (mark == std::string::npos) return file_name;
    const std::size_t layers = mark + model::kSessionLayersMark.size();
    const bool is_part = file_name.find_first_not_of("0123456789-", layers) == std::string::npos;
    return is_part ? file_name.substr(0, mark) : file_name;
}

struct SavedSession {
    std::vector<fs::path> files;
    std::uint64_t bytes = 0;
    fs::file_time_type used_at = fs::file_time_type::min();  // the latest of the files'
    bool is_written = false;
};

std::map<std::string, SavedSession> sessions_in(const fs::path& directory) {
    std::map<std::string, SavedSession> sessions;
    std::vector<std::string> parts;
    std::error_code error;
    for (fs::directory_iterator at(directory, error), end; !error && at != end;
         at.increment(error)) {
        const std::string name = at->path().filename().string();
        std::error_code ignored;
        if (name.starts_with('.')) {
            parts.push_back(name);
        } else if (at->is_regular_file(ignored) && !at->is_symlink(ignored) &&
                   is_session_file(at->path())) {
            SavedSession& session = sessions[session_of(name)];
            session.files.push_back(at->path());
            session.bytes += at->file_size(ignored);
            session.used_at = std::max(session.used_at, at->last_write_time(ignored));
        }
    }
    // ".NAME.PID.partial" (common/storage/atomic_file.h), with or without layers behind the name.
    for (auto& [name, session] : sessions) {
        const std::string begin = "." + name + ".";
        session.is_written = std::any_of(parts.begin(), parts.end(), [&](const std::string& part) {
            return part.starts_with(begin);
        });
    }
    return sessions;
}

/// Removes all files, or none if one of them is being read.
bool remove(const SavedSession& session) {
    std::vector<Fd> locks;
    for (const fs::path& file : session.files) {
        auto opened = storage::open_regular(file);
        if (!opened.has_value()) continue;  // somebody else was faster
        if (::flock(opened->fd.get(), LOCK_EX | LOCK_NB) != 0) return false;
        locks.push_back(std::move(opened->fd));
    }
    for (const fs::path& file : session.files) ::unlink(file.c_str());
    return true;
}

}  // namespace

Result<std::vector<std::string>> make_room(const fs::path& directory, std::uint64_t limit_bytes,
                                           const fs::path& file, std::uint64_t bytes) {
    std::map<std::string, SavedSession> sessions = sessions_in(directory);
    const std::string own = session_of(file.filename().string());
    std::uint64_t taken = bytes;
    for (const auto& [name, session] : sessions) taken += session.bytes;
    // What it replaces goes; the files of other stages stay.
    std::error_code error;
    if (is_session_file(file)) taken -= std::min<std::uint64_t>(taken, fs::file_size(file, error));

    std::vector<std::pair<fs::file_time_type, std::string>> oldest_first;
    std::uint64_t may_go = 0;
    for (const auto& [name, session] : sessions) {
        if (name == own || session.is_written) continue;
        oldest_first.emplace_back(session.used_at, name);
        may_go += session.bytes;
    }
    std::sort(oldest_first.begin(), oldest_first.end());
    const auto no_room = [&](std::uint64_t least) {
        return Error{ErrorCode::resource_exhausted,
                     "session '" + own + "' needs " + format_bytes(bytes) +
                         ", and with what must stay the sessions in " + directory.string() +
                         " would take " + format_bytes(least) + " of the " +
                         format_bytes(limit_bytes) + " that they may",
                     "raise --session-dir-bytes, or remove sessions"};
    };
    if (taken - may_go > limit_bytes) return no_room(taken - may_go);
    std::vector<std::string> removed;
    for (const auto& [used_at, name] : oldest_first) {
        if (taken <= limit_bytes) break;
        if (!remove(sessions[name])) continue;
        taken -= sessions[name].bytes;
        removed.push_back(name);
    }
    if (taken > limit_bytes) return no_room(taken);
    return removed;
}

}  // namespace k3::trunk
