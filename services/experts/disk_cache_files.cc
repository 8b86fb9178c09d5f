#include "services/experts/disk_cache_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/base/check.h"
#include "common/base/memory_block.h"
#include "common/model/memory_plan.h"
#include "common/storage/direct_file.h"
#include "common/storage/file.h"

namespace k3::experts {

namespace {

namespace fs = std::filesystem;

constexpr std::array<char, 8> kEntryMagic = {'K', '3', 'E', 'X', 'P', 'E', 'R', 'T'};
constexpr std::array<char, 8> kOwnerMagic = {'K', '3', 'D', 'C', 'A', 'C', 'H', 'E'};
constexpr std::uint32_t kFormatVersion = 1;
constexpr const char* kOwnerName = "owner";
constexpr const char* kLockName = "lock";
constexpr const char* kFreshName = "entry.tmp";
constexpr std::string_view kTemporary = ".tmp";

/// The first block of an entry; the record begins with the second one.
struct EntryHeader {
    std::array<char, 8> magic{};
    std::uint32_t version = 0;
    std::uint32_t header_bytes = 0;
    std::uint32_t layer = 0;
    std::uint32_t expert = 0;
    std::uint64_t record_bytes = 0;
    std::array<char, 32> fingerprint{};
    std::uint64_t record_checksum = 0;  // XXH3-64
    std::uint64_t header_checksum = 0;  // XXH3-64 of everything before it
};
static_assert(sizeof(EntryHeader) == 80 && offsetof(EntryHeader, fingerprint) == 32 &&
              offsetof(EntryHeader, record_checksum) == 64 &&
              offsetof(EntryHeader, header_checksum) == 72);

/// The file that says whose entries lie beside it.
struct OwnerFile {
    std::array<char, 8> magic{};
    std::uint32_t version = 0;
    std::uint32_t reserved = 0;
    std::uint64_t record_bytes = 0;
    std::array<char, 32> fingerprint{};
    std::uint64_t checksum = 0;  // XXH3-64 of everything before it
};
static_assert(sizeof(OwnerFile) == 64 && offsetof(OwnerFile, fingerprint) == 24 &&
              offsetof(OwnerFile, checksum) == 56);

template <typename T>
std::uint64_t checksum_before(const T& of, std::size_t offset) {
    return XXH3_64bits(&of, offset);
}

std::array<char, 32> fingerprint_bytes(const std::string& fingerprint) {
    std::array<char, 32> out{};
    K3_CHECK(fingerprint.size() <= out.size(), fingerprint);
    std::copy(fingerprint.begin(), fingerprint.end(), out.begin());
    return out;
}

/// "041-0123.expert", without taking memory.
struct EntryName {
    explicit EntryName(ExpertKey key) {
        *fmt::format_to_n(text.data(), text.size() - 1, "{:03}-{:04}.expert", key.layer, key.expert)
             .out = '\0';
    }
    std::array<char, 40> text{};
};

std::optional<ExpertKey> parse_entry_name(const std::string& name) {
    ExpertKey key;
    int end = 0;
    if (std::sscanf(name.c_str(), "%u-%u.expert%n", &key.layer, &key.expert, &end) != 2 ||
        name != EntryName(key).text.data())
        return std::nullopt;
    return key;
}

Status write_all(int fd, std::span<const std::byte> bytes, const fs::path& path) {
    while (!bytes.empty()) {
        const ssize_t done = ::write(fd, bytes.data(), bytes.size());
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return storage::system_error(errno, "write", path);
        bytes = bytes.subspan(static_cast<std::size_t>(done));
    }
    return Status::ok();
}

}  // namespace

std::uint64_t DiskCacheFiles::entry_bytes(std::uint64_t record_bytes) noexcept {
    return model::disk_cache_entry_bytes(record_bytes);
}

// --- the directory ---

DiskCacheFiles::DiskCacheFiles(fs::path directory, const Owner& owner)
    : directory_(std::move(directory)),
      owner_(owner),
      direct_(std::make_unique<std::atomic<bool>>(true)) {}

Result<DiskCacheFiles> DiskCacheFiles::open(const fs::path& directory, const Owner& owner) {
    std::error_code failure;
    fs::create_directories(directory, failure);  // what is wrong shows below
    DiskCacheFiles files(directory, owner);
    files.folder_ = Fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!files.folder_.valid())
        return Error{
            ErrorCode::io,
            fmt::format("cannot open {}: {}", directory.string(),
                        std::generic_category().message(failure ? failure.value() : errno)),
            "give a directory on a local disk that this user may write to"};
    RETURN_IF_ERROR(files.lock());
    RETURN_IF_ERROR(files.claim());
    for (const auto& entry : fs::directory_iterator(directory, failure))
        if (entry.path().extension() == kTemporary)
            ::unlinkat(files.folder_.get(), entry.path().filename().c_str(), 0);
    files.try_direct();
    return files;
}

