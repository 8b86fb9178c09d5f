#include "services/trunk/weight_ring.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/base/memory_block.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

namespace k3::test {

namespace {

using storage::kBlockBytes;
using storage::ReadRange;
using trunk::WeightRing;

constexpr std::size_t kRingFileBlocks = 40;

struct RingFile {
    TempDir temp;
    std::string text;
    std::optional<storage::DirectFile> file;

    RingFile() {
        for (std::size_t i = 0; text.size() < kRingFileBlocks * kBlockBytes; ++i)
            text += std::to_string(i) + ",";
        text.resize(kRingFileBlocks * kBlockBytes);
        write_file(temp.path() / "f", text);
        file.emplace(storage::DirectFile::open(temp.path() / "f").value());
    }
    ReadRange range(std::uint64_t offset, std::uint64_t bytes) const {
        return {&*file, offset, bytes};
    }
    bool is(std::span<const std::byte> bytes, std::uint64_t offset) const {
        return std::memcmp(bytes.data(), text.data() + offset, bytes.size()) == 0;
    }
};

/// The file in units of three blocks; the last one has one block.
class ThreeBlocks final : public storage::ReadSource {
  public:
    explicit ThreeBlocks(const storage::DirectFile& file) : file_(file) {}
    std::uint64_t unit_bytes() const noexcept override { return 3 * kBlockBytes; }
    std::uint64_t end() const noexcept override { return file_.bytes(); }
    Status read(std::uint64_t offset, std::span<std::byte> dst) const override {
        const bool whole = dst.size() % unit_bytes() == 0 || offset + dst.size() == end();
        if (offset % unit_bytes() == 0 && whole) return file_.read(offset, dst);
        return Error{ErrorCode::internal, "a read of parts of units", ""};
    }

