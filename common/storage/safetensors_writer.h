#pragma once
// Writing one safetensors file, tensor after tensor.
//
// The bytes go to PATH.partial; finish() makes them durable and gives the file its name. A writer
// that is destroyed before that removes what it wrote, so a file with the right name is whole.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/storage/safetensors.h"

namespace k3::storage {

class SafetensorsWriter {
  public:
    /// Writes the header. The data follow in the order of `tensors`, without gaps.
    /// Errors: io (also a full disk: path, bytes wanted and free).
    static Result<std::unique_ptr<SafetensorsWriter>> create(
        const std::filesystem::path& path, const std::vector<TensorSpec>& tensors);
    ~SafetensorsWriter();
    SafetensorsWriter(const SafetensorsWriter&) = delete;
    SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

    /// The next bytes of the data; any number at a time.
    Status append(std::span<const std::byte> bytes);

    /// Leaves out the data that were not appended: a hole, which reads as zeros and takes no room.
    /// Errors: resource_exhausted (the file system or a limit of this process allows no file of
    /// this size), unsupported (the file system gave it room all the same), io.
    Status leave_hole();

    /// All data must have been appended or left out.
    Status finish();

    /// Of the whole file, header and data.
    std::uint64_t file_bytes() const noexcept { return file_bytes_; }

  private:
    SafetensorsWriter(std::filesystem::path path, Fd fd)
        : path_(std::move(path)), fd_(std::move(fd)) {}

    std::filesystem::path path_;
    Fd fd_;
    std::uint64_t file_bytes_ = 0;
    std::uint64_t written_ = 0;
    bool finished_ = false;
};

}  // namespace k3::storage
