// Experts from packs: the records of the checkpoint, and refusals with place and numbers.

#include "services/experts/pack_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/base/memory_block.h"
#include "common/pack/make_pack.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::experts;
using namespace k3::test;

namespace {

const model::Model& tiny_model() {
    static const model::Model model = model::open_model(golden_dir() / "tiny-k3").value();
    return model;
}

model::Placement share_of(const char* share) {
    return model::parse_share(share, tiny_model().config).value();
}

bool keep_going(std::uint64_t /*done*/, std::uint64_t /*total*/) { return true; }

std::filesystem::path pack_of(const TempDir& dir, const char* share) {
    const auto file = dir.path() / "experts.k3pack";
    auto made = pack::make_expert_pack(tiny_model(), share_of(share), file, keep_going);
    REQUIRE_MESSAGE(made.has_value(), made.error().sentence());
    return file;
}

std::unique_ptr<PackStore> open_store(const std::filesystem::path& file, const char* share) {
    auto store = PackStore::create(pack::Pack::open(file, pack::Kind::experts).value(),
                                   tiny_model(), share_of(share));
    REQUIRE_MESSAGE(store.has_value(), store.error().sentence());
    return std::move(store).value();
}

}  // namespace

TEST_CASE("a pack gives the same record as the checkpoint, and counts what it reads") {
    TempDir dir;
    auto packed = open_store(pack_of(dir, "1/3"), "1/3");
    auto plain = CheckpointStore::create(tiny_model(), share_of("1/3")).value();
    CHECK(packed->record_bytes() == plain->record_bytes());
    std::uint64_t n = 0;
    for (std::uint32_t layer = 1; layer < 13; ++layer)
        for (std::uint32_t expert = 0; expert < 24; ++expert) {
            if (!share_of("1/3").holds(layer, expert)) continue;
            MemoryBlock a = MemoryBlock::create(packed->slot_bytes(), "a test").value();
            MemoryBlock b = MemoryBlock::create(plain->slot_bytes(), "a test").value();
            auto from_pack = packed->read({layer, expert}, a.span());
            auto from_shard = plain->read({layer, expert}, b.span());
            REQUIRE(from_pack.has_value());
            REQUIRE(from_shard.has_value());
            CHECK(std::ranges::equal(*from_pack, *from_shard));
            ++n;
        }
    CHECK(packed->counts().runs == n);
    CHECK(packed->counts().read_bytes == n * 9792);
    CHECK(packed->counts().rounding_bytes == n * (12288 - 9792));
}

TEST_CASE("experts that the pack lacks are refused at start, and when asked for") {
    TempDir dir;
    const auto file = pack_of(dir, "layers 1-2 experts 0-3");
    auto store = PackStore::create(pack::Pack::open(file).value(), tiny_model(),
                                   share_of("layers 2-3 experts 0-3"));
    REQUIRE_FALSE(store.has_value());
    CHECK(store.error().code == ErrorCode::not_found);
    CHECK(contains(store.error().message,
                   "holds 8 experts and lacks 4 of the 8 of this share: layer 3 expert 0, layer 3 "
                   "expert 1, layer 3 expert 2, ..."));
    auto smaller = open_store(file, "layers 1 experts 0");
    MemoryBlock slot = MemoryBlock::create(smaller->slot_bytes(), "a test").value();
    auto read = smaller->read({9, 9}, slot.span());
    REQUIRE_FALSE(read.has_value());
    CHECK(read.error().code == ErrorCode::not_found);
}

TEST_CASE("a weight that fp32 cannot hold is refused even with a right checksum") {
    TempDir dir;
    const ExpertRecord layout(tiny_model().config);
    const auto file = dir.path() / "foreign";
    auto source = [&](const pack::Entry&, std::uint64_t, std::span<std::byte> dst) {
        std::ranges::fill(dst, std::byte{0x11});
        dst[layout.offset(3) + 5] = std::byte{255};
        return Status::ok();
    };
    REQUIRE(pack::write_pack(pack::plan_expert_pack(tiny_model(), share_of("layers 4 experts 7")),
                             file, source, keep_going)
                .has_value());
    auto store = open_store(file, "layers 4 experts 7");
    MemoryBlock slot = MemoryBlock::create(store->slot_bytes(), "a test").value();
    auto read = store->read({4, 7}, slot.span());
    REQUIRE_FALSE(read.has_value());
    CHECK(read.error().code == ErrorCode::corrupt);
    CHECK(contains(read.error().message, "layer 4 expert 7"));
    CHECK(contains(read.error().message, "scale byte 255"));
    CHECK(contains(read.error().message, file.string() + " at byte "));
}
