#include "common/transport/lane_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "common/transport/arena_layout.h"

namespace k3::transport {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr std::size_t kMostSlotBytes = std::size_t{64} << 20U;

/// Not private: the word is shared between processes.
void futex(LaneWord& word, int operation, std::uint32_t value, const timespec* timeout) noexcept {
    ::syscall(SYS_futex, &word.value, operation, value, timeout, nullptr, 0);
}

void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::size_t padded(std::size_t bytes) noexcept { return (bytes + 63) / 64 * 64; }

Error unusable(ErrorCode code, const std::string& path, const std::string& what) {
    return {code, "the fast lanes in " + path + " " + what, "restart the service that owns them"};
}

std::string path_of(const msg::LaneOffer& offer) {
    return "/proc/" + std::to_string(offer.pid) + "/fd/" + std::to_string(offer.fd);
}

bool is_slot_size(std::uint32_t bytes) noexcept {
    return bytes >= kLanePage && bytes % kLanePage == 0 && bytes <= kMostSlotBytes;
}

std::size_t size_of(const LaneHeader& header) noexcept {
    return kLanePage +
           std::size_t{header.n_lanes} * (std::size_t{header.request_bytes} + header.reply_bytes);
}

Status check_header(const LaneHeader& header, const msg::LaneOffer& offer, const Fd& fd) {
    if (header.nonce != offer.nonce)
        return unusable(ErrorCode::stale, path_of(offer), "are those of another process");
    if (header.layout_version != kLaneLayoutVersion)
        return unusable(ErrorCode::incompatible, path_of(offer),
                        "have layout version " + std::to_string(header.layout_version) +
                            ", this program uses " + std::to_string(kLaneLayoutVersion));
    struct stat info {};
    const bool fits = header.n_lanes <= kMaxLanes && offer.index < header.n_lanes &&
                      is_slot_size(header.request_bytes) && is_slot_size(header.reply_bytes) &&
                      ::fstat(fd.get(), &info) == 0 &&
                      static_cast<std::uint64_t>(info.st_size) >= size_of(header);
    if (!fits)
        return unusable(ErrorCode::corrupt, path_of(offer), "are not what their header says");
    return {};
}

}  // namespace

// ---- words -------------------------------------------------------------------------------------

void spin_on(const LaneWord& word, std::uint32_t value, Clock::time_point until) noexcept {
    while (word.value.load(std::memory_order_acquire) == value && Clock::now() < until) relax();
}

void sleep_on(LaneWord& word, std::uint32_t value, Deadline deadline) noexcept {
    const std::int64_t ms = deadline.remaining_ms();
    const timespec timeout{ms / 1000, (ms % 1000) * 1'000'000};
    word.is_slept_on.store(1);  // before the kernel looks at the value once more
    futex(word, FUTEX_WAIT, value, &timeout);
    word.is_slept_on.store(0);
}