  private:
    const storage::DirectFile& file_;
};

const std::function<bool()> kGoOn = [] { return false; };

}  // namespace

TEST_CASE("pieces of any size and place come out whole and in order, around the ring's end") {
    RingFile f;
    storage::ReadPool pool({{kBlockBytes, 3}, {}});
    MemoryBlock memory = MemoryBlock::create(7 * kBlockBytes, "a test").value();
    WeightRing ring(pool, memory.span(), 16);
    // Sizes from 1 byte to some blocks, offsets at any byte; 300 of them wrap around many times.
    struct Piece {
        std::uint64_t offset;
        std::uint64_t bytes;
    };
    std::vector<Piece> pieces;
    for (std::uint64_t i = 0; i < 300; ++i)
        pieces.push_back({(i * 7919) % (30 * kBlockBytes), 1 + (i * 5413) % (3 * kBlockBytes)});
    std::size_t pushed = 0;
    std::size_t most = 0;
    for (std::size_t used = 0; used < pieces.size(); ++used) {
        while (pushed < pieces.size() &&
               ring.try_push(static_cast<std::uint32_t>(pushed),
                             f.range(pieces[pushed].offset, pieces[pushed].bytes)))
            ++pushed;
        most = std::max(most, pushed - used);
        REQUIRE(!ring.is_empty());
        REQUIRE(ring.front() == used);
        const auto bytes = ring.wait_front(kGoOn);
        REQUIRE(bytes.has_value());
        REQUIRE(bytes->size() == pieces[used].bytes);
        REQUIRE(f.is(*bytes, pieces[used].offset));
        ring.pop_front();
    }
    CHECK(ring.is_empty());
    CHECK(most >= 3);
}

TEST_CASE("a source with larger units is read in whole ones, whatever the size of requests") {
    static_assert(kRingFileBlocks % 3 == 1);
    RingFile f;
    const ThreeBlocks source(*f.file);
    for (const std::size_t request_blocks : {1U, 2U, 4U, 7U}) {
        storage::ReadPool pool({{request_blocks * kBlockBytes, 2}, {}});
        MemoryBlock memory = MemoryBlock::create(24 * kBlockBytes, "a test").value();
        WeightRing ring(pool, memory.span(), 4);
        const std::uint64_t end = kRingFileBlocks * kBlockBytes;
        for (const ReadRange& range :
             {ReadRange{&source, 0, 1}, ReadRange{&source, 3 * kBlockBytes - 1, 2},
              ReadRange{&source, 5 * kBlockBytes + 17, 11 * kBlockBytes},
              ReadRange{&source, end - 1, 1}, ReadRange{&source, end - 9 * kBlockBytes + 5, 999}}) {
            CAPTURE(range.offset);
            REQUIRE(ring.try_push(0, range));
            const auto bytes = ring.wait_front(kGoOn);
            REQUIRE_MESSAGE(bytes.has_value(), bytes.error().sentence());
            CHECK(bytes->size() == range.bytes);
            CHECK(f.is(*bytes, range.offset));
            ring.pop_front();
        }
    }
}

TEST_CASE("a ring that is full takes the next piece when the oldest has gone") {
    RingFile f;
    storage::ReadPool pool({{kBlockBytes, 2}, {}});
    MemoryBlock memory = MemoryBlock::create(4 * kBlockBytes, "a test").value();
    WeightRing ring(pool, memory.span(), 8);
    CHECK(ring.try_push(0, f.range(0, 2 * kBlockBytes)));
    CHECK(ring.try_push(1, f.range(8 * kBlockBytes, 2 * kBlockBytes)));
    CHECK(!ring.try_push(2, f.range(0, 1)));
    const auto first = ring.wait_front(kGoOn);
    REQUIRE(first.has_value());
    CHECK(f.is(*first, 0));
    ring.pop_front();
    CHECK(ring.try_push(2, f.range(100, 1)));               // in the room of the first
    CHECK(!ring.try_push(3, f.range(0, 2 * kBlockBytes)));  // one block is left before the second
    const auto second = ring.wait_front(kGoOn);
    REQUIRE(second.has_value());
    CHECK(f.is(*second, 8 * kBlockBytes));
}

TEST_CASE("a ring that was cleared begins anew") {
    RingFile f;
    storage::ReadPool pool({{kBlockBytes, 1}, {}});
    MemoryBlock memory = MemoryBlock::create(8 * kBlockBytes, "a test").value();
    WeightRing ring(pool, memory.span(), 8);
    for (std::uint32_t i = 0; i < 4; ++i)
        CHECK(ring.try_push(i, f.range(i * kBlockBytes, 2 * kBlockBytes)));
    ring.clear();
    CHECK(ring.is_empty());
    CHECK(ring.try_push(7, f.range(3, 8 * kBlockBytes - 3)));  // all of it
    CHECK(ring.front() == 7);
    const auto bytes = ring.wait_front(kGoOn);
    REQUIRE(bytes.has_value());
    CHECK(f.is(*bytes, 3));
}

TEST_CASE("an error of one piece does not touch those before it") {
    RingFile f;
    storage::ReadPool pool(
        {{kBlockBytes, 2},
         [](const storage::ReadSource&, std::uint64_t offset, std::size_t) -> Status {
             if (offset != 5 * kBlockBytes) return Status::ok();
             return Error{ErrorCode::io, "no such block", ""};
         }});
    MemoryBlock memory = MemoryBlock::create(8 * kBlockBytes, "a test").value();
    WeightRing ring(pool, memory.span(), 8);
    CHECK(ring.try_push(0, f.range(0, 10)));
    CHECK(ring.try_push(1, f.range(4 * kBlockBytes, 2 * kBlockBytes)));
    CHECK(ring.wait_front(kGoOn).has_value());
    ring.pop_front();
    const auto failed = ring.wait_front(kGoOn);
    REQUIRE(!failed.has_value());
    CHECK(failed.error().message == "no such block");
    ring.clear();
    CHECK(ring.try_push(2, f.range(0, 10)));
    CHECK(ring.wait_front(kGoOn).has_value());
}

}  // namespace k3::test
