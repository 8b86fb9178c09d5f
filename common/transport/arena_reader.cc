// Reading goes through pread, not through a mapping: a segment that is truncated under the reader
// gives a short read, where a mapping would give SIGBUS. The kernel copies 14 KiB in about 2 us,
// against 80 us and more for the message that pointed here.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/transport/arena.h"
#include "common/transport/arena_layout.h"

namespace k3::transport {

namespace {

constexpr std::size_t kMaxOpenSegments = 64;

struct Segment {
    Fd fd;
    ArenaHeader header;
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
};

struct Generation {
    std::uint64_t generation = 0;
    std::uint64_t bytes = 0;
};

Error truncated(const std::string& name, std::uint64_t bytes, std::uint64_t needed) {
    return {ErrorCode::corrupt,
            "segment " + name + " ends after " + std::to_string(bytes) + " bytes, " +
                std::to_string(needed) + " are needed",
            "restart the service that owns it"};
}

Error invalid(const msg::ShmPayload& payload, const std::string& what) {
    return {ErrorCode::invalid_argument, "segment " + payload.segment + " " + what,
            "check the sender of this message"};
}

Error stale(const msg::ShmPayload& payload, std::uint64_t found) {
    return {ErrorCode::stale,
            "the slot at offset " + std::to_string(payload.offset) + " of segment " +
                payload.segment + " has generation " + std::to_string(found) +
                ", the message meant " + std::to_string(payload.generation),
            "repeat the request; if it happens again, give the sender's arena more slots"};
}

/// False at the end of the segment or on an error.
bool read_fully(const Fd& fd, void* to, std::size_t bytes, std::uint64_t offset) {
    auto* out = static_cast<std::byte*>(to);
    while (bytes > 0) {
        ssize_t n = ::pread(fd.get(), out, bytes, static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        out += n;
        offset += static_cast<std::uint64_t>(n);
        bytes -= static_cast<std::size_t>(n);
    }
    return true;
}

std::uint64_t size_now(const Segment& segment) {
    struct stat info {};
    return ::fstat(segment.fd.get(), &info) == 0 ? static_cast<std::uint64_t>(info.st_size) : 0;
}

Status check_geometry(const ArenaHeader& header, std::uint64_t file_bytes,
                      const std::string& name) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 46U;
    const std::uint64_t table_end = kArenaPage + std::uint64_t{header.n_slots} * sizeof(SlotEntry);
    const bool sane = header.n_slots > 0 && header.slot_entry_bytes == sizeof(SlotEntry) &&
                      header.slot_bytes > 0 && header.slot_bytes % kArenaPage == 0 &&
                      header.slot_bytes <= kMost / header.n_slots &&
                      header.data_offset >= table_end && header.data_offset <= kMost;
    if (!sane)
        return Error{ErrorCode::corrupt, "segment " + name + " has a header that makes no sense",
                     "restart the service that owns it"};
    const std::uint64_t needed = header.data_offset + header.slot_bytes * header.n_slots;
    if (file_bytes < needed) return truncated(name, file_bytes, needed);
    return {};
}

Result<Segment> open_segment(const std::string& name) {
    RETURN_IF_ERROR(check_segment_name(name));
    Segment segment;
    segment.fd = Fd(::shm_open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0));
    if (!segment.fd.valid())
        return Error{errno == ENOENT ? ErrorCode::not_found : ErrorCode::io,
                     "segment " + name + " cannot be opened: " + std::strerror(errno),
                     "check that both services run on this box as the same user"};
    ASSIGN_OR_RETURN(segment.header, read_arena_header(segment.fd, name));
    if (segment.header.layout_version != kArenaLayoutVersion)
        return Error{ErrorCode::incompatible,
                     "segment " + name + " has layout version " +
                         std::to_string(segment.header.layout_version) + ", this program reads " +
                         std::to_string(kArenaLayoutVersion),
                     "use programs of the same release on both sides"};
    struct stat info {};
    if (::fstat(segment.fd.get(), &info) != 0)
        return Error{ErrorCode::io, "segment " + name + ": " + std::strerror(errno), ""};
    segment.device = info.st_dev;
    segment.inode = info.st_ino;
    RETURN_IF_ERROR(check_geometry(segment.header, static_cast<std::uint64_t>(info.st_size), name));
    return segment;
}

}  // namespace

