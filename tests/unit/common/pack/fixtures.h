#pragma once
// A small pack whose every byte follows from its entry and offset.

#include <doctest/doctest.h>

#include <filesystem>
#include <string>

#include "common/base/memory_block.h"
#include "common/pack/pack.h"
#include "common/pack/pack_writer.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

namespace k3::test {

/// Three entries: of several pieces and an odd end, of one block, of less than one.
inline pack::PackPlan small_plan() {
    pack::PackPlan plan;
    plan.kind = pack::Kind::trunk;
    plan.origin = {std::string(32, 'a'), std::string(32, 'b')};
    plan.entries.resize(3);
    plan.entries[0].key = {0, 0};
    plan.entries[0].bytes = 5 * storage::kBlockBytes + 77;
    plan.entries[0].piece_bytes = 2 * storage::kBlockBytes;
    plan.entries[1].key = {0, 1};
    plan.entries[1].bytes = storage::kBlockBytes;
    plan.entries[1].piece_bytes = storage::kBlockBytes;
    plan.entries[2].key = {3, 0};
    plan.entries[2].bytes = 100;
    plan.entries[2].piece_bytes = storage::kBlockBytes;
    return plan;
}

inline std::byte small_byte(pack::EntryKey key, std::uint64_t offset) {
    return static_cast<std::byte>(key.layer * 31 + key.part * 7 + offset % 251 + 1);
}

inline Status small_source(const pack::Entry& entry, std::uint64_t offset,
                           std::span<std::byte> dst) {
    for (std::size_t i = 0; i < dst.size(); ++i) dst[i] = small_byte(entry.key, offset + i);
    return Status::ok();
}

inline bool go_on(std::uint64_t /*done*/, std::uint64_t /*total*/) { return true; }

inline void write_small_pack(const std::filesystem::path& path) {
    auto written = pack::write_pack(small_plan(), path, small_source, go_on);
    REQUIRE_MESSAGE(written.has_value(), written.error().sentence());
}

/// Everything that can be read, read; the first error.
inline Status read_all(const std::filesystem::path& path) {
    ASSIGN_OR_RETURN(auto pack, pack::Pack::open(path));
    for (const pack::Entry& entry : pack->entries()) {
        MemoryBlock memory = MemoryBlock::create(entry.stored_bytes(), "a test").value();
        RETURN_IF_ERROR(pack->read(entry, memory.span()));
    }
    return Status::ok();
}

}  // namespace k3::test
