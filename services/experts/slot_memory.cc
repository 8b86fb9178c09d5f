#include "services/experts/slot_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "common/base/memory.h"
#include "common/base/settings.h"

namespace k3::experts {

Result<SlotMemory> SlotMemory::map(std::size_t n_slots, std::uint64_t slot_bytes) {
    const std::size_t bytes = n_slots * slot_bytes;
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return Error{ErrorCode::resource_exhausted,
                     fmt::format("cannot take {} for {} experts: {}", format_bytes(bytes), n_slots,
                                 std::generic_category().message(errno)),
                     "give a smaller --cache-bytes"};
    SlotMemory memory(static_cast<std::byte*>(data), bytes, slot_bytes);
    prefer_huge_pages({memory.data_, bytes});
    return memory;
}

SlotMemory::SlotMemory(SlotMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      slot_bytes_(other.slot_bytes_) {}

SlotMemory::~SlotMemory() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace k3::experts
