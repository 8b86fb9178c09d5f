#pragma once
// Memory beyond any cache, and how fast this machine reads it.

#include <cstddef>
#include <cstdint>
#include <span>

namespace k3::bench {

/// Anonymous memory, touched, in 2 MiB pages where the kernel grants them (a walk through 4 KiB
/// pages would measure the address translation).
class Memory {
  public:
    explicit Memory(std::size_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::span<std::uint8_t> bytes() const { return {data_, size_}; }

  private:
    std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
};

/// Seconds of one pass over `bytes` by n_threads threads, each reading its own share with the
/// widest loads of this CPU from eight places in turn, as a product with eight weight rows does.
double read_pass(std::span<const std::uint8_t> bytes, int n_threads);

}  // namespace k3::bench
