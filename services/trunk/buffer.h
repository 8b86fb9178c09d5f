#pragma once
// Memory taken once and never resized: weights, session state, the scratch of a step.
//
// Zeroed by calloc on purpose: the kernel hands out large areas lazily, so a session opened for a
// million positions costs what it has used so far, while its budget was checked for all of it.

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "common/base/result.h"

namespace k3::trunk {

/// Zeroed values of a trivial type, aligned to a cache line. Move-only.
template <typename T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept
        : memory_(std::exchange(other.memory_, nullptr)),
          data_(std::exchange(other.data_, nullptr)),
          size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(memory_); }

    /// Error: resource_exhausted naming `what` and the bytes.
    static Result<Buffer> create(std::size_t size, const char* what) {
        Buffer buffer;
        buffer.memory_ = std::calloc(1, size * sizeof(T) + kAlignment);
        if (buffer.memory_ == nullptr)
            return Error{ErrorCode::resource_exhausted,
                         std::string("no memory for ") + what + ": " +
                             std::to_string(size * sizeof(T)) + " bytes were refused",
                         "give this process less to hold, or the machine more memory"};
        void* at = buffer.memory_;
        std::size_t room = size * sizeof(T) + kAlignment;
        buffer.data_ = static_cast<T*>(std::align(kAlignment, size * sizeof(T), at, room));
        buffer.size_ = size;
        return buffer;
    }

    T* data() noexcept { return data_; }
    const T* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    std::span<T> span() noexcept { return {data_, size_}; }
    std::span<const T> span() const noexcept { return {data_, size_}; }

  private:
    static constexpr std::size_t kAlignment = 64;
    void* memory_ = nullptr;
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace k3::trunk
