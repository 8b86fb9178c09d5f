#include "common/pack/format.h"

#include <xxhash.h>

#include <cstring>

namespace k3::pack {

std::string_view to_string(Kind kind) noexcept { return kind == Kind::trunk ? "trunk" : "experts"; }

std::uint64_t format::hash(std::span<const std::byte> bytes) noexcept {
    return XXH3_64bits(bytes.data(), bytes.size());
}

std::vector<std::byte> format::header_block(Header header) {
    std::vector<std::byte> block(storage::kBlockBytes);
    header.header_hash = 0;
    std::memcpy(block.data(), &header, sizeof(header));
    header.header_hash = hash(block);
    std::memcpy(block.data(), &header, sizeof(header));
    return block;
}

std::uint64_t lay_out(std::span<Entry> entries) noexcept {
    std::uint64_t n_pieces = 0;
    for (Entry& entry : entries) {
        entry.first_piece = n_pieces;
        n_pieces += entry.n_pieces();
    }
    std::uint64_t end = format::kTableOffset + format::table_bytes(entries.size(), n_pieces);
    for (Entry& entry : entries) {
        entry.offset = end;
        end += entry.stored_bytes();
    }
    return end;
}

}  // namespace k3::pack
