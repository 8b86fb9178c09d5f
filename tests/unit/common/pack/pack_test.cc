// Reading packs: every byte of the file is protected, and every refusal says where.

#include "common/pack/pack.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>

#include "tests/unit/common/pack/fixtures.h"

using namespace k3;
using namespace k3::pack;
using namespace k3::test;

namespace {

/// What reading the whole pack says after `damage` has changed its bytes.
template <typename Damage>
Error refusal_after(const std::string& good, const std::filesystem::path& path, Damage damage) {
    std::string bytes = good;
    damage(bytes);
    write_file(path, bytes);
    const Status read = read_all(path);
    REQUIRE_FALSE(read.has_value());
    CHECK(contains(read.error().message, path.string()));
    return read.error();
}

}  // namespace

TEST_CASE("pieces are read alone or together, directly or buffered, and hold what was written") {
    TempDir dir;
    const auto path = dir.path() / "small.pack";
    write_small_pack(path);
    for (const Pack::Mode mode : {Pack::Mode::direct_if_possible, Pack::Mode::buffered}) {
        auto opened = Pack::open(path, Kind::trunk, mode);
        REQUIRE(opened.has_value());
        const Pack& pack = **opened;
        CHECK(pack.origin() == small_plan().origin);
        CHECK(pack.file_bytes() == std::filesystem::file_size(path));
        CHECK((mode == Pack::Mode::buffered) <= !pack.why_buffered().empty());
        REQUIRE(pack.entries().size() == 3);
        CHECK(pack.find({0, 2}) == nullptr);
        CHECK(pack.find({4, 0}) == nullptr);
        for (const Entry& entry : pack.entries()) {
            CHECK(pack.find(entry.key) == &entry);
            CHECK(entry.offset % storage::kBlockBytes == 0);
            MemoryBlock whole = MemoryBlock::create(entry.stored_bytes(), "a test").value();
            REQUIRE(pack.read(entry, whole.span()).has_value());
            for (std::uint64_t i = 0; i < entry.stored_bytes(); ++i)
                REQUIRE(whole.data()[i] ==
                        (i < entry.bytes ? small_byte(entry.key, i) : std::byte{0}));
            for (std::uint64_t first = 0; first < entry.n_pieces(); ++first) {
                const Pack::Pieces rest{first, entry.n_pieces() - first};
                MemoryBlock part =
                    MemoryBlock::create(Pack::bytes_of(entry, rest), "a test").value();
                REQUIRE(pack.read(entry, rest, part.span()).has_value());
                CHECK(std::memcmp(part.data(), whole.data() + first * entry.piece_bytes,
                                  part.size()) == 0);
            }
        }
    }
}

TEST_CASE("a range of bytes lies in the pieces that it touches and in no others") {
    Entry entry;
    entry.bytes = 10 * storage::kBlockBytes;
    entry.piece_bytes = 4 * storage::kBlockBytes;
    auto pieces = [&entry](std::uint64_t offset, std::uint64_t bytes) {
        const Pack::Pieces found = Pack::pieces_of(entry, offset, bytes);
        return std::pair(found.first, found.count);
    };
    CHECK(pieces(0, 1) == std::pair<std::uint64_t, std::uint64_t>(0, 1));
    CHECK(pieces(0, entry.piece_bytes) == std::pair<std::uint64_t, std::uint64_t>(0, 1));
    CHECK(pieces(entry.piece_bytes - 1, 2) == std::pair<std::uint64_t, std::uint64_t>(0, 2));
    CHECK(pieces(entry.piece_bytes, 1) == std::pair<std::uint64_t, std::uint64_t>(1, 1));
    CHECK(pieces(0, entry.bytes) == std::pair<std::uint64_t, std::uint64_t>(0, 3));
    CHECK(Pack::bytes_of(entry, {2, 1}) == 2 * storage::kBlockBytes);
}

TEST_CASE("one flipped bit anywhere in the file is refused, with the place where it is data") {
    TempDir dir;
    const auto path = dir.path() / "small.pack";
    write_small_pack(path);
    const std::string good = read_file(path);
    const std::size_t data_begins = 2 * storage::kBlockBytes;
    // Every byte of the header and the list of entries, and a stride that meets every block.
    for (std::size_t at = 0; at < good.size(); at += at < 300 || at - 4096 < 300 ? 1 : 509) {
        CAPTURE(at);
        const Error error = refusal_after(good, path, [at](std::string& bytes) {
            bytes[at] = static_cast<char>(bytes[at] ^ 0x10);
        });
        const bool is_version = at >= 8 && at < 12;
        CHECK(error.code == (is_version ? ErrorCode::incompatible : ErrorCode::corrupt));
        if (at >= data_begins) CHECK(contains(error.message, "the checksum of"));
    }
    const Error error = refusal_after(good, path, [&](std::string& bytes) {
        bytes[data_begins + 3 * storage::kBlockBytes] ^= 1;
    });
    CHECK(contains(error.message, "layer 0: the checksum of 8192 bytes at offset 16384 is wrong"));
}

TEST_CASE("a file that is too short, too long or no pack is refused with its numbers") {
    TempDir dir;
    const auto path = dir.path() / "small.pack";
    write_small_pack(path);
    const std::string good = read_file(path);
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{1}, storage::kBlockBytes - 1, storage::kBlockBytes,
          storage::kBlockBytes + 1, good.size() - storage::kBlockBytes, good.size() - 1}) {
        CAPTURE(size);
        const Error error =
            refusal_after(good, path, [size](std::string& bytes) { bytes.resize(size); });
        CHECK(error.code == ErrorCode::corrupt);
        CHECK(contains(error.message, std::to_string(size)));
    }
    const Error longer = refusal_after(good, path, [](std::string& bytes) { bytes += "x"; });
    CHECK(contains(longer.message, std::to_string(good.size() + 1)));
    const Error other = refusal_after(
        good, path, [](std::string& bytes) { bytes = std::string(bytes.size(), 'x'); });
    CHECK(contains(other.message, "not a pack"));
}

TEST_CASE("a pack of an earlier version is refused with both versions and what to do") {
    TempDir dir;
    const auto path = dir.path() / "small.pack";
    write_small_pack(path);
    const Error error =
        refusal_after(read_file(path), path, [](std::string& bytes) { bytes[8] = 1; });
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(contains(error.message, "is a pack of version 1, and this build reads version 2"));
    CHECK(contains(error.remedy, "make the pack again with k3pipe pack"));
}

TEST_CASE("a file that is truncated while it is open is refused by the next read") {
    TempDir dir;
    const auto path = dir.path() / "small.pack";
    write_small_pack(path);
    auto pack = Pack::open(path);
    REQUIRE(pack.has_value());
    std::filesystem::resize_file(path, (*pack)->file_bytes() - storage::kBlockBytes);
    const Entry& last = (*pack)->entries().back();
    MemoryBlock memory = MemoryBlock::create(last.stored_bytes(), "a test").value();
    const Status read = (*pack)->read(last, memory.span());
    REQUIRE_FALSE(read.has_value());
    CHECK(read.error().code == ErrorCode::corrupt);
    CHECK(contains(read.error().message, "layer 3"));
    CHECK(contains(read.error().message, "ends early"));
}

TEST_CASE("a pack of the other kind is not what was asked for") {
    TempDir dir;
    const auto path = dir.path() / "small.pack";
    write_small_pack(path);
    auto pack = Pack::open(path, Kind::experts);
    REQUIRE_FALSE(pack.has_value());
    CHECK(pack.error().code == ErrorCode::incompatible);
    CHECK(contains(pack.error().sentence(), "k3pipe pack experts"));
}
