#include "common/pack/pack_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/fd.h"
#include "common/base/memory_block.h"
#include "common/storage/file.h"

namespace k3::pack {

namespace {

namespace fs = std::filesystem;

/// Small pieces are written so many bytes at a time.
constexpr std::uint64_t kChunkBytes = std::uint64_t{4} << 20U;
/// Written between two calls of fdatasync: bounds the dirty pages, and a disk that fails is noticed
/// before the end.
constexpr std::uint64_t kSyncBytes = std::uint64_t{256} << 20U;

std::uint64_t chunk_bytes(const Entry& entry) {
    return std::max(entry.piece_bytes, kChunkBytes / entry.piece_bytes * entry.piece_bytes);
}

/// FILE.partial, open and locked.
class PartialFile {
  public:
    static Result<PartialFile> open(const fs::path& path) {
        PartialFile file;
        file.path_ = path;
        file.path_ += ".partial";
        file.fd_ = Fd(::open(file.path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
        if (!file.fd_.valid())
            return Error{ErrorCode::resource_exhausted,
                         fmt::format("cannot create {}: {}", file.path_.string(),
                                     std::generic_category().message(errno)),
                         "choose a directory that exists and can be written"};
        if (::flock(file.fd_.get(), LOCK_EX | LOCK_NB) != 0)
            return Error{ErrorCode::resource_exhausted,
                         fmt::format("{} is being written by another process", path.string()),
                         "wait for it, stop it, or choose another file"};
        // Between open and lock the other process may have finished and renamed what we hold.
        struct stat named = {};
        struct stat held = {};
        if (::stat(path.c_str(), &named) == 0)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{} already exists", path.string()),
                         "remove it first, or choose another file"};
        if (::fstat(file.fd_.get(), &held) != 0 || ::stat(file.path_.c_str(), &named) != 0 ||
            named.st_ino != held.st_ino)
            return Error{ErrorCode::stale,
                         fmt::format("{} was replaced meanwhile", file.path_.string()),
                         "run the command again"};
        file.bytes_ = static_cast<std::uint64_t>(held.st_size);
        file.allocated_ = static_cast<std::uint64_t>(held.st_blocks) * 512;
        return file;
    }

    int fd() const noexcept { return fd_.get(); }
    const fs::path& path() const noexcept { return path_; }
    std::uint64_t bytes() const noexcept { return bytes_; }          // when it was opened
    std::uint64_t allocated() const noexcept { return allocated_; }  // on the disk, likewise

  private:
    fs::path path_;
    Fd fd_;
    std::uint64_t bytes_ = 0;
    std::uint64_t allocated_ = 0;
};

class Writer {
  public:
    Writer(const PackPlan& plan, const PackSource& source, const PackProgress& progress,
           PartialFile file)
        : source_(source), progress_(progress), file_(std::move(file)), entries_(plan.entries) {
        header_.kind = plan.kind;
        header_.part = static_cast<std::uint16_t>(plan.part.index);
        header_.n_parts = static_cast<std::uint16_t>(plan.part.count);
        header_.file_bytes = lay_out(entries_);
        header_.n_entries = entries_.size();
        for (const Entry& entry : entries_) header_.n_pieces += entry.n_pieces();
        std::ranges::copy(plan.origin.fingerprint, header_.fingerprint.begin());
        std::ranges::copy(plan.origin.config_digest, header_.config_digest.begin());
        make_table();
    }

    Result<PackSummary> write(const fs::path& path) {
        RETURN_IF_ERROR(begin());
        std::uint64_t largest = 0;
        for (const Entry& entry : entries_)
            largest = std::max(largest, std::min(chunk_bytes(entry), entry.stored_bytes()));
        ASSIGN_OR_RETURN(memory_, MemoryBlock::create(storage::block_ceiling(largest),
                                                      "what a pack is written from"));
        done_ = entries_.front().offset;
        Status written;
        for (const Entry& entry : entries_)
            if (written.has_value()) written = write_entry(entry);
        if (written.has_value()) written = finish(path);
        if (!written) return with_what_to_do(std::move(written).error());
        return PackSummary{header_.file_bytes, kept_bytes_};
    }

  private:
    void make_table() {
        table_.resize(format::table_bytes(header_.n_entries, header_.n_pieces));
        std::byte* at = table_.data();
        for (const Entry& entry : entries_) {
            const format::TableEntry raw{entry.key, entry.offset, entry.bytes, entry.piece_bytes,
                                         entry.first_piece};
            std::memcpy(at, &raw, sizeof(raw));
            at += sizeof(raw);
        }
        recorded_.assign(header_.n_pieces, 0);
    }

