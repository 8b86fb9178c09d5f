// Checkpoint directories: what opens, what is read, and one case per damage.

#include "common/storage/checkpoint.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"

namespace k3::storage {
namespace {

using test::CheckpointCopy;

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kShard1 = "model-00001-of-000005.safetensors";
constexpr const char* kShard2 = "model-00002-of-000005.safetensors";
constexpr const char* kShard3 = "model-00003-of-000005.safetensors";
constexpr const char* kShard4 = "model-00004-of-000005.safetensors";
constexpr const char* kShard5 = "model-00005-of-000005.safetensors";
constexpr const char* kEmbedding = "language_model.model.embed_tokens.weight";

std::filesystem::path tiny() { return test::golden_dir() / "tiny-k3"; }

Result<std::shared_ptr<const Checkpoint>> open(const std::filesystem::path& directory) {
    Checkpoint::Options options;
    options.directory = directory;
    return Checkpoint::open(std::move(options));
}

std::shared_ptr<const Checkpoint> open_or_fail(const std::filesystem::path& directory) {
    auto checkpoint = open(directory);
    if (!checkpoint) FAIL(checkpoint.error().sentence());
    return std::move(checkpoint).value();
}

/// Opening must fail, with a remedy and with all of `parts` in its sentence.
void check_refused(const std::filesystem::path& directory, ErrorCode code,
                   const std::vector<std::string>& parts) {
    auto checkpoint = open(directory);
    if (checkpoint.has_value()) FAIL("was accepted");
    const Error& error = checkpoint.error();
    CAPTURE(error.message);
    CHECK(to_string(error.code) == to_string(code));
    CHECK(!error.remedy.empty());
    for (const std::string& part : parts) {
        CAPTURE(part);
        CHECK(error.message.find(part) != std::string::npos);
    }
}

const TensorInfo& tensor_of(const Checkpoint& checkpoint, std::string_view name) {
    const TensorInfo* tensor = checkpoint.find(name);
    if (tensor == nullptr) FAIL("no tensor " << std::string(name));
    return *tensor;
}

std::string expert_tensor(const char* part) {
    return std::string("language_model.model.layers.7.block_sparse_moe.experts.13.") + part;
}

TEST_CASE("the golden checkpoint opens: text tensors in order of name, the vision tower skipped") {
    auto checkpoint = open_or_fail(tiny());
    std::span<const TensorInfo> tensors = checkpoint->tensors();
    CHECK(tensors.size() == 2068);  // 2,086 in the index, 18 of them vision
    CHECK(checkpoint->n_shards() == 4);
    CHECK(std::is_sorted(tensors.begin(), tensors.end(),
                         [](const auto& a, const auto& b) { return a.name < b.name; }));
    for (const TensorInfo& tensor : tensors) {
        CHECK(!tensor.name.starts_with("vision_tower."));
        CHECK(!tensor.name.starts_with("mm_projector."));
        CHECK(checkpoint->find(tensor.name) == &tensor);
    }
    CHECK(checkpoint->find("vision_tower.encoder.final_layernorm.weight") == nullptr);
    CHECK(checkpoint->find("") == nullptr);
}

TEST_CASE("without skipping, the vision tower is there as well") {
    Checkpoint::Options options;
    options.directory = tiny();
    options.skip_prefixes.clear();
    auto checkpoint = Checkpoint::open(std::move(options));
    REQUIRE(checkpoint.has_value());
    CHECK((*checkpoint)->tensors().size() == 2086);
    CHECK((*checkpoint)->n_shards() == 5);
}

TEST_CASE("a tensor's bytes are those of its place in the file") {
    auto checkpoint = open_or_fail(tiny());
    for (const char* name :
         {kEmbedding, "language_model.model.layers.7.self_attn.q_a_proj.weight"}) {
        const TensorInfo& tensor = tensor_of(*checkpoint, name);
        std::vector<std::byte> bytes(tensor.bytes);
        REQUIRE(checkpoint->read(tensor, bytes).has_value());
        std::string file = test::read_file(checkpoint->shard_path(tensor.shard));
        CHECK(std::memcmp(bytes.data(), file.data() + tensor.offset, bytes.size()) == 0);
    }
    const TensorInfo& embedding = tensor_of(*checkpoint, kEmbedding);
    CHECK(to_string(embedding.shape) == "[768, 80]");
    CHECK(embedding.dtype == DType::bf16);
    CHECK(embedding.offset == 8 + 560 + 122880);  // data_offsets count from the end of the header
}

TEST_CASE("an expert whose tensors lie in two shards is found in both") {
    auto checkpoint = open_or_fail(tiny());
    for (const char* part : {"w1.weight_packed", "w1.weight_scale", "w2.weight_packed"})
        CHECK(
            checkpoint->shard_path(tensor_of(*checkpoint, expert_tensor(part)).shard).filename() ==
            kShard2);
    for (const char* part : {"w2.weight_scale", "w3.weight_packed", "w3.weight_scale"}) {
        const TensorInfo& tensor = tensor_of(*checkpoint, expert_tensor(part));
        CHECK(checkpoint->shard_path(tensor.shard).filename() == kShard3);
        std::vector<std::byte> bytes(tensor.bytes);
        CHECK(checkpoint->read(tensor, bytes).has_value());
    }
}

TEST_CASE("require returns the tensor asked for and names both sides otherwise") {
    auto checkpoint = open_or_fail(tiny());
    const std::vector<std::uint64_t> shape = {768, 80};
    auto found = checkpoint->require(kEmbedding, DType::bf16, shape);
    REQUIRE(found.has_value());
    CHECK(*found == checkpoint->find(kEmbedding));

    auto absent = checkpoint->require("no.such.tensor", DType::bf16, shape);
    REQUIRE(!absent);
    CHECK(absent.error().code == ErrorCode::not_found);
    CHECK(absent.error().message.find("holds no tensor no.such.tensor") != std::string::npos);

    auto wrong_type = checkpoint->require(kEmbedding, DType::f32, shape);
    REQUIRE(!wrong_type);
    CHECK(wrong_type.error().code == ErrorCode::incompatible);
    CHECK(wrong_type.error().message.find("is BF16 [768, 80], and config.json calls for F32") !=
          std::string::npos);

    auto wrong_shape = checkpoint->require(kEmbedding, DType::bf16, std::vector<std::uint64_t>{80});
    REQUIRE(!wrong_shape);
    CHECK(wrong_shape.error().code == ErrorCode::incompatible);
    CHECK(wrong_shape.error().message.find("calls for BF16 [80]") != std::string::npos);
}

TEST_CASE("a shard that holds only the vision tower may be missing, another may not") {
    CheckpointCopy copy(tiny());
    copy.remove(kShard5);
    open_or_fail(copy.path());
    copy.remove(kShard3);
    check_refused(copy.path(), ErrorCode::not_found,
                  {copy.index().string(), "names 959 tensors in", kShard3, "no such file"});
}

TEST_CASE("a directory or an index that is missing is refused by name") {
    CheckpointCopy copy(tiny());
    check_refused(copy.path() / "nowhere", ErrorCode::not_found,
                  {(copy.path() / "nowhere").string(), "does not exist"});
    check_refused(copy.config(), ErrorCode::not_found, {copy.config().string(), "not a directory"});
    copy.remove(kIndex);
    check_refused(copy.path(), ErrorCode::not_found, {copy.index().string()});
}

TEST_CASE("an index that promises a tensor which the shard does not hold is refused") {
    CheckpointCopy copy(tiny());
    copy.replace_text(kIndex, "layers.3.self_attn.q_a_proj.weight",
                      "layers.3.self_attn.q_z_proj.weight");
    check_refused(copy.path(), ErrorCode::corrupt,
                  {copy.index().string(),
                   "promises tensor language_model.model.layers.3.self_attn.q_z_proj.weight"});
}

TEST_CASE("an index that names the wrong shard of two is refused") {
    CheckpointCopy copy(tiny());
    std::string name = "\"" + std::string(kEmbedding) + "\":\"";
    copy.replace_text(kIndex, name + kShard4, name + kShard1);
    check_refused(copy.path(), ErrorCode::corrupt,
                  {"promises tensor " + std::string(kEmbedding) + " in " + kShard1,
                   std::string("lies in ") + kShard4});
}

TEST_CASE("a tensor that the index does not name is refused") {
    CheckpointCopy copy(tiny());
    copy.replace_text(kIndex, "\"" + std::string(kEmbedding) + "\"", "\"vision_tower.moved\"");
    check_refused(copy.path(), ErrorCode::corrupt,
                  {"does not name tensor " + std::string(kEmbedding), kShard4});
}

TEST_CASE("a tensor in two shards is refused, whichever of them the index names") {
    CheckpointCopy copy(tiny());
    copy.edit_header(kShard4, [](std::string header) {
        std::string name = "language_model.model.norm.weight";
        return header.replace(header.find(name), name.size(),
                              "language_model.model.layers.0.input_layernorm.weight");
    });
    check_refused(
        copy.path(), ErrorCode::corrupt,
        {"tensor language_model.model.layers.0.input_layernorm.weight lies in", kShard1, kShard4});
}

TEST_CASE("an index that is no index is refused") {
    for (const char* text :
         {"", "nonsense", "[]", "{}", R"({"weight_map": 7})", R"({"weight_map": {"a": 7}})",
          R"({"weight_map": {"a": "b")", R"({"weight_map": {"a\n": "b"}})"}) {
        CAPTURE(text);
        CheckpointCopy copy(tiny());
        test::write_file(copy.index(), text);
        check_refused(copy.path(), ErrorCode::corrupt, {copy.index().string(), "not an index"});
    }
    CheckpointCopy copy(tiny());
    test::write_file(copy.index(), R"({"weight_map": {}})");
    check_refused(copy.path(), ErrorCode::corrupt, {"names no tensor"});
    test::write_file(copy.index(), R"({"weight_map": {"a": "../secret"}})");
    check_refused(copy.path(), ErrorCode::corrupt, {"'../secret', named for tensor a"});
}

TEST_CASE("a truncated shard is refused at open with both lengths") {
    CheckpointCopy copy(tiny());
    auto full = std::filesystem::file_size(copy.file(kShard2));
    copy.truncate(kShard2, full - 1);
    check_refused(copy.path(), ErrorCode::corrupt,
                  {copy.file(kShard2).string(), "truncated: tensor",
                   "the file has " + std::to_string(full - 1) + " bytes"});
    copy.truncate(kShard2, 50'000);  // inside the header
    check_refused(copy.path(), ErrorCode::corrupt,
                  {"header length 100680 goes beyond the file's 50000 bytes"});
    copy.truncate(kShard2, 0);
    check_refused(copy.path(), ErrorCode::corrupt, {"truncated: 0 bytes"});
}

TEST_CASE("a shard with a damaged header is refused by name") {
    SUBCASE("length 0") {
        CheckpointCopy copy(tiny());
        for (std::uint64_t i = 0; i < 8; ++i) copy.set_byte(kShard1, i, 0);
        check_refused(copy.path(), ErrorCode::corrupt,
                      {copy.file(kShard1).string(), "header length 0"});
    }
    SUBCASE("length beyond the file") {
        CheckpointCopy copy(tiny());
        copy.set_byte(kShard1, 7, 0x7F);
        check_refused(copy.path(), ErrorCode::corrupt, {kShard1, "goes beyond the file's"});
    }
    SUBCASE("not JSON") {
        CheckpointCopy copy(tiny());
        copy.set_byte(kShard1, 8, '!');
        check_refused(copy.path(), ErrorCode::corrupt, {kShard1, "not the JSON"});
    }
    SUBCASE("overlapping ranges") {
        CheckpointCopy copy(tiny());
        copy.edit_header(kShard4, [](std::string header) {
            std::string range = "[122880,245760]";
            return header.replace(header.find(range), range.size(), "[122879,245759]");
        });
        check_refused(copy.path(), ErrorCode::corrupt,
                      {kShard4, "tensors language_model.lm_head.weight and", "overlap"});
    }
    SUBCASE("a dtype nobody knows") {
        CheckpointCopy copy(tiny());
        copy.edit_header(kShard4, [](std::string header) {
            return header.replace(header.find("BF16"), 4, "F8_X");
        });
        check_refused(copy.path(), ErrorCode::incompatible, {kShard4, "has dtype F8_X"});
    }
}

TEST_CASE("a file that cannot be read is refused with the system's reason") {
    CheckpointCopy copy(tiny());
    copy.remove(kShard2);
    SUBCASE("a directory in its place") {
        std::filesystem::create_directory(copy.file(kShard2));
        check_refused(copy.path(), ErrorCode::corrupt, {kShard2, "not a regular file"});
    }
    SUBCASE("a named pipe in its place, which must not be waited for") {
        REQUIRE(::mkfifo(copy.file(kShard2).c_str(), 0600) == 0);
        check_refused(copy.path(), ErrorCode::corrupt, {kShard2, "not a regular file"});
    }
    SUBCASE("a link to itself") {
        std::filesystem::create_symlink(copy.file(kShard2), copy.file(kShard2));
        check_refused(copy.path(), ErrorCode::io, {kShard2, "symbolic links"});
    }
    SUBCASE("a link to nowhere") {
        std::filesystem::create_symlink(copy.path() / "gone", copy.file(kShard2));
        check_refused(copy.path(), ErrorCode::not_found, {kShard2});
    }
    SUBCASE("no permission") {
        if (::geteuid() == 0) return;  // root may read everything
        std::ofstream(copy.file(kShard2)) << "x";
        std::filesystem::permissions(copy.file(kShard2), std::filesystem::perms::none);
        check_refused(copy.path(), ErrorCode::io, {kShard2, "Permission denied"});
    }
}

TEST_CASE("a shard truncated after opening gives an error on reading, never old or partial bytes") {
    CheckpointCopy copy(tiny());
    auto checkpoint = open_or_fail(copy.path());
    const TensorInfo& embedding = tensor_of(*checkpoint, kEmbedding);
    copy.truncate(kShard4, embedding.offset + 100);
    std::vector<std::byte> bytes(embedding.bytes);
    Status status = checkpoint->read(embedding, bytes);
    REQUIRE(!status);
    CHECK(status.error().code == ErrorCode::corrupt);
    CHECK(status.error().message ==
          "tensor " + std::string(kEmbedding) + ": " + copy.file(kShard4).string() +
              " ends early: wanted 122880 bytes at offset 123448, got 100");
    // What is still there can be read.
    const TensorInfo& head = tensor_of(*checkpoint, "language_model.lm_head.weight");
    CHECK(checkpoint->read(head, bytes).has_value());
}

TEST_CASE("a shard that is replaced after opening keeps its old content here") {
    CheckpointCopy copy(tiny());
    auto checkpoint = open_or_fail(copy.path());
    const TensorInfo& embedding = tensor_of(*checkpoint, kEmbedding);
    std::vector<std::byte> before(embedding.bytes);
    REQUIRE(checkpoint->read(embedding, before).has_value());
    copy.remove(kShard4);
    test::write_file(copy.file(kShard4), "something else");
    std::vector<std::byte> after(embedding.bytes);
    REQUIRE(checkpoint->read(embedding, after).has_value());
    CHECK(before == after);
}

/// Writes one shard of a made-up checkpoint like the released one: one MoE layer, sparse data.
void write_layer_shard(const std::filesystem::path& directory, int layer, std::string& index) {
    const std::string shard = "model-" + std::to_string(layer) + ".safetensors";
    std::string header = "{";
    std::uint64_t end = 0;
    for (int expert = 895; expert >= 0; --expert)
        for (const char* part : {"w1.weight_packed", "w1.weight_scale", "w2.weight_packed",
                                 "w2.weight_scale", "w3.weight_packed", "w3.weight_scale"}) {
            std::string name = "language_model.model.layers." + std::to_string(layer) +
                               ".block_sparse_moe.experts." + std::to_string(expert) + "." + part;
            std::string range = std::to_string(end) + "," + std::to_string(end + 4096);
            header += (end == 0 ? "\"" : ",\"") + name +
                      "\":{\"dtype\":\"U8\",\"shape\":[64,64],\"data_offsets\":[" + range + "]}";
            index += (index.back() == '{' ? "\"" : ",\"") + name + "\":\"" + shard + "\"";
            end += 4096;
        }
    header += "}";
    std::string length(8, '\0');
    std::uint64_t n = header.size();
    std::memcpy(length.data(), &n, sizeof n);
    test::write_file(directory / shard, length + header);
    std::filesystem::resize_file(directory / shard, 8 + n + end);
}

TEST_CASE("four layers of 896 experts open at once, every tensor is found in its place") {
    test::TempDir dir;
    std::string index = "{\"weight_map\":{";
    for (int layer : {9, 10, 11, 12}) write_layer_shard(dir.path(), layer, index);
    test::write_file(dir.path() / kIndex, index + "}}");
    auto start = std::chrono::steady_clock::now();
    auto checkpoint = open_or_fail(dir.path());
    auto took = std::chrono::steady_clock::now() - start;
    // About 30 ms; what is not linear in the number of tensors takes far longer than this.
    CHECK(took < std::chrono::seconds(3));
    std::span<const TensorInfo> tensors = checkpoint->tensors();
    REQUIRE(tensors.size() == std::size_t{4} * 896 * 6);
    bool in_order = true;
    bool found = true;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        in_order = in_order && (i == 0 || tensors[i - 1].name < tensors[i].name);
        found = found && checkpoint->find(tensors[i].name) == &tensors[i];
    }
    CHECK(in_order);  // layers 10, 11, 12, 9
    CHECK(found);
    const TensorInfo& last = tensor_of(
        *checkpoint, "language_model.model.layers.9.block_sparse_moe.experts.0.w3.weight_scale");
    CHECK(checkpoint->shard_path(last.shard).filename() == "model-9.safetensors");
    CHECK(last.offset + last.bytes ==
          std::filesystem::file_size(checkpoint->shard_path(last.shard)));
}

TEST_CASE("open shards are not inherited by child processes") {
    auto checkpoint = open_or_fail(tiny());
    int n_shards = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone;
        auto target = std::filesystem::read_symlink(entry.path(), gone);
        if (gone || target.extension() != ".safetensors") continue;
        ++n_shards;
        int flags = ::fcntl(std::stoi(entry.path().filename().string()), F_GETFD);
        CHECK((flags & FD_CLOEXEC) != 0);
    }
    CHECK(n_shards == 4);
}

}  // namespace
}  // namespace k3::storage
