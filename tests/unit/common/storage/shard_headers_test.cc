// Shards and headers of a checkpoint, looked at one after the other.

#include "common/storage/shard_headers.h"

#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

#include "common/storage/checkpoint.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"

namespace k3::storage {
namespace {

using test::TempDir;

const std::vector<std::string> kVision = vision_prefixes();

/// The shards in an index of this text, or its error.
Result<std::set<std::string>> shards_of_text(const std::string& text) {
    TempDir dir;
    test::write_file(dir.path() / kIndexName, text);
    ASSIGN_OR_RETURN(const ListedFiles files, shards_in_index(dir.path(), kVision));
    std::set<std::string> names;
    for (const auto& [file, n_tensors] : files) names.insert(file);
    return names;
}

}  // namespace

TEST_CASE("visiting shards shows the tensors that an open checkpoint has") {
    for (const auto& directory : {test::golden_dir() / "tiny-k3", test::demo_model_dir()}) {
        Checkpoint::Options options;
        options.directory = directory;
        const auto checkpoint = Checkpoint::open(options).value();
        std::size_t n_tensors = 0;
        std::size_t n_shards = 0;
        const Status visited = visit_shards(directory, kVision, [&](const ShardHeader& shard) {
            ++n_shards;
            for (const TensorInfo& tensor : shard.tensors) {
                ++n_tensors;
                const TensorInfo* opened = checkpoint->find(tensor.name);
                REQUIRE(opened != nullptr);
                CHECK(opened->offset == tensor.offset);
                CHECK(checkpoint->shard_path(opened->shard) == shard.path);
            }
            return Status::ok();
        });
        REQUIRE_MESSAGE(visited.has_value(), visited.error().sentence());
        CHECK(n_tensors == checkpoint->tensors().size());
        CHECK(n_shards == checkpoint->n_shards());
    }
}

TEST_CASE("an index names its shards wherever its parts stand, those of vision left out") {
    const std::set<std::string> expected = {"a.safetensors", "b.safetensors"};
    const std::string map = R"("weight_map": {"x": "b.safetensors", "y":"a.safetensors",
        "vision_tower.z": "c.safetensors"})";
    CHECK(shards_of_text("{" + map + "}").value() == expected);
    CHECK(shards_of_text(R"({"metadata": {"format": "pt", "total_size": 5, "list": ["u", "v"]}, )" +
                         map + "}")
              .value() == expected);
    CHECK(
        shards_of_text("{" + map + R"(, "metadata": {"weight_map": "no.safetensors"}})").value() ==
        expected);
    CHECK(shards_of_text(R"({"weight_map": {}})").value().empty());
    // Longer than what is read at a time.
    std::string many = R"({"weight_map": {)";
    for (int i = 0; i < 20'000; ++i)
        many += "\"tensor." + std::to_string(i) + "\": \"shard-" + std::to_string(i % 7) + "\",\n";
    many.resize(many.size() - 2);
    CHECK(many.size() > 500'000);
    CHECK(shards_of_text(many + "}}").value().size() == 7);
}

TEST_CASE("an index that is cut, no index, or points elsewhere is refused by name") {
    for (const std::string text :
         {"", "{", "[]", R"({"weight_map": {"x": "a)", R"({"weight_map": {"x": "a.safetensors"})",
          R"({"weight_map": "a.safetensors"})", R"({"weight_map": {"x": 5}})",
          R"({"weight_map": {"x": "../a.safetensors"}})", R"({"weight_map": {"x": ""}})"}) {
        CAPTURE(text);
        const auto refused = shards_of_text(text);
        REQUIRE_FALSE(refused.has_value());
        CHECK(refused.error().code == ErrorCode::corrupt);
        CHECK(!refused.error().remedy.empty());
    }
    test::CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    copy.remove("model-00002-of-000005.safetensors");
    const Status absent =
        visit_shards(copy.path(), kVision, [](const ShardHeader&) { return Status::ok(); });
    REQUIRE_FALSE(absent.has_value());
    CHECK(absent.error().code == ErrorCode::not_found);
    CHECK(test::contains(absent.error().message, "model-00002-of-000005.safetensors"));
}

}  // namespace k3::storage
