#include "common/base/memory_block.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include "common/base/memory.h"

namespace k3 {

Result<MemoryBlock> MemoryBlock::create(std::size_t bytes, const char* what) {
    MemoryBlock block;
    if (bytes == 0) return block;
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return Error{ErrorCode::resource_exhausted,
                     fmt::format("no memory for {}: {} bytes were refused", what, bytes),
                     "give this process less to hold, or the machine more memory"};
    block.memory_ = {static_cast<std::byte*>(memory), bytes};
    prefer_huge_pages(block.memory_);
    return block;
}

MemoryBlock::~MemoryBlock() {
    if (!memory_.empty()) ::munmap(memory_.data(), memory_.size());
}

}  // namespace k3
