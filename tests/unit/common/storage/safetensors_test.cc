// Headers of single safetensors files, written by hand: what is read, and every way to refuse.

#include "common/storage/safetensors.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/support/checkpoint_copy.h"

namespace k3::storage {
namespace {

/// A safetensors file of its own: `header` JSON and `data_bytes` bytes of data.
class SmallFile {
  public:
    SmallFile(const std::string& header, std::size_t data_bytes)
        : SmallFile(header.size(), header, data_bytes) {}
    /// With a header length that may be a lie.
    SmallFile(std::uint64_t claimed, const std::string& header, std::size_t data_bytes) {
        std::string bytes(sizeof claimed, '\0');
        std::memcpy(bytes.data(), &claimed, sizeof claimed);
        test::write_file(path(), bytes + header + std::string(data_bytes, 'x'));
    }
    static SmallFile raw(const std::string& bytes) {
        SmallFile file("{}", 0);
        test::write_file(file.path(), bytes);
        return file;
    }

    std::filesystem::path path() const { return dir_->path() / "small.safetensors"; }

    Result<std::vector<TensorInfo>> read(std::span<const std::string> skip_prefixes = {}) {
        Result<OpenFile> file = open_regular(path());
        if (!file) return std::move(file).error();
        return read_safetensors_header(file->fd.get(), file->bytes, path(), names_, skip_prefixes);
    }

  private:
    std::unique_ptr<test::TempDir> dir_ = std::make_unique<test::TempDir>();
    NamePool names_;
};

/// The error of a header, which must name the file, say something and give a remedy.
Error refused(SmallFile file) {
    auto tensors = file.read();
    if (tensors.has_value()) FAIL("was accepted");
    Error error = tensors.error();
    CHECK(error.message.find(file.path().string()) != std::string::npos);
    CHECK(!error.remedy.empty());
    return error;
}

#define CHECK_REFUSED(file, wanted_code, part)                \
    do {                                                      \
        Error error = refused(file);                          \
        CAPTURE(error.message);                               \
        CHECK(error.code == (wanted_code));                   \
        CHECK(error.message.find(part) != std::string::npos); \
    } while (false)

TEST_CASE("a header gives tensors in order of name with offsets from the start of the file") {
    std::string header = R"({"__metadata__":{"format":"pt"},)"
                         R"("b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                         R"("a":{"data_offsets":[0,4],"shape":[],"dtype":"F32"},)"
                         R"("c":{"dtype":"U8","shape":[0,7],"data_offsets":[16,16]}}   )";
    SmallFile file(header, 16);
    auto tensors = file.read();
    REQUIRE(tensors.has_value());
    REQUIRE(tensors->size() == 3);
    const std::uint64_t start = 8 + header.size();
    const TensorInfo& a = (*tensors)[0];
    CHECK(a.name == "a");
    CHECK(a.dtype == DType::f32);
    CHECK(a.shape.empty());
    CHECK(a.offset == start);
    CHECK(a.bytes == 4);
    const TensorInfo& b = (*tensors)[1];
    CHECK(b.name == "b");
    CHECK(b.dtype == DType::bf16);
    CHECK(to_string(b.shape) == "[2, 3]");
    CHECK(b.offset == start + 4);
    CHECK(b.bytes == 12);
    CHECK((*tensors)[2].bytes == 0);
}

TEST_CASE("a header length that cannot be is refused with both numbers") {
    CHECK_REFUSED(SmallFile(0, "{}", 0), ErrorCode::corrupt, "header length 0");
    CHECK_REFUSED(SmallFile(3, "{}", 0), ErrorCode::corrupt,
                  "header length 3 goes beyond the file's 10 bytes");
    CHECK_REFUSED(SmallFile(0xFFFFFFFFFFFFFFFFULL, "{}", 0), ErrorCode::corrupt,
                  "header length 18446744073709551615 goes beyond");
    CHECK_REFUSED(SmallFile::raw("1234567"), ErrorCode::corrupt, "truncated: 7 bytes");
    CHECK_REFUSED(SmallFile::raw(""), ErrorCode::corrupt, "truncated: 0 bytes");
}

TEST_CASE("a header of more than 100 MB is refused before it is read") {
    SmallFile file(100'000'001, "{}", 0);
    std::filesystem::resize_file(file.path(), 200'000'000);  // sparse
    Error error = refused(std::move(file));
    CHECK(error.message.find("header length 100000001 exceeds 100000000 bytes") !=
          std::string::npos);
}

TEST_CASE("a header that is not the JSON of tensors is refused") {
    for (const char* header :
         {"not JSON",
          "{",
          "[]",
          "7",
          R"({"a":7})",
          R"({"a":{}})",
          R"({"a" {}})",
          "{}x",
          R"({"a":{"dtype":"U8","shape":[1]}})",
          R"({"a":{"dtype":"U8","data_offsets":[0,1]}})",
          R"({"a":{"shape":[1],"data_offsets":[0,1]}})",
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})",
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})",
          R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})",
          R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})",
          R"({"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})",
          R"({"a":{"dtype":1,"shape":[1],"data_offsets":[0,1]}})",
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}})",
          R"({"a)",
          "\xff\xfe{}"}) {
        CAPTURE(header);
        CHECK_REFUSED(SmallFile(header, 1), ErrorCode::corrupt, "is not the JSON of a safetensors");
    }
}

