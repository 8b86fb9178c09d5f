#pragma once
// The bytes of a pack as docs/formats/pack.md draws them, shared by reader and writer.
//
// A pack is written once and read for ever, so its layout follows from the list of its entries:
// header block, table, data. Whatever a reader takes from the file is checked against that before
// it is used.

#include <array>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/storage/direct_file.h"

namespace k3::pack {

enum class Kind : std::uint32_t { trunk = 1, experts = 2 };
std::string_view to_string(Kind kind) noexcept;  // "trunk", "experts"

/// Trunk packs: which part of a layer. Expert packs: the expert.
struct EntryKey {
    std::uint32_t layer = 0;
    std::uint32_t part = 0;
    auto operator<=>(const EntryKey&) const = default;
};

/// One run of a trunk pack or one record of an expert pack.
struct Entry {
    EntryKey key;
    std::uint64_t offset = 0;       // in the file, a multiple of kBlockBytes
    std::uint64_t bytes = 0;        // of its content; zeros follow up to a whole block
    std::uint64_t piece_bytes = 0;  // whole blocks; each piece has a checksum of its own
    std::uint64_t first_piece = 0;  // index of the first one in the pack's list of checksums

    std::uint64_t stored_bytes() const noexcept { return storage::block_ceiling(bytes); }
    std::uint64_t n_pieces() const noexcept {
        return (stored_bytes() + piece_bytes - 1) / piece_bytes;
    }
};

/// Which stripes of its runs a trunk pack holds: those whose number modulo `count` is `index`.
struct Part {
    std::uint32_t index = 0;
    std::uint32_t count = 1;
    bool operator==(const Part&) const = default;
};

/// Which checkpoint a pack was made from, as hex digits.
struct Origin {
    std::string fingerprint;    // model::fingerprint
    std::string config_digest;  // model::config_digest
    bool operator==(const Origin&) const = default;
};

namespace format {

static_assert(std::endian::native == std::endian::little, "packs are little-endian");

inline constexpr std::array<char, 8> kMagic = {'k', '3', 'p', 'a', 'c', 'k', '\r', '\n'};
inline constexpr std::uint32_t kVersion = 2;
inline constexpr std::size_t kDigestChars = 32;
/// Of entries; the released model has 82,432 experts.
inline constexpr std::uint64_t kMaxEntries = std::uint64_t{1} << 20U;
/// Of parts.
inline constexpr std::uint32_t kMaxParts = 8;
/// Of pieces: 2 TB even if all had 16 KiB.
inline constexpr std::uint64_t kMaxPieces = std::uint64_t{1} << 27U;

enum class State : std::uint32_t { unfinished = 0, complete = 1 };

/// At offset 0; the rest of its block is zero.
struct Header {
    std::array<char, 8> magic = kMagic;
    std::uint32_t version = kVersion;
    Kind kind = Kind::trunk;
    State state = State::unfinished;
    std::uint16_t part = 0;
    std::uint16_t n_parts = 1;
    std::uint64_t file_bytes = 0;
    std::uint64_t n_entries = 0;
    std::uint64_t n_pieces = 0;
    std::array<char, kDigestChars> fingerprint{};
    std::array<char, kDigestChars> config_digest{};
    std::uint64_t table_hash = 0;  // XXH3-64 of the table, its padding included; 0 while unfinished
    std::uint64_t header_hash = 0;  // XXH3-64 of the block with this field zero
};
static_assert(sizeof(Header) == 128 && offsetof(Header, file_bytes) == 24 &&
              offsetof(Header, fingerprint) == 48 && offsetof(Header, table_hash) == 112);

/// n_entries of these, then n_pieces checksums (u64), then zeros up to a whole block.
struct TableEntry {
    EntryKey key;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t piece_bytes = 0;
    std::uint64_t first_piece = 0;
};
static_assert(sizeof(TableEntry) == 40 && offsetof(TableEntry, offset) == 8);

inline constexpr std::uint64_t kTableOffset = storage::kBlockBytes;

constexpr std::uint64_t checksums_offset(std::uint64_t n_entries) noexcept {
    return kTableOffset + n_entries * sizeof(TableEntry);
}
constexpr std::uint64_t table_bytes(std::uint64_t n_entries, std::uint64_t n_pieces) noexcept {
    return storage::block_ceiling(n_entries * sizeof(TableEntry) +
                                  n_pieces * sizeof(std::uint64_t));
}

std::uint64_t hash(std::span<const std::byte> bytes) noexcept;
/// The block at offset 0, header_hash filled in.
std::vector<std::byte> header_block(Header header);

}  // namespace format

/// Fills in offset and first_piece of all entries, which lie one after the other.
/// Returns the size of the file.
std::uint64_t lay_out(std::span<Entry> entries) noexcept;

}  // namespace k3::pack
