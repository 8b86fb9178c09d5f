#include "launcher/digest_job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/evp.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "common/base/check.h"
#include "common/base/fd.h"
#include "common/base/memory_block.h"
#include "common/pack/format.h"
#include "common/storage/file.h"

namespace k3::launcher {

namespace {

namespace fs = std::filesystem;

/// One request of the device.
constexpr std::uint64_t kReadBytes = std::uint64_t{4} << 20U;
constexpr std::uint64_t kMaxJournalBytes = std::uint64_t{1} << 30U;
constexpr std::chrono::milliseconds kReportEvery{100};

struct FreeDigest {
    void operator()(EVP_MD_CTX* context) const noexcept { EVP_MD_CTX_free(context); }
};

/// Takes the bytes of one part in order. A part of XXH3 comes in one piece.
class Sha256 {
  public:
    Sha256() : context_(EVP_MD_CTX_new()) {
        K3_CHECK(
            context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1,
            "OpenSSL has no SHA-256");
    }
    void add(std::span<const std::byte> bytes) {
        K3_CHECK(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1, "SHA-256");
    }
    std::string hex() {
        std::array<unsigned char, 32> digest{};
        unsigned int size = 0;
        K3_CHECK(EVP_DigestFinal_ex(context_.get(), digest.data(), &size) == 1 && size == 32,
                 fmt::format("SHA-256 of {} bytes", size));
        std::string text;
        for (const unsigned char byte : digest) text += fmt::format("{:02x}", byte);
        return text;
    }

  private:
    std::unique_ptr<EVP_MD_CTX, FreeDigest> context_;
};

/// The files as they are now: a journal of other files, or of other contents of these, is useless.
Result<std::string> identity_of(const DigestJob& job) {
    std::string text =
        fmt::format("{} {}\n", job.kind == DigestKind::xxh3 ? "xxh3" : "sha256", job.parts.size());
    for (const fs::path& file : job.files) {
        struct stat facts = {};
        if (::stat(file.c_str(), &facts) != 0) return storage::system_error(errno, "inspect", file);
        text +=
            fmt::format("{} {} {} {} {}.{:09}\n", fs::absolute(file).string(), facts.st_dev,
                        facts.st_ino, facts.st_size, facts.st_mtim.tv_sec, facts.st_mtim.tv_nsec);
    }
    for (const FilePart& part : job.parts)
        text += fmt::format("{} {} {} {}\n", part.file, part.offset, part.bytes, part.piece_bytes);
    return xxh3_hex(pack::format::hash(std::as_bytes(std::span(text))));
}

/// Lines "index digest" after the line of the identity.
class Journal {
  public:
    /// Takes over what is there into `parts` if it is of this identity, else begins anew.
    static Result<Journal> open(const fs::path& path, const std::string& identity,
                                std::size_t digits, std::vector<PartDigest>& parts) {
        Journal journal;
        if (path.empty()) return journal;
        journal.path_ = path;
        std::error_code failure;
        fs::create_directories(path.parent_path(), failure);
        journal.fd_ = Fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_APPEND, 0600));
        if (!journal.fd_.valid()) return storage::system_error(errno, "create", path);
        if (::flock(journal.fd_.get(), LOCK_EX | LOCK_NB) != 0)
            return Error{
                ErrorCode::resource_exhausted,
                fmt::format("{} is in use: another process verifies the same files", path.string()),
                "wait for it, or stop it"};
        ASSIGN_OR_RETURN(const std::string text, storage::read_text_file(path, kMaxJournalBytes));
        const std::size_t begun = take(text, identity, digits, parts);
        if (::ftruncate(journal.fd_.get(), static_cast<off_t>(begun)) != 0)
            return storage::system_error(errno, "write", path);
        if (begun == 0) RETURN_IF_ERROR(journal.append(identity + "\n"));
        return journal;
    }

