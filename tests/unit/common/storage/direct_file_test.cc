#include "common/storage/direct_file.h"
#include "common/base/memory_block.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

using namespace k3;
using storage::DirectFile;
using storage::kBlockBytes;
namespace fs = std::filesystem;

namespace {

/// Memory for whole blocks.
class Blocks {
  public:
    explicit Blocks(std::size_t n)
        : memory_(MemoryBlock::create(n * kBlockBytes, "a test").value()) {}
    std::span<std::byte> span() { return memory_.span(); }
    std::string text(std::size_t n) const {
        return {reinterpret_cast<const char*>(memory_.data()), n};
    }

  private:
    MemoryBlock memory_;
};

std::string numbered(std::size_t bytes) {
    std::string text;
    for (std::size_t i = 0; text.size() < bytes; ++i) text += std::to_string(i) + " ";
    text.resize(bytes);
    return text;
}

DirectFile opened(const fs::path& path,
                  DirectFile::Mode mode = DirectFile::Mode::direct_if_possible) {
    auto file = DirectFile::open(path, mode);
    REQUIRE(file.has_value());
    return std::move(file).value();
}

}  // namespace

TEST_CASE("direct and buffered reads give the same bytes") {
    test::TempDir temp;
    const std::string text = numbered(5 * kBlockBytes + 100);
    test::write_file(temp.path() / "f", text);
    for (auto mode : {DirectFile::Mode::direct_if_possible, DirectFile::Mode::buffered}) {
        const DirectFile file = opened(temp.path() / "f", mode);
        CHECK(file.bytes() == text.size());
        Blocks middle(2);
        REQUIRE(file.read(2 * kBlockBytes, middle.span()).has_value());
        CHECK(middle.text(2 * kBlockBytes) == text.substr(2 * kBlockBytes, 2 * kBlockBytes));
        Blocks end(3);  // the file ends in the second of them
        REQUIRE(file.read(4 * kBlockBytes, end.span()).has_value());
        CHECK(end.text(kBlockBytes + 100) == text.substr(4 * kBlockBytes));
        CHECK(file.read(8 * kBlockBytes, end.span()).has_value());  // nothing is there
    }
}

TEST_CASE("where direct reads are impossible, reads are buffered and the reason is there") {
    const fs::path path = fs::path("/dev/shm") / ("k3-direct-" + std::to_string(::getpid()));
    test::write_file(path, numbered(kBlockBytes));
    const DirectFile in_memory = opened(path);
    Blocks block(1);
    CHECK(in_memory.read(0, block.span()).has_value());
    CHECK(block.text(kBlockBytes) == numbered(kBlockBytes));
    CHECK(in_memory.is_direct() == in_memory.why_buffered().empty());
    const DirectFile switched_off = opened(path, DirectFile::Mode::buffered);
    CHECK_FALSE(switched_off.is_direct());
    CHECK(switched_off.why_buffered() == "direct reads are switched off");
    fs::remove(path);
}

TEST_CASE("a file that is cut after it was opened is corrupt, with both numbers") {
    test::TempDir temp;
    test::write_file(temp.path() / "f", numbered(4 * kBlockBytes));
    for (auto mode : {DirectFile::Mode::direct_if_possible, DirectFile::Mode::buffered}) {
        fs::resize_file(temp.path() / "f", 4 * kBlockBytes);
        const DirectFile file = opened(temp.path() / "f", mode);
        fs::resize_file(temp.path() / "f", kBlockBytes + 7);
        Blocks blocks(4);
        const Status read = file.read(0, blocks.span());
        REQUIRE_FALSE(read.has_value());
        CHECK(read.error().code == ErrorCode::corrupt);
        CHECK(test::contains(read.error().message, "wanted 16384 bytes at offset 0, got 4103"));
    }
}

TEST_CASE("what is not a file is refused as everywhere") {
    test::TempDir temp;
    CHECK(DirectFile::open(temp.path() / "none").error().code == ErrorCode::not_found);
    CHECK(DirectFile::open(temp.path()).error().code == ErrorCode::corrupt);
}