/// Some file systems let files be opened for direct access and refuse it at the first write.
void DiskCacheFiles::try_direct() {
    const Result<MemoryBlock> block = MemoryBlock::create(storage::kBlockBytes, "an entry");
    const Fd fd = open_entry(kFreshName, O_WRONLY | O_CREAT | O_TRUNC);
    if (!block.has_value() || !fd.valid()) return;
    if (::write(fd.get(), block->data(), block->size()) < 0 && errno == EINVAL)
        direct_->store(false, std::memory_order_relaxed);
    discard();
}

/// Two servers in one directory would evict each other's entries and exceed the budget.
Status DiskCacheFiles::lock() {
    lock_ = Fd(::openat(folder_.get(), kLockName, O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!lock_.valid())  // read-only, and its entries are of use all the same
        lock_ = Fd(::openat(folder_.get(), kLockName, O_RDONLY | O_CLOEXEC));
    if (!lock_.valid()) return storage::system_error(errno, "create", directory_ / kLockName);
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return Status::ok();
    if (errno != EWOULDBLOCK) return storage::system_error(errno, "lock", directory_ / kLockName);
    return Error{
        ErrorCode::resource_exhausted,
        fmt::format("the disk cache {} is in use by another expert server", directory_.string()),
        "give each server a directory of its own"};
}

/// Makes sure that the directory is of this checkpoint. Never empties one that is not: it may have
/// taken days to fill, and the name may be a slip.
Status DiskCacheFiles::claim() {
    const fs::path path = directory_ / kOwnerName;
    const Result<std::string> bytes = storage::read_text_file(path, sizeof(OwnerFile));
    if (!bytes.has_value() && bytes.error().code == ErrorCode::not_found) {
        RETURN_IF_ERROR(check_empty());
        return write_owner();
    }
    OwnerFile found;
    if (bytes.has_value() && bytes->size() == sizeof(found))
        std::memcpy(&found, bytes->data(), sizeof(found));
    if (found.magic != kOwnerMagic || found.version != kFormatVersion ||
        found.checksum != checksum_before(found, offsetof(OwnerFile, checksum))) {
        if (!bytes.has_value() && bytes.error().code == ErrorCode::io) return bytes.error();
        // Each entry names its checkpoint too, so no wrong one can come of this.
        repaired_ = fmt::format("{} was damaged and is written anew", path.string());
        return write_owner();
    }
    if (found.fingerprint == fingerprint_bytes(owner_.fingerprint) &&
        found.record_bytes == owner_.record_bytes)
        return Status::ok();
    return Error{
        ErrorCode::incompatible,
        fmt::format("the disk cache {} is of checkpoint {} with experts of {} bytes, and this is "
                    "checkpoint {} with experts of {} bytes",
                    directory_.string(),
                    std::string_view(found.fingerprint.data(), found.fingerprint.size()),
                    found.record_bytes, owner_.fingerprint, owner_.record_bytes),
        "give each checkpoint a directory of its own, or remove this one"};
}

Status DiskCacheFiles::check_empty() const {
    std::error_code failure;
    for (const auto& entry : fs::directory_iterator(directory_, failure)) {
        const fs::path name = entry.path().filename();
        if (name == kLockName || name == "lost+found" || name.extension() == kTemporary) continue;
        return Error{
            ErrorCode::incompatible,
            fmt::format("{} holds {} and no disk cache", directory_.string(), name.string()),
            "give an empty directory, or one that does not exist yet"};
    }
    return Status::ok();
}

Status DiskCacheFiles::write_owner() const {
    OwnerFile owner{kOwnerMagic,
                    kFormatVersion,
                    0,
                    owner_.record_bytes,
                    fingerprint_bytes(owner_.fingerprint),
                    0};
    owner.checksum = checksum_before(owner, offsetof(OwnerFile, checksum));
    const std::string fresh = std::string(kOwnerName) + std::string(kTemporary);
    const Fd fd(
        ::openat(folder_.get(), fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!fd.valid()) return storage::system_error(errno, "create", directory_ / fresh);
    RETURN_IF_ERROR(write_all(fd.get(), std::as_bytes(std::span(&owner, 1)), directory_ / fresh));
    if (::renameat(folder_.get(), fresh.c_str(), folder_.get(), kOwnerName) == 0)
        return Status::ok();
    return storage::system_error(errno, "replace", directory_ / kOwnerName);
}

Result<std::vector<ExpertKey>> DiskCacheFiles::list() const {
    std::vector<ExpertKey> keys;
    std::error_code failure;
    for (const auto& entry : fs::directory_iterator(directory_, failure))
        if (const auto key = parse_entry_name(entry.path().filename().string()))
            keys.push_back(*key);
    if (failure) return storage::system_error(failure.value(), "list", directory_);
    return keys;
}

fs::path DiskCacheFiles::path_of(ExpertKey key) const {
    return directory_ / EntryName(key).text.data();
}

// --- entries ---

/// Where the file system has no direct access, all files are opened without it from then on.
Fd DiskCacheFiles::open_entry(const char* name, int flags) const {
    const int direct = direct_->load(std::memory_order_relaxed) ? O_DIRECT : 0;
    Fd fd(::openat(folder_.get(), name, flags | direct | O_CLOEXEC, 0600));
    if (fd.valid() || errno != EINVAL || direct == 0) return fd;
    direct_->store(false, std::memory_order_relaxed);
    return Fd(::openat(folder_.get(), name, flags | O_CLOEXEC, 0600));
}

Error DiskCacheFiles::damaged(ExpertKey key, std::string_view what) const {
    return Error{ErrorCode::corrupt, fmt::format("{} {}", path_of(key).string(), what),
                 "check the disk that holds the cache if this happens again"};
}

Result<std::span<const std::byte>> DiskCacheFiles::read(ExpertKey key,
                                                        std::span<std::byte> slot) const {
    const std::uint64_t bytes = entry_bytes(owner_.record_bytes);
    K3_CHECK(slot.size() >= bytes, fmt::format("{} bytes for an entry of {}", slot.size(), bytes));
    const Fd fd = open_entry(EntryName(key).text.data(), O_RDONLY);
    if (!fd.valid()) return storage::system_error(errno, "open", path_of(key));
    struct stat facts {};
    if (::fstat(fd.get(), &facts) != 0)
        return storage::system_error(errno, "inspect", path_of(key));
    if (static_cast<std::uint64_t>(facts.st_size) != bytes)
        return damaged(key, fmt::format("has {} bytes instead of {}", facts.st_size, bytes));
    RETURN_IF_ERROR(storage::read_exactly(fd.get(), 0, slot.first(bytes), path_of(key)));

    EntryHeader header;
    std::memcpy(&header, slot.data(), sizeof(header));
    if (header.magic != kEntryMagic || header.version != kFormatVersion ||
        header.header_bytes != storage::kBlockBytes ||
        header.header_checksum != checksum_before(header, offsetof(EntryHeader, header_checksum)))
        return damaged(key, "has a damaged header");
    if (ExpertKey{header.layer, header.expert} != key ||
        header.record_bytes != owner_.record_bytes ||
        header.fingerprint != fingerprint_bytes(owner_.fingerprint))
        return damaged(key, "is of another expert or checkpoint");
    const std::span<const std::byte> record =
        slot.subspan(storage::kBlockBytes, owner_.record_bytes);
    if (header.record_checksum != XXH3_64bits(record.data(), record.size()))
        return damaged(key, "does not have the checksum that it names");
    return record;
}

std::span<std::byte> DiskCacheFiles::record_of(std::span<std::byte> entry) const noexcept {
    return entry.subspan(storage::kBlockBytes, owner_.record_bytes);
}

Status DiskCacheFiles::write(ExpertKey key, std::span<std::byte> entry) {
    K3_CHECK(entry.size() == entry_bytes(owner_.record_bytes),
             fmt::format("{} bytes for an entry", entry.size()));
    const std::span<const std::byte> record = record_of(entry);
    EntryHeader header{kEntryMagic,
                       kFormatVersion,
                       storage::kBlockBytes,
                       key.layer,
                       key.expert,
                       owner_.record_bytes,
                       fingerprint_bytes(owner_.fingerprint),
                       XXH3_64bits(record.data(), record.size()),
                       0};
    header.header_checksum = checksum_before(header, offsetof(EntryHeader, header_checksum));
    std::fill_n(entry.begin(), storage::kBlockBytes, std::byte{0});
    std::memcpy(entry.data(), &header, sizeof(header));
    std::fill(entry.begin() + static_cast<std::ptrdiff_t>(storage::kBlockBytes + record.size()),
              entry.end(), std::byte{0});

    const Fd fd = open_entry(kFreshName, O_WRONLY | O_CREAT | O_TRUNC);
    if (!fd.valid()) return storage::system_error(errno, "create", directory_ / kFreshName);
    Status written = write_all(fd.get(), entry, directory_ / kFreshName);
    if (!written.has_value()) discard();
    return written;
}

Status DiskCacheFiles::commit(ExpertKey key) {
    if (::renameat(folder_.get(), kFreshName, folder_.get(), EntryName(key).text.data()) == 0)
        return Status::ok();
    Error error = storage::system_error(errno, "rename", directory_ / kFreshName);
    discard();
    return error;
}

void DiskCacheFiles::discard() noexcept { ::unlinkat(folder_.get(), kFreshName, 0); }

void DiskCacheFiles::remove(ExpertKey key) noexcept {
    ::unlinkat(folder_.get(), EntryName(key).text.data(), 0);
}

}  // namespace k3::experts
