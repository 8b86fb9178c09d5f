#include "common/storage/direct_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "common/base/memory_block.h"
#include "common/storage/file.h"

namespace k3::storage {

namespace {

/// Asking for O_DIRECT is not enough: some file systems take it and fail at the first read.
/// Returns why it does not work, or nothing.
std::string why_not_direct(const std::filesystem::path& path, int fd, Fd* direct) {
    struct statx facts {};
    if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 &&
        (facts.stx_mask & STATX_DIOALIGN) != 0) {
        if (facts.stx_dio_offset_align == 0) return "the file system has no direct reads";
        const auto wanted = std::max(facts.stx_dio_offset_align, facts.stx_dio_mem_align);
        if (wanted > kBlockBytes)
            return fmt::format("the device reads in blocks of {} bytes", wanted);
    }
    Fd opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    if (!opened.valid()) return std::generic_category().message(errno);
    Result<MemoryBlock> block = MemoryBlock::create(kBlockBytes, "a block");
    if (!block.has_value()) return block.error().message;
    if (::pread(opened.get(), block->data(), kBlockBytes, 0) < 0)
        return std::generic_category().message(errno);
    *direct = std::move(opened);
    return {};
}

}  // namespace

Result<DirectFile> DirectFile::open(const std::filesystem::path& path, Mode mode) {
    ASSIGN_OR_RETURN(OpenFile opened, open_regular(path));
    DirectFile file;
    file.path_ = path;
    file.bytes_ = opened.bytes;
    file.why_buffered_ = mode == Mode::buffered ? "direct reads are switched off"
                                                : why_not_direct(path, opened.fd.get(), &file.fd_);
    if (!file.is_direct()) file.fd_ = std::move(opened.fd);
    return file;
}

Status DirectFile::read(std::uint64_t offset, std::span<std::byte> dst) const {
    K3_DCHECK(offset % kBlockBytes == 0 && dst.size() % kBlockBytes == 0 &&
                  reinterpret_cast<std::uintptr_t>(dst.data()) % kBlockBytes == 0,
              fmt::format("offset {}, {} bytes at {}", offset, dst.size(),
                          static_cast<const void*>(dst.data())));
    const std::uint64_t wanted = std::min<std::uint64_t>(
        dst.size(), bytes_ - std::min(bytes_, offset));  // without what is behind the end
    std::uint64_t done = 0;
    while (done < wanted) {
        // What is asked for stays a multiple of the block, although a file need not end with one.
        const ssize_t got = ::pread(fd_.get(), dst.data() + done, dst.size() - done,
                                    static_cast<off_t>(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return system_error(errno, fmt::format("read {} bytes at offset {} of", wanted, offset),
                                path_);
        done += static_cast<std::uint64_t>(got);
        const bool ended = got == 0 || (is_direct() && done % kBlockBytes != 0);
        if (ended && done < wanted)
            return Error{ErrorCode::corrupt,
                         fmt::format("{} ends early: wanted {} bytes at offset {}, got {}",
                                     path_.string(), wanted, offset, done),
                         "copy the file again from its source"};
    }
    return Status::ok();
}

}  // namespace k3::storage