    Status append(const std::string& line) {
        if (!fd_.valid()) return Status::ok();
        // O_APPEND: the offset means nothing.
        return storage::write_exactly(fd_.get(), 0, std::as_bytes(std::span(line)), path_);
    }

    void remove() {
        if (fd_.valid()) ::unlink(path_.c_str());
    }

  private:
    /// Returns how many bytes of `text` are whole lines of this identity; what follows was torn.
    static std::size_t take(std::string_view text, std::string_view identity, std::size_t digits,
                            std::vector<PartDigest>& parts) {
        std::size_t end = text.find('\n');
        if (end == std::string_view::npos || text.substr(0, end) != identity) return 0;
        for (std::size_t at = end + 1; at < text.size(); at = end + 1) {
            end = text.find('\n', at);
            if (end == std::string_view::npos) return at;
            const std::string_view line = text.substr(at, end - at);
            std::size_t index = 0;
            const auto [stop, code] =
                std::from_chars(line.data(), line.data() + line.size(), index);
            const auto used = static_cast<std::size_t>(stop - line.data());
            if (code != std::errc{} || index >= parts.size() || line.size() != used + 1 + digits ||
                line[used] != ' ')
                return at;
            parts[index].hex = line.substr(used + 1);
        }
        return text.size();
    }

    fs::path path_;
    Fd fd_;
};

class Runner {
  public:
    Runner(const DigestJob& job, std::vector<storage::DirectFile> files, Journal journal,
           std::vector<PartDigest> known)
        : job_(job), files_(std::move(files)), journal_(std::move(journal)) {
        digests_.parts = std::move(known);
        for (std::size_t i = 0; i < job.parts.size(); ++i) {
            total_ += job.parts[i].bytes;
            if (!digests_.parts[i].hex.empty()) digests_.resumed_bytes += job.parts[i].bytes;
        }
        done_ = digests_.resumed_bytes;
    }

    Result<Digests> run(const DigestProgress& progress) {
        std::vector<std::thread> threads;
        const std::size_t n = std::clamp<std::size_t>(job_.n_threads, 1, job_.parts.size() + 1);
        n_running_ = n;
        for (std::size_t i = 0; i < n; ++i) threads.emplace_back([this] { work(); });
        {
            std::unique_lock lock(mutex_);
            do {
                lock.unlock();
                if (!progress(done_, total_)) stopped_ = true;
                lock.lock();
            } while (!ended_.wait_for(lock, kReportEvery, [this] { return n_running_ == 0; }));
        }
        for (std::thread& thread : threads) thread.join();
        RETURN_IF_ERROR(std::move(failure_));
        if (stopped_)
            return Error{ErrorCode::cancelled,
                         fmt::format("interrupted after {} of {} bytes", done_.load(), total_),
                         "the same command goes on from there"};
        progress(total_, total_);
        journal_.remove();
        return std::move(digests_);
    }

  private:
    void work() {
        MemoryBlock memory;
        for (std::size_t i = next_++; i < job_.parts.size() && !stopped_; i = next_++) {
            if (!digests_.parts[i].hex.empty()) continue;
            Result<std::string> hex = job_.kind == DigestKind::xxh3 ? xxh3(job_.parts[i], memory)
                                                                    : sha256(job_.parts[i], memory);
            if (stopped_) break;
            const std::lock_guard lock(mutex_);
            if (!hex) {
                digests_.parts[i].error = std::move(hex).error();
                continue;
            }
            digests_.parts[i].hex = *std::move(hex);
            Status kept = journal_.append(fmt::format("{} {}\n", i, digests_.parts[i].hex));
            if (!kept) {
                failure_ = std::move(kept);
                stopped_ = true;
            }
        }
        const std::lock_guard lock(mutex_);
        if (--n_running_ == 0) ended_.notify_all();
    }

    static Status reserve(MemoryBlock& memory, std::uint64_t bytes) {
        if (bytes <= memory.size()) return Status::ok();
        ASSIGN_OR_RETURN(memory, MemoryBlock::create(bytes, "reading a part of a file"));
        return Status::ok();
    }