    std::uint64_t entries_bytes() const noexcept {
        return header_.n_entries * sizeof(format::TableEntry);
    }

    /// Takes over an unfinished pack of the same entries, or begins a new one.
    Status begin() {
        const std::vector<std::byte> block = format::header_block(header_);
        ASSIGN_OR_RETURN(const bool resumed, resume(block));
        const std::uint64_t present = resumed ? file_.allocated() : 0;
        const std::uint64_t wanted = header_.file_bytes - std::min(header_.file_bytes, present);
        ASSIGN_OR_RETURN(const std::uint64_t free, storage::free_disk_bytes(file_.path()));
        if (wanted > free) {
            if (!resumed) ::unlink(file_.path().c_str());
            return Error{ErrorCode::resource_exhausted,
                         fmt::format("no room for {}: {} bytes are to be written, and {} are free",
                                     file_.path().string(), wanted, free),
                         "free disk space, choose another disk, or pack fewer layers or experts"};
        }
        if (!resumed && ::ftruncate(file_.fd(), 0) != 0)
            return storage::system_error(errno, "empty", file_.path());
        if (::ftruncate(file_.fd(), static_cast<off_t>(header_.file_bytes)) != 0)
            return storage::write_error(errno, file_.path(), header_.file_bytes);
        if (resumed) return Status::ok();
        RETURN_IF_ERROR(
            storage::write_exactly(file_.fd(), format::kTableOffset, table_, file_.path()));
        RETURN_IF_ERROR(sync());  // a header promises that the list of entries is there
        return storage::write_exactly(file_.fd(), 0, block, file_.path());
    }

    /// Whether there is something to go on with. What has no header (it is written first) is
    /// written over.
    Result<bool> resume(std::span<const std::byte> block) {
        if (file_.bytes() < format::kTableOffset + table_.size()) return false;
        std::vector<std::byte> found(block.size());
        RETURN_IF_ERROR(storage::read_exactly(file_.fd(), 0, found, file_.path()));
        format::Header header;
        std::memcpy(&header, found.data(), sizeof(header));
        if (header.magic != format::kMagic || format::header_block(header) != found) return false;
        // Complete, but killed before it got its name: checked like any other.
        header.state = format::State::unfinished;
        header.table_hash = 0;
        std::vector<std::byte> table(table_.size());
        RETURN_IF_ERROR(
            storage::read_exactly(file_.fd(), format::kTableOffset, table, file_.path()));
        if (!std::ranges::equal(format::header_block(header), block) ||
            std::memcmp(table.data(), table_.data(), entries_bytes()) != 0)
            return Error{ErrorCode::incompatible,
                         fmt::format("{} is an unfinished pack of another checkpoint, or of other "
                                     "layers, experts or parts",
                                     file_.path().string()),
                         "remove it, or choose another file"};
        std::memcpy(recorded_.data(), table.data() + entries_bytes(),
                    recorded_.size() * sizeof(std::uint64_t));
        return true;
    }

    static Error with_what_to_do(Error error) {
        if (error.code == ErrorCode::resource_exhausted)
            error.remedy = "make room and run the same command again: it goes on from there";
        return error;
    }

    Status write_entry(const Entry& entry) {
        for (std::uint64_t at = 0; at < entry.stored_bytes(); at += chunk_bytes(entry)) {
            if (!progress_(done_, header_.file_bytes))
                return Error{ErrorCode::cancelled,
                             fmt::format("interrupted when {} of {} bytes were written", done_,
                                         header_.file_bytes),
                             "the same command goes on from there"};
            const auto chunk =
                memory_.span().first(std::min(chunk_bytes(entry), entry.stored_bytes() - at));
            ASSIGN_OR_RETURN(const bool kept, keep(entry, at, chunk));
            if (kept)
                kept_bytes_ += chunk.size();
            else
                RETURN_IF_ERROR(write_chunk(entry, at, chunk));
            done_ += chunk.size();
        }
        return Status::ok();
    }

    std::span<std::uint64_t> records_of(const Entry& entry, std::uint64_t at, std::uint64_t bytes) {
        const std::uint64_t n = (bytes + entry.piece_bytes - 1) / entry.piece_bytes;
        return std::span(recorded_).subspan(entry.first_piece + at / entry.piece_bytes, n);
    }

