#include "common/storage/safetensors_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/base/check.h"
#include "common/storage/file.h"

namespace k3::storage {

namespace {

std::filesystem::path partial_name(const std::filesystem::path& path) {
    std::filesystem::path partial = path;
    partial += ".partial";
    return partial;
}

/// The header of the format, its length word included, padded so that the data start at a multiple
/// of 8. Names hold no characters that JSON escapes.
std::string header_of(const std::vector<TensorSpec>& tensors) {
    std::string json = "{";
    std::uint64_t at = 0;
    for (const TensorSpec& tensor : tensors) {
        json += fmt::format("{}\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                            at == 0 ? "" : ",", tensor.name, to_string(tensor.dtype),
                            fmt::join(tensor.shape, ","), at, at + tensor.bytes());
        at += tensor.bytes();
    }
    json += "}";
    json.resize((json.size() + 7) / 8 * 8, ' ');
    std::string header(8, '\0');
    for (std::size_t i = 0; i < 8; ++i)
        header[i] = static_cast<char>(json.size() >> (8 * i) & 0xFFU);
    return header + json;
}

}  // namespace

Result<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::create(
    const std::filesystem::path& path, const std::vector<TensorSpec>& tensors) {
    const std::filesystem::path partial = partial_name(path);
    Fd fd(::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!fd.valid()) return system_error(errno, "create", partial);
    std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(path, std::move(fd)));
    const std::string header = header_of(tensors);
    writer->file_bytes_ = header.size();
    for (const TensorSpec& tensor : tensors) writer->file_bytes_ += tensor.bytes();
    RETURN_IF_ERROR(writer->append(std::as_bytes(std::span(header))));
    return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
    if (!finished_) ::unlink(partial_name(path_).c_str());
}

Status SafetensorsWriter::append(std::span<const std::byte> bytes) {
    K3_CHECK(bytes.size() <= file_bytes_ - written_, path_.string());
    while (!bytes.empty()) {
        const ssize_t n = ::write(fd_.get(), bytes.data(), bytes.size());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return write_error(errno, path_, file_bytes_ - written_);
        bytes = bytes.subspan(static_cast<std::size_t>(n));
        written_ += static_cast<std::uint64_t>(n);
    }
    return Status::ok();
}

Status SafetensorsWriter::leave_hole() {
    constexpr std::uint64_t kBlock = 512;  // unit of st_blocks, whatever the file system's own is
    if (::ftruncate(fd_.get(), static_cast<off_t>(file_bytes_)) != 0) {
        if (errno != EFBIG && errno != EINVAL) return write_error(errno, path_, file_bytes_);
        return Error{ErrorCode::resource_exhausted,
                     fmt::format("{} cannot have {} bytes: its file system, or the limit on file "
                                 "sizes (ulimit -f), allows no file of this size",
                                 path_.string(), file_bytes_),
                     "choose a directory on a file system such as ext4, xfs or tmpfs"};
    }
    struct stat status = {};
    if (::fstat(fd_.get(), &status) != 0) return system_error(errno, "look at", path_);
    const std::uint64_t taken = static_cast<std::uint64_t>(status.st_blocks) * kBlock;
    if (taken > written_ + (file_bytes_ - written_) / 2)
        return Error{ErrorCode::unsupported,
                     fmt::format("{} takes {} of {} bytes although most were left out: its file "
                                 "system has no sparse files",
                                 path_.string(), taken, file_bytes_),
                     "choose a directory on a file system such as ext4, xfs or tmpfs"};
    written_ = file_bytes_;
    return Status::ok();
}

Status SafetensorsWriter::finish() {
    K3_CHECK(written_ == file_bytes_, fmt::format("{} of {}", written_, file_bytes_));
    if (::fsync(fd_.get()) != 0) return write_error(errno, path_, 0);
    if (::rename(partial_name(path_).c_str(), path_.c_str()) != 0)
        return system_error(errno, "rename", partial_name(path_));
    finished_ = true;
    return Status::ok();
}

}  // namespace k3::storage