TEST_CASE("a tensor beyond the end of the file means that the file is truncated") {
    CHECK_REFUSED(SmallFile(R"({"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", 7),
                  ErrorCode::corrupt,
                  "truncated: tensor w lies at bytes 0 to 8 of the data that begins at");
    CHECK_REFUSED(SmallFile(R"({"w":{"dtype":"U8","shape":[8],)"
                            R"("data_offsets":[18446744073709551600,18446744073709551608]}})",
                            64),
                  ErrorCode::corrupt, "(1 of 1 tensors lie beyond its end)");
}

TEST_CASE("ranges that overlap, run backwards or differ from shape x dtype are refused") {
    CHECK_REFUSED(SmallFile(R"({"v":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
                            R"("w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                            8),
                  ErrorCode::corrupt, "tensors v and w overlap");
    CHECK_REFUSED(SmallFile(R"({"v":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                            R"("w":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                            8),
                  ErrorCode::corrupt, "tensors v and w overlap");
    CHECK_REFUSED(SmallFile(R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[8,4]}})", 8),
                  ErrorCode::corrupt, "tensor w begins at 8 and ends before it, at 4");
    CHECK_REFUSED(SmallFile(R"({"w":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,6]}})", 8),
                  ErrorCode::corrupt,
                  "tensor w of shape [3, 2] and dtype BF16 takes 12 bytes, but its range has 6");
    // A product of 2^64 must not wrap around to the range's 0 bytes.
    CHECK_REFUSED(SmallFile(R"({"w":{"dtype":"F32","shape":[4294967296,1073741824],)"
                            R"("data_offsets":[0,0]}})",
                            8),
                  ErrorCode::corrupt, "takes over 2^64 bytes");
}

TEST_CASE("more than four dimensions, an unknown dtype and a repeated name are refused") {
    CHECK_REFUSED(SmallFile(R"({"w":{"dtype":"U8","shape":[1,1,1,1,1],"data_offsets":[0,1]}})", 1),
                  ErrorCode::corrupt, "tensor w has 5 dimensions, more than 4");
    CHECK_REFUSED(SmallFile(R"({"w":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}})", 2),
                  ErrorCode::incompatible,
                  "tensor w has dtype F16, and only U8, BF16 and F32 are known");
    CHECK_REFUSED(SmallFile(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                            R"("w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                            2),
                  ErrorCode::corrupt, "names tensor w twice");
}

TEST_CASE("of a skipped tensor only the range matters") {
    std::string header =
        R"({"vision.a":{"dtype":"F8_E4M3","shape":[1,2,3,4,5],"data_offsets":[0,8]},)"
        R"("w":{"dtype":"U8","shape":[2],"data_offsets":[8,10]}})";
    const std::vector<std::string> skip = {"vision."};
    SmallFile good(header, 10);
    auto tensors = good.read(skip);
    REQUIRE(tensors.has_value());
    REQUIRE(tensors->size() == 1);
    CHECK(tensors->front().name == "w");
    header.replace(header.find("[8,10]"), 6, "[7,9]");
    SmallFile bad(header, 10);
    auto overlapping = bad.read(skip);
    REQUIRE(!overlapping);
    CHECK(overlapping.error().message.find("tensors vision.a and w overlap") != std::string::npos);
}

TEST_CASE("reading past the end names the file, the offset and both lengths") {
    SmallFile file("{}", 6);  // 16 bytes
    Result<OpenFile> opened = open_regular(file.path());
    REQUIRE(opened.has_value());
    CHECK(opened->bytes == 16);
    std::vector<std::byte> buffer(10);
    CHECK(read_exactly(opened->fd.get(), 6, buffer, file.path()).has_value());
    Status status = read_exactly(opened->fd.get(), 9, buffer, file.path());
    REQUIRE(!status);
    CHECK(status.error().code == ErrorCode::corrupt);
    CHECK(status.error().message ==
          file.path().string() + " ends early: wanted 10 bytes at offset 9, got 7");
    Status wild = read_exactly(opened->fd.get(), ~std::uint64_t{0} - 4, buffer, file.path());
    REQUIRE(!wild);
    CHECK(wild.error().code == ErrorCode::corrupt);
}

}  // namespace
}  // namespace k3::storage