    /// The checksums of the pieces in `chunk`, one after the other.
    static std::vector<std::uint64_t> hashes_of(const Entry& entry,
                                                std::span<const std::byte> chunk) {
        std::vector<std::uint64_t> hashes;
        for (; !chunk.empty(); chunk = chunk.subspan(std::min(entry.piece_bytes, chunk.size())))
            hashes.push_back(
                format::hash(chunk.first(std::min<std::size_t>(entry.piece_bytes, chunk.size()))));
        return hashes;
    }

    Result<bool> keep(const Entry& entry, std::uint64_t at, std::span<std::byte> chunk) {
        const auto recorded = records_of(entry, at, chunk.size());
        if (std::ranges::find(recorded, std::uint64_t{0}) != recorded.end()) return false;
        RETURN_IF_ERROR(storage::read_exactly(file_.fd(), entry.offset + at, chunk, file_.path()));
        return std::ranges::equal(hashes_of(entry, chunk), recorded);
    }

    Status write_chunk(const Entry& entry, std::uint64_t at, std::span<std::byte> chunk) {
        const std::uint64_t content = std::min<std::uint64_t>(chunk.size(), entry.bytes - at);
        RETURN_IF_ERROR(source_(entry, at, chunk.first(content)));
        std::ranges::fill(chunk.subspan(content), std::byte{0});
        RETURN_IF_ERROR(storage::write_exactly(file_.fd(), entry.offset + at, chunk, file_.path()));
        const auto recorded = records_of(entry, at, chunk.size());
        std::ranges::copy(hashes_of(entry, chunk), recorded.begin());
        const auto place = static_cast<std::uint64_t>(recorded.data() - recorded_.data());
        RETURN_IF_ERROR(storage::write_exactly(
            file_.fd(), format::checksums_offset(header_.n_entries) + place * sizeof(std::uint64_t),
            std::as_bytes(recorded), file_.path()));
        unsynced_ += chunk.size();
        return unsynced_ < kSyncBytes ? Status::ok() : sync();
    }

    /// What is on the disk need not stay in the page cache: nobody reads it soon.
    Status sync() {
        if (::fdatasync(file_.fd()) != 0)
            return storage::write_error(errno, file_.path(), header_.file_bytes - done_);
        ::posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_DONTNEED);
        unsynced_ = 0;
        return Status::ok();
    }

    /// The header says "complete" only after everything else is on the disk.
    Status finish(const fs::path& path) {
        std::memcpy(table_.data() + entries_bytes(), recorded_.data(),
                    recorded_.size() * sizeof(std::uint64_t));
        header_.state = format::State::complete;
        header_.table_hash = format::hash(table_);
        RETURN_IF_ERROR(sync());
        RETURN_IF_ERROR(
            storage::write_exactly(file_.fd(), 0, format::header_block(header_), file_.path()));
        RETURN_IF_ERROR(sync());
        if (::rename(file_.path().c_str(), path.c_str()) != 0)
            return storage::system_error(errno, "rename", file_.path());
        RETURN_IF_ERROR(storage::sync_directory(path.has_parent_path() ? path.parent_path() : "."));
        progress_(header_.file_bytes, header_.file_bytes);
        return Status::ok();
    }

    const PackSource& source_;
    const PackProgress& progress_;
    PartialFile file_;
    std::vector<Entry> entries_;
    format::Header header_;
    std::vector<std::byte> table_;
    std::vector<std::uint64_t> recorded_;  // [n_pieces]; 0: not written yet
    MemoryBlock memory_;                   // one chunk
    std::uint64_t done_ = 0;
    std::uint64_t kept_bytes_ = 0;
    std::uint64_t unsynced_ = 0;
};

}  // namespace

std::uint64_t file_bytes(const PackPlan& plan) {
    std::vector<Entry> entries = plan.entries;
    return lay_out(entries);
}

Result<PackSummary> write_pack(const PackPlan& plan, const fs::path& path, const PackSource& source,
                               const PackProgress& progress) {
    K3_CHECK(plan.origin.fingerprint.size() == format::kDigestChars &&
                 plan.origin.config_digest.size() == format::kDigestChars && !plan.entries.empty(),
             plan.origin.fingerprint);
    std::error_code ignored;
    if (fs::exists(path, ignored))
        return Error{ErrorCode::invalid_argument, fmt::format("{} already exists", path.string()),
                     "remove it first, or choose another file"};
    ASSIGN_OR_RETURN(PartialFile file, PartialFile::open(path));
    return Writer(plan, source, progress, std::move(file)).write(path);
}

}  // namespace k3::pack
