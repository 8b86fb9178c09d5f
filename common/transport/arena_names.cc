// Names of segments, and the removal of those whose owner is gone.

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "common/transport/arena.h"
#include "common/transport/arena_layout.h"

namespace k3::transport {

namespace {

constexpr char kShmFolder[] = "/dev/shm";

bool legal_in_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
}

/// True if this was an arena of a dead process, and is removed now.
bool sweep_one(const std::string& name) {
    Fd fd(::shm_open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0));
    if (!fd.valid()) return false;
    Result<ArenaHeader> header = read_arena_header(fd, name);
    if (!header.has_value() || !certainly_gone(header->owner())) return false;
    return ::shm_unlink(name.c_str()) == 0;
}

std::string run_prefix(std::uint64_t run_id) {
    char hex[17] = {};
    std::to_chars(hex, hex + 16, run_id, 16);
    return std::string(kSegmentPrefix) + hex + "-";
}

std::vector<std::string> sweep_names_with(std::string_view prefix) {
    std::vector<std::string> swept;
    std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(kShmFolder), ::closedir);
    if (!folder) return swept;
    while (const dirent* entry = ::readdir(folder.get())) {
        std::string name = std::string("/") + entry->d_name;
        if (name.starts_with(prefix) && check_segment_name(name).has_value() && sweep_one(name))
            swept.push_back(name);
    }
    return swept;
}

}  // namespace

std::string segment_path(const std::string& name) { return kShmFolder + name; }

Status check_segment_name(std::string_view name) {
    const bool legal = name.size() > kSegmentPrefix.size() && name.size() <= kMaxSegmentName &&
                       name.starts_with(kSegmentPrefix) &&
                       std::all_of(name.begin() + 1, name.end(), legal_in_name);
    if (legal) return {};
    std::string shown;
    for (char c : name.substr(0, kMaxSegmentName)) shown += c >= 0x20 && c < 0x7F ? c : '?';
    return Error{ErrorCode::invalid_argument,
                 "\"" + shown + "\" is not the name of a segment: \"/k3-\" and letters, digits, " +
                     "'-', '_', '.', at most " + std::to_string(kMaxSegmentName) + " bytes",
                 ""};
}

Result<ArenaHeader> read_arena_header(const Fd& segment, const std::string& name) {
    ArenaHeader header;
    ssize_t n = 0;
    do n = ::pread(segment.get(), &header, sizeof(header), 0);
    while (n < 0 && errno == EINTR);
    if (n < 0) return Error{ErrorCode::io, "segment " + name + ": " + std::strerror(errno), ""};
    if (n != ssize_t{sizeof(header)} || header.magic != kArenaMagic)
        return Error{ErrorCode::corrupt, "segment " + name + " is no arena of k3pipe",
                     "check the sender of this message"};
    return header;
}

std::string segment_name(std::uint64_t run_id, std::string_view service) {
    std::string head = run_prefix(run_id);
    std::string tail = "-" + std::to_string(::getpid());
    std::string middle(service.substr(0, kMaxSegmentName - head.size() - tail.size()));
    std::replace_if(
        middle.begin(), middle.end(), [](char c) { return !legal_in_name(c); }, '_');
    return head + middle + tail;
}

bool segment_in_use(const msg::SegmentProbe& probe) {
    if (!check_segment_name(probe.segment).has_value()) return false;
    Fd fd(::shm_open(probe.segment.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0));
    if (!fd.valid()) return false;
    Result<ArenaHeader> header = read_arena_header(fd, probe.segment);
    return header.has_value() && header->nonce == probe.nonce && !certainly_gone(header->owner());
}

std::vector<std::string> sweep_dead_segments() { return sweep_names_with(kSegmentPrefix); }
std::vector<std::string> sweep_dead_segments(std::uint64_t run_id) {
    return sweep_names_with(run_prefix(run_id));
}

}  // namespace k3::transport