    Result<std::string> xxh3(const FilePart& part, MemoryBlock& memory) {
        const std::uint64_t bytes = storage::block_ceiling(part.bytes);
        RETURN_IF_ERROR(reserve(memory, bytes));
        RETURN_IF_ERROR(files_[part.file].read(part.offset, memory.span().first(bytes)));
        done_ += part.bytes;
        std::span<const std::byte> left = memory.span().first(part.bytes);
        if (part.piece_bytes == 0) return xxh3_hex(pack::format::hash(left));
        std::vector<std::uint64_t> pieces;
        while (!left.empty()) {
            const std::size_t n = std::min<std::uint64_t>(part.piece_bytes, left.size());
            pieces.push_back(pack::format::hash(left.first(n)));
            left = left.subspan(n);
        }
        return xxh3_hex(pack::format::hash(std::as_bytes(std::span(pieces))));
    }

    Result<std::string> sha256(const FilePart& part, MemoryBlock& memory) {
        RETURN_IF_ERROR(reserve(memory, kReadBytes));
        Sha256 digest;
        for (std::uint64_t at = 0; at < part.bytes && !stopped_; at += kReadBytes) {
            const std::uint64_t bytes = std::min(kReadBytes, part.bytes - at);
            RETURN_IF_ERROR(files_[part.file].read(
                part.offset + at, memory.span().first(storage::block_ceiling(bytes))));
            digest.add(memory.span().first(bytes));
            done_ += bytes;
        }
        return digest.hex();
    }

    const DigestJob& job_;
    const std::vector<storage::DirectFile> files_;
    std::uint64_t total_ = 0;
    std::atomic<std::uint64_t> done_{0};
    std::atomic<std::size_t> next_{0};
    std::atomic<bool> stopped_{false};

    std::mutex mutex_;  // guards what follows; digests_.parts[i] until it is done is its thread's
    std::condition_variable ended_;
    std::size_t n_running_ = 0;
    Digests digests_;
    Journal journal_;
    Status failure_;
};

}  // namespace

void add_parts(std::vector<FilePart>& parts, std::size_t file, std::uint64_t file_bytes,
               std::uint64_t bytes) {
    std::uint64_t at = 0;
    do {
        parts.push_back({file, at, std::min(bytes, file_bytes - at)});
        at += bytes;
    } while (at < file_bytes);
}

std::string xxh3_hex(std::uint64_t digest) { return fmt::format("{:016x}", digest); }

Result<Digests> run_digests(const DigestJob& job, const DigestProgress& progress) {
    std::vector<storage::DirectFile> files;
    for (const fs::path& path : job.files) {
        ASSIGN_OR_RETURN(storage::DirectFile file, storage::DirectFile::open(path));
        files.push_back(std::move(file));
    }
    ASSIGN_OR_RETURN(const std::string identity, identity_of(job));
    std::vector<PartDigest> known(job.parts.size());
    ASSIGN_OR_RETURN(Journal journal, Journal::open(job.journal, identity,
                                                    job.kind == DigestKind::xxh3 ? 16 : 64, known));
    return Runner(job, std::move(files), std::move(journal), std::move(known)).run(progress);
}

fs::path journal_for(const fs::path& path, DigestKind kind) {
    const char* cache = std::getenv("XDG_CACHE_HOME");
    const char* home = std::getenv("HOME");
    fs::path folder;
    if (cache != nullptr && *cache == '/')
        folder = cache;
    else if (home != nullptr && *home == '/')
        folder = fs::path(home) / ".cache";
    else
        return {};
    std::error_code ignored;
    const std::string where = fs::weakly_canonical(path, ignored).string();
    return folder / "k3pipe" /
           fmt::format("verify-{}-{}", kind == DigestKind::xxh3 ? "xxh3" : "sha256",
                       xxh3_hex(pack::format::hash(std::as_bytes(std::span(where)))));
}

}  // namespace k3::launcher
