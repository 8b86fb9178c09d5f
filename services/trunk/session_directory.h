#pragma once
// The saved sessions of a stage: files of one directory, which whoever starts the stage chooses.
//
// Clients give names, never paths. A name has no slash and does not begin with a dot, so nothing
// outside the directory can be meant, nor anything hidden in it; a file that is not a saved session
// is never replaced or removed.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

#include "common/base/result.h"
#include "services/trunk/session_file.h"

namespace k3::trunk {

class SessionDirectory {
  public:
    struct Options {
        std::filesystem::path path;     // empty if this stage keeps no sessions; made at the first
                                        // save
        std::uint64_t limit_bytes = 0;  // of all sessions in it; 0: none (session_retention.h)
    };
    /// For the start: whether `path` is, or could be made, a directory. Error: invalid_argument.
    static Status check_place(const std::filesystem::path& path);

    /// Removes what killed processes left of sessions in the directory. Borrows `layout`.
    SessionDirectory(Options options, SessionOrigin origin, const SessionLayout& layout,
                     std::uint64_t max_positions)
        : path_(std::move(options.path)),
          limit_bytes_(options.limit_bytes),
          origin_(std::move(origin)),
          layout_(layout),
          max_positions_(max_positions) {
        sweep();
    }

    /// Whether a session could be saved as `name`, as far as that can be known before its end.
    /// Errors: unsupported (no directory), invalid_argument (name, or a file that is something
    /// else), not_found, io (the directory cannot be made or written).
    Status check_save(const std::string& name) const;

    /// `ids`: one for each position. Removes sessions that were not used for the longest time if
    /// the limit asks for it. Returns the file's bytes.
    /// Errors: those of check_save, make_room and write_session_file, invalid_argument (number of
    /// ids).
    Result<std::uint64_t> save(const std::string& name, std::span<const std::uint32_t> ids,
                               Session& session, const GiveUp& give_up = {}) const;

    /// Errors: unsupported (no directory), invalid_argument (name), not_found (naming what is
    /// there of other layers), those of SessionFile::open.
    Result<SessionFile> open(const std::string& name) const;

  private:
    Status check(const std::string& name) const;
    std::filesystem::path file_of(const std::string& name) const;
    Error absent(const std::string& name) const;
    void sweep() const;

    std::filesystem::path path_;
    std::uint64_t limit_bytes_;
    SessionOrigin origin_;
    const SessionLayout& layout_;
    std::uint64_t max_positions_;
};

}  // namespace k3::trunk
