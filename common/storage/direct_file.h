#pragma once
// Reading past the page cache.
//
// Weights that are read once per token gain nothing from the page cache: it would push out what is
// worth keeping, cost a copy of every byte, and count as memory of the process in a cgroup. Direct
// reads want offset, size and address in multiples of the device's block, so whoever reads this way
// takes whole blocks and looks for its bytes inside them.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/storage/read_source.h"

namespace k3::storage {

/// Offsets of blocks in packs and addresses of slots are multiples of this: no device that we know
/// of wants more.
inline constexpr std::size_t kBlockBytes = 4096;

constexpr std::uint64_t block_floor(std::uint64_t offset) noexcept {
    return offset / kBlockBytes * kBlockBytes;
}
constexpr std::uint64_t block_ceiling(std::uint64_t offset) noexcept {
    return block_floor(offset + kBlockBytes - 1);
}

class DirectFile final : public ReadSource {
  public:
    enum class Mode { direct_if_possible, buffered };

    /// A regular file (links are followed). Where the file system refuses direct reads (tmpfs, some
    /// network mounts) or the device wants larger blocks, reads are buffered.
    /// Errors: not_found, io.
    static Result<DirectFile> open(const std::filesystem::path& path,
                                   Mode mode = Mode::direct_if_possible);

    bool is_direct() const noexcept { return why_buffered_.empty(); }
    /// For people: why reads are buffered; empty if they are direct.
    const std::string& why_buffered() const noexcept { return why_buffered_; }
    std::uint64_t bytes() const noexcept { return bytes_; }
    const std::filesystem::path& path() const noexcept { return path_; }

    std::uint64_t unit_bytes() const noexcept override { return kBlockBytes; }
    std::uint64_t end() const noexcept override { return block_ceiling(bytes_); }
    /// Fills dst from `offset`; offset, dst.size() and dst.data() are multiples of kBlockBytes. The
    /// last block may lie partly behind the end of the file; what dst holds there is undefined.
    /// Any thread. Errors name file and offset: corrupt (the file has been truncated since), io.
    Status read(std::uint64_t offset, std::span<std::byte> dst) const override;

  private:
    DirectFile() = default;

    std::filesystem::path path_;
    Fd fd_;
    std::uint64_t bytes_ = 0;
    std::string why_buffered_;
};

}  // namespace k3::storage
