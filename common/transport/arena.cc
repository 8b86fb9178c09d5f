#include "common/transport/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "common/transport/arena_layout.h"
#include "common/transport/exit_files.h"

namespace k3::transport {

namespace {

std::uint64_t random_number() {
    std::random_device device;
    return (std::uint64_t{device()} << 32U) | device();
}

/// What /dev/shm can take now: its own limit, or the memory behind it if that is less.
std::uint64_t available_bytes() {
    struct statvfs info {};
    std::uint64_t available = 0;
    if (::statvfs("/dev/shm", &info) == 0) available = std::uint64_t{info.f_bavail} * info.f_bsize;
    std::ifstream file("/proc/meminfo");
    std::string key;
    std::uint64_t kib = 0;
    while (file >> key >> kib && key != "MemAvailable:") file.ignore(64, '\n');
    return key == "MemAvailable:" ? std::min(available, kib * 1024) : available;
}

Error no_space(const std::string& name, std::size_t bytes) {
    const std::uint64_t available = available_bytes();
    return {ErrorCode::resource_exhausted,
            "segment " + name + " needs " + std::to_string(bytes) +
                " bytes in /dev/shm, which has " + std::to_string(available) + " bytes left",
            "free or enlarge /dev/shm, or send tensors inline (payload = \"inline\")"};
}

Error system_error(const std::string& what, const std::string& name, int number) {
    return {ErrorCode::io, what + " segment " + name + ": " + std::strerror(number), ""};
}

/// Opens a new segment; one that a dead process left under the same name is replaced.
Result<Fd> create_segment(const std::string& name) {
    for (int attempt = 0;; ++attempt) {
        Fd fd(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
        if (fd.valid()) return fd;
        if (errno != EEXIST || attempt > 0) return system_error("cannot create", name, errno);
        Fd old(::shm_open(name.c_str(), O_RDONLY | O_CLOEXEC, 0));
        Result<ArenaHeader> header = read_arena_header(old, name);
        if (!header.has_value() || !certainly_gone(header->owner()))
            return Error{ErrorCode::resource_exhausted,
                         "segment " + name + " exists already" +
                             (header.has_value()
                                  ? " and belongs to process " + std::to_string(header->owner_pid)
                                  : ", and it is no arena of k3pipe"),
                         "give the arena another name, or remove " + segment_path(name)};
        ::shm_unlink(name.c_str());
    }
}

}  // namespace

class Arena::Impl {
  public:
    Impl() = default;
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;
    ~Impl() {
        if (base_ != nullptr) ::munmap(base_, size_);
        if (fd_.valid()) ::shm_unlink(probe_.segment.c_str());
    }

    Status open(const Options& options) {
        header_.magic = kArenaMagic;
        header_.layout_version = kArenaLayoutVersion;
        const ProcessIdentity self = ProcessIdentity::of_this_process();
        header_.owner_pid = self.pid;
        header_.owner_start_ticks = self.start_ticks;
        header_.owner_pid_namespace = self.pid_namespace;
        header_.nonce = random_number();
        header_.slot_bytes = round_to_page(options.slot_bytes);
        header_.n_slots = options.n_slots;
        header_.slot_entry_bytes = sizeof(SlotEntry);
        header_.data_offset = kArenaPage + round_to_page(options.n_slots * sizeof(SlotEntry));
        size_ = header_.data_offset + header_.slot_bytes * header_.n_slots;
        probe_ = {options.name, header_.nonce};

        // The limit of /dev/shm may exceed the memory, and then taking it would end other
        // processes.
        if (size_ > available_bytes()) return no_space(options.name, size_);
        ASSIGN_OR_RETURN(fd_, create_segment(options.name));
        exit_file_ = ExitFile(segment_path(options.name));
        // The owner is written before the space is taken, which may last: a process that dies in
        // between leaves a segment that can be swept.
        if (::pwrite(fd_.get(), &header_, sizeof(header_), 0) != ssize_t{sizeof(header_)})
            return no_space(options.name, size_);
        // Taken now, because a full /dev/shm would otherwise end the process at some later write.
        int problem = 0;
        do problem = ::posix_fallocate(fd_.get(), 0, static_cast<off_t>(size_));
        while (problem == EINTR);
        if (problem == ENOSPC || problem == ENOMEM || problem == EFBIG)
            return no_space(options.name, size_);
        if (problem != 0) return system_error("cannot take space for", options.name, problem);
        return map(options.name);
    }