void set_and_wake(LaneWord& word, std::uint32_t value) noexcept {
    word.value.store(value);
    if (word.is_slept_on.load() != 0) futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

// ---- slots -------------------------------------------------------------------------------------

std::size_t LaneSlot::size_of(std::span<const std::byte> envelope,
                              const std::vector<msg::Bytes>& frames) noexcept {
    std::size_t bytes = padded(envelope.size());
    for (const msg::Bytes& frame : frames) bytes += padded(frame.size());
    return bytes;
}

void LaneSlot::put(std::uint32_t number, std::uint64_t token, std::span<const std::byte> envelope,
                   const std::vector<msg::Bytes>& frames) const noexcept {
    LaneHead& to = head();
    to.token = token;
    to.envelope_bytes = static_cast<std::uint32_t>(envelope.size());
    to.n_frames = static_cast<std::uint32_t>(frames.size());
    std::byte* out = memory_ + sizeof(LaneHead);
    if (!envelope.empty()) std::memcpy(out, envelope.data(), envelope.size());
    out += padded(envelope.size());
    for (std::size_t i = 0; i < frames.size(); ++i) {
        to.frame_bytes[i] = static_cast<std::uint32_t>(frames[i].size());
        if (!frames[i].empty()) std::memcpy(out, frames[i].data(), frames[i].size());
        out += padded(frames[i].size());
    }
    set_and_wake(to.number, number);
}

Status LaneSlot::take(std::uint32_t number, msg::Bytes& buffer, Incoming& message) const {
    const LaneHead& from = head();
    // Copied before they are checked: the writer may be anything.
    const std::size_t envelope_bytes = from.envelope_bytes;
    const std::size_t n_frames = from.n_frames;
    std::size_t frame_bytes[kMaxLaneFrames] = {};
    std::size_t needed = padded(envelope_bytes);
    for (std::size_t i = 0; i < std::min(n_frames, kMaxLaneFrames); ++i) {
        frame_bytes[i] = from.frame_bytes[i];
        needed += padded(frame_bytes[i]);
    }
    if (n_frames > kMaxLaneFrames || !fits(needed))
        return Error{ErrorCode::corrupt,
                     "a message of " + std::to_string(n_frames) + " frames and " +
                         std::to_string(needed) + " bytes stands in a slot of " +
                         std::to_string(bytes_),
                     "restart the service that wrote it"};
    const std::byte* in = memory_ + sizeof(LaneHead);
    buffer.assign(in, in + envelope_bytes);
    in += padded(envelope_bytes);
    message.frames.clear();
    for (std::size_t i = 0; i < n_frames; ++i) {
        message.frames.emplace_back(in, in + frame_bytes[i]);
        in += padded(frame_bytes[i]);
    }
    message.envelope = buffer;
    memory_fence();
    if (from.number.value.load() != number)
        return Error{ErrorCode::stale,
                     "message " + std::to_string(number) + " changed while it was read", ""};
    return {};
}

// ---- the segment -------------------------------------------------------------------------------

Result<LaneSegment> LaneSegment::create(const Sizes& sizes) {
    K3_CHECK(sizes.n_lanes > 0 && sizes.n_lanes <= kMaxLanes && is_slot_size(sizes.request_bytes) &&
                 is_slot_size(sizes.reply_bytes),
             std::to_string(sizes.n_lanes) + " lanes");
    LaneSegment segment;
    segment.header_.n_lanes = sizes.n_lanes;
    segment.header_.request_bytes = sizes.request_bytes;
    segment.header_.reply_bytes = sizes.reply_bytes;
    std::random_device random;
    segment.header_.nonce = (std::uint64_t{random()} << 32U) | random();
    segment.fd_ = Fd(::memfd_create("k3-lanes", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const int fd = segment.fd_.get();
    const LaneHeader& header = segment.header_;
    const bool made = segment.fd_.valid() &&
                      ::ftruncate(fd, static_cast<off_t>(size_of(header))) == 0 &&
                      ::pwrite(fd, &header, sizeof(header), 0) == ssize_t{sizeof(header)} &&
                      ::fcntl(fd, F_ADD_SEALS, kSeals) == 0;
    if (!made)
        return Error{ErrorCode::io,
                     std::string("cannot make shared memory for lanes: ") + std::strerror(errno),
                     "everything goes through ZeroMQ instead"};
    RETURN_IF_ERROR(segment.map());
    return segment;
}

Result<LaneSegment> LaneSegment::open(const msg::LaneOffer& offer) {
    const std::string path = path_of(offer);
    LaneSegment segment;
    segment.fd_ = Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (!segment.fd_.valid())
        return unusable(ErrorCode::not_found, path,
                        std::string("cannot be opened: ") + std::strerror(errno));
    const int fd = segment.fd_.get();
    // Only a memfd has seals. Without them the mapping could fail under our hands.
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        return unusable(ErrorCode::corrupt, path, "are none: the memory could be cut off");
    LaneHeader& header = segment.header_;
    if (::pread(fd, &header, sizeof(header), 0) != ssize_t{sizeof(header)} ||
        header.magic != kLaneMagic)
        return unusable(ErrorCode::corrupt, path, "are none");
    RETURN_IF_ERROR(check_header(header, offer, segment.fd_));
    RETURN_IF_ERROR(segment.map());
    return segment;
}

LaneSegment::LaneSegment(LaneSegment&& other) noexcept
    : header_(other.header_),
      fd_(std::move(other.fd_)),
      base_(std::exchange(other.base_, nullptr)) {}

LaneSegment::~LaneSegment() {
    if (base_ != nullptr) ::munmap(base_, size_of(header_));
}

Status LaneSegment::map() {
    void* base =
        ::mmap(nullptr, size_of(header_), PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (base == MAP_FAILED)
        return Error{ErrorCode::io, std::string("cannot map fast lanes: ") + std::strerror(errno),
                     "everything goes through ZeroMQ instead"};
    base_ = static_cast<std::byte*>(base);
    return {};
}

msg::LaneOffer LaneSegment::offer() const noexcept {
    msg::LaneOffer offer;
    offer.pid = static_cast<std::uint32_t>(::getpid());
    offer.fd = static_cast<std::uint32_t>(fd_.get());
    offer.nonce = header_.nonce;
    return offer;
}

std::size_t LaneSegment::lane_offset(std::uint32_t lane) const noexcept {
    return kLanePage + lane * (std::size_t{header_.request_bytes} + header_.reply_bytes);
}

LaneSlot LaneSegment::request(std::uint32_t lane) const noexcept {
    return {base_ + lane_offset(lane), header_.request_bytes};
}

LaneSlot LaneSegment::reply(std::uint32_t lane) const noexcept {
    return {base_ + lane_offset(lane) + header_.request_bytes, header_.reply_bytes};
}

}  // namespace k3::transport