class ArenaReader::Impl {
  public:
    bool can_read(const msg::SegmentProbe& probe) {
        auto found = segments_.find(probe.segment);
        if (found != segments_.end() && found->second.header.nonce == probe.nonce) return true;
        Result<Segment*> opened = reopen(probe.segment);
        return opened.has_value() && (*opened)->header.nonce == probe.nonce;
    }

    Result<msg::Bytes> read(const msg::ShmPayload& payload) {
        auto found = segments_.find(payload.segment);
        if (found == segments_.end()) {
            ASSIGN_OR_RETURN(Segment * fresh, reopen(payload.segment));
            return read_slot(*fresh, payload);
        }
        Result<msg::Bytes> bytes = read_slot(found->second, payload);
        if (bytes.has_value()) return bytes;
        // The name may mean another segment by now: that of a restarted owner.
        const std::uint64_t device = found->second.device;
        const std::uint64_t inode = found->second.inode;
        Result<Segment*> fresh = reopen(payload.segment);
        if (!fresh.has_value() || ((*fresh)->device == device && (*fresh)->inode == inode))
            return bytes;
        return read_slot(**fresh, payload);
    }

  private:
    Result<Segment*> reopen(const std::string& name) {
        segments_.erase(name);
        ASSIGN_OR_RETURN(Segment segment, open_segment(name));
        drop_removed_segments();
        return &segments_.emplace(name, std::move(segment)).first->second;
    }

    /// A segment keeps its memory as long as somebody holds it open, also after its removal.
    void drop_removed_segments() {
        std::erase_if(segments_, [](const auto& entry) {
            struct stat info {};
            return ::fstat(entry.second.fd.get(), &info) != 0 || info.st_nlink == 0;
        });
        while (segments_.size() >= kMaxOpenSegments) segments_.erase(segments_.begin());
    }

    static Result<msg::Bytes> read_slot(const Segment& segment, const msg::ShmPayload& payload) {
        const ArenaHeader& header = segment.header;
        const std::uint64_t from_first = payload.offset - header.data_offset;
        const std::uint64_t slot = from_first / header.slot_bytes;
        if (payload.offset < header.data_offset || from_first % header.slot_bytes != 0 ||
            slot >= header.n_slots)
            return invalid(payload, "has no slot at offset " + std::to_string(payload.offset));
        if (payload.bytes > header.slot_bytes)
            return invalid(payload, "has slots of " + std::to_string(header.slot_bytes) +
                                        " bytes, the message wants " +
                                        std::to_string(payload.bytes));
        if (payload.generation % 2 != 0)
            return invalid(payload, "is named with generation " +
                                        std::to_string(payload.generation) +
                                        ", which no complete slot has");

        // An 8-byte generation that is read in pieces cannot pass for the expected one: its lowest
        // byte changes with the first store of a rewrite.
        const std::uint64_t entry_offset = kArenaPage + slot * sizeof(SlotEntry);
        Generation before;
        if (!read_fully(segment.fd, &before, sizeof(before), entry_offset))
            return truncated(payload.segment, size_now(segment), entry_offset + sizeof(before));
        if (before.generation != payload.generation) return stale(payload, before.generation);
        if (before.bytes != payload.bytes)
            return invalid(payload, "holds " + std::to_string(before.bytes) +
                                        " bytes in this slot, the message wants " +
                                        std::to_string(payload.bytes));
        memory_fence();
        msg::Bytes bytes(payload.bytes);
        if (!read_fully(segment.fd, bytes.data(), bytes.size(), payload.offset))
            return truncated(payload.segment, size_now(segment), payload.offset + payload.bytes);
        memory_fence();
        Generation after;
        if (!read_fully(segment.fd, &after, sizeof(after), entry_offset))
            return truncated(payload.segment, size_now(segment), entry_offset + sizeof(after));
        if (after.generation != payload.generation) return stale(payload, after.generation);
        return bytes;
    }

    std::map<std::string, Segment> segments_;
};

ArenaReader::ArenaReader() : impl_(std::make_unique<Impl>()) {}
ArenaReader::~ArenaReader() = default;
bool ArenaReader::can_read(const msg::SegmentProbe& probe) { return impl_->can_read(probe); }
Result<msg::Bytes> ArenaReader::read(const msg::ShmPayload& payload) {
    return impl_->read(payload);
}

}  // namespace k3::transport