    Result<msg::ShmPayload> write(std::span<const std::byte> bytes) {
        if (bytes.size() > header_.slot_bytes)
            return Error{ErrorCode::resource_exhausted,
                         "a tensor of " + std::to_string(bytes.size()) +
                             " bytes does not fit the slots of segment " + probe_.segment + " (" +
                             std::to_string(header_.slot_bytes) + " bytes)",
                         "send it inline"};
        const std::uint32_t slot = next_slot_;
        next_slot_ = (next_slot_ + 1) % header_.n_slots;
        SlotEntry& entry = entries_[slot];
        const std::uint64_t generation = entry.generation.load(std::memory_order_relaxed);
        const std::uint64_t offset = header_.data_offset + slot * header_.slot_bytes;
        entry.generation.store(generation + 1, std::memory_order_relaxed);
        memory_fence();  // nobody sees new bytes under the old generation
        if (!bytes.empty()) std::memcpy(base_ + offset, bytes.data(), bytes.size());
        entry.bytes.store(bytes.size(), std::memory_order_relaxed);
        entry.generation.store(generation + 2, std::memory_order_release);
        return msg::ShmPayload{probe_.segment, offset, bytes.size(), generation + 2};
    }

    const ArenaHeader& header() const { return header_; }
    const msg::SegmentProbe& probe() const { return probe_; }

  private:
    Status map(const std::string& name) {
        void* base = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
        if (base == MAP_FAILED) return system_error("cannot map", name, errno);
        base_ = static_cast<std::byte*>(base);
        entries_ = reinterpret_cast<SlotEntry*>(base_ + kArenaPage);
        // Generations start anywhere: a message that means an earlier segment of this name finds
        // no match here.
        const std::uint64_t first = (random_number() >> 16U) << 1U;
        for (std::uint32_t i = 0; i < header_.n_slots; ++i)
            entries_[i].generation.store(first, std::memory_order_release);
        return {};
    }

    ArenaHeader header_;
    msg::SegmentProbe probe_;
    ExitFile exit_file_;
    Fd fd_;
    std::size_t size_ = 0;
    std::byte* base_ = nullptr;
    SlotEntry* entries_ = nullptr;
    std::uint32_t next_slot_ = 0;
};

Arena::Arena(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Arena::~Arena() = default;

Result<std::unique_ptr<Arena>> Arena::create(const Options& options) {
    RETURN_IF_ERROR(check_segment_name(options.name));
    constexpr std::size_t kMost = std::size_t{1} << 46U;
    if (options.n_slots == 0 || options.slot_bytes == 0 || options.slot_bytes > kMost ||
        options.slot_bytes > kMost / options.n_slots)
        return Error{ErrorCode::invalid_argument,
                     "segment " + options.name + " cannot have " + std::to_string(options.n_slots) +
                         " slots of " + std::to_string(options.slot_bytes) + " bytes",
                     ""};
    auto impl = std::make_unique<Impl>();
    RETURN_IF_ERROR(impl->open(options));
    return std::unique_ptr<Arena>(new Arena(std::move(impl)));
}

Result<msg::ShmPayload> Arena::write(std::span<const std::byte> bytes) {
    return impl_->write(bytes);
}
std::size_t Arena::slot_bytes() const noexcept { return impl_->header().slot_bytes; }
const msg::SegmentProbe& Arena::probe() const noexcept { return impl_->probe(); }

}  // namespace k3::transport
