#pragma once
// A session as a file: one per stage, with the state of the stage's layers and the ids that it
// stands for. docs/formats/session.md has the layout.
//
// The state after a prefix of ids is the same bits whoever computed it, on any number of threads
// and with any instruction set. So a file needs to say only of which checkpoint, layers and
// settings it is, and may be used by any later process that has the same.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/model/config.h"
#include "services/trunk/session.h"

namespace k3::trunk {

/// What the state of a session depends on besides its ids.
struct SessionOrigin {
    std::string fingerprint;  // of the checkpoint, 32 hex digits
    LayerRange range;
    std::uint32_t total_layers = 0;
    // Settings, so the fingerprint does not have them.
    float lora_norm_eps = 0;
    model::MlaCache cache = model::MlaCache::f32;
};

/// Asked between two pieces of a file: true ends the work with `cancelled`. Null: never.
using GiveUp = std::function<bool()>;

/// Of the file of a session with so many ids.
std::uint64_t session_file_bytes(const SessionLayout& layout, std::uint64_t n_ids);

/// Saves `session`, whose positions hold `ids`: as many as it has. The file is complete and on the
/// disk, or the one that was there before is unchanged. Returns its bytes.
/// Errors: those of AtomicFile, cancelled.
Result<std::uint64_t> write_session_file(const std::filesystem::path& path,
                                         const SessionOrigin& origin, const SessionLayout& layout,
                                         std::span<const std::uint32_t> ids, Session& session,
                                         const GiveUp& give_up = {});

/// Whether the file begins like a saved session, of any version. False if there is none.
bool is_session_file(const std::filesystem::path& path);

/// A saved session whose header and ids have been read and found good. While it lives the file has
/// a shared lock (flock), and a new time of modification: it is in use, and was used last.
class SessionFile {
  public:
    /// `max_positions`: the model's context. Borrows `layout`.
    /// Errors, with the names and numbers of both sides: not_found, io; corrupt (not a saved
    /// session, truncated, a wrong checksum, impossible numbers); unsupported (another version of
    /// the format); incompatible (another checkpoint, other layers, another epsilon, the cache in
    /// other values).
    static Result<SessionFile> open(const std::filesystem::path& path, const SessionOrigin& origin,
                                    const SessionLayout& layout, std::uint64_t max_positions);

    /// The ids that the state stands for, at least one.
    std::span<const std::uint32_t> ids() const noexcept { return ids_; }

    /// Fills a session that has room for all positions. After an error it holds nonsense and must
    /// be dropped. Errors: corrupt (naming the layer), io, cancelled.
    Status read_into(Session& session, const GiveUp& give_up = {}) const;

  private:
    SessionFile(std::filesystem::path path, Fd fd, const SessionLayout& layout)
        : path_(std::move(path)), fd_(std::move(fd)), layout_(layout) {}
    Status read_ids(std::uint64_t n_ids);

    std::filesystem::path path_;
    Fd fd_;
    const SessionLayout& layout_;
    std::vector<std::uint32_t> ids_;
};

}  // namespace k3::trunk
