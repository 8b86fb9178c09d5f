#include "common/storage/safetensors_writer.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>

#include <csignal>

#include "common/storage/file.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

namespace k3::storage {

namespace {

namespace fs = std::filesystem;

const std::vector<TensorSpec> kTwoTensors = {{"b.weight", DType::bf16, {3, 5}},
                                             {"a.scale", DType::u8, {7}}};

std::vector<std::byte> counted_bytes(std::size_t n) {
    std::vector<std::byte> bytes(n);
    for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>(i * 7 + 1);
    return bytes;
}

}  // namespace

TEST_CASE("what is written reads back: names, types, shapes and bytes") {
    test::TempDir dir;
    const fs::path path = dir.path() / "model.safetensors";
    const std::vector<std::byte> data = counted_bytes(30 + 7);
    auto writer = SafetensorsWriter::create(path, kTwoTensors);
    REQUIRE(writer.has_value());
    REQUIRE((*writer)->append(std::span(data).first(11)).has_value());
    REQUIRE((*writer)->append(std::span(data).subspan(11)).has_value());
    CHECK_FALSE(fs::exists(path));  // not before it is whole
    REQUIRE((*writer)->finish().has_value());

    auto file = open_regular(path);
    REQUIRE(file.has_value());
    CHECK(file->bytes == (*writer)->file_bytes());
    NamePool names;
    auto tensors = read_safetensors_header(file->fd.get(), file->bytes, path, names);
    REQUIRE(tensors.has_value());
    REQUIRE(tensors->size() == 2);
    const TensorInfo& scale = (*tensors)[0];
    const TensorInfo& weight = (*tensors)[1];
    CHECK(scale.name == "a.scale");
    CHECK(weight.name == "b.weight");
    CHECK(weight.dtype == DType::bf16);
    CHECK(to_string(weight.shape) == "[3, 5]");
    CHECK(weight.offset % 8 == 0);
    std::vector<std::byte> read(data.size());
    REQUIRE(read_exactly(file->fd.get(), weight.offset, read, path).has_value());
    CHECK(read == data);
    CHECK(scale.offset == weight.offset + 30);
}

TEST_CASE("a writer that does not finish leaves nothing") {
    test::TempDir dir;
    {
        auto writer = SafetensorsWriter::create(dir.path() / "model.safetensors", kTwoTensors);
        REQUIRE(writer.has_value());
        CHECK_FALSE(fs::is_empty(dir.path()));
    }
    CHECK(fs::is_empty(dir.path()));
}

TEST_CASE("a file that cannot be created or written is named") {
    test::TempDir dir;
    auto nowhere = SafetensorsWriter::create(dir.path() / "no" / "m.safetensors", kTwoTensors);
    REQUIRE_FALSE(nowhere.has_value());
    CHECK(test::contains(nowhere.error().message, "no/m.safetensors"));

    // The largest file this process may write is shorter than the data.
    auto writer = SafetensorsWriter::create(dir.path() / "m.safetensors", kTwoTensors);
    REQUIRE(writer.has_value());
    rlimit before = {};
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    const rlimit small = {16, before.rlim_max};
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    const Status status = (*writer)->append(counted_bytes(37));
    REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);
    std::signal(SIGXFSZ, old_handler);
    REQUIRE_FALSE(status.has_value());
    CHECK(test::contains(status.error().message, "m.safetensors"));
    writer->reset();
    CHECK(fs::is_empty(dir.path()));
}

}  // namespace k3::storage
