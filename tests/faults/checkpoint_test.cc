// Checkpoints that are missing, unreadable or damaged: a whole pipeline refuses them with one
// sentence that names the file and the numbers.

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tests/faults/refusal.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/needed_fields.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::string kShard = "model-00002-of-000005.safetensors";
const std::string kEmbeddingShard = "model-00004-of-000005.safetensors";  // and the output head
const std::string kIndex = "model.safetensors.index.json";

fs::path tiny() { return golden_dir() / "tiny-k3"; }

struct Damage {
    std::string what;
    int code;
    std::function<void(CheckpointCopy&)> make;
    std::vector<std::string> parts;  // of the sentence
};

/// A pipeline on a damaged copy is refused, in turn for each. Every sentence names the copy.
void check_damages(const std::vector<Damage>& damages) {
    World world;
    for (const Damage& damage : damages) {
        CAPTURE(damage.what);
        CheckpointCopy copy(tiny());
        damage.make(copy);
        std::vector<std::string> parts = damage.parts;
        parts.push_back(copy.path().string());
        check_refused(world, pipeline_of(world, copy.path()), damage.code, parts);
    }
}

void replace_in_header(CheckpointCopy& copy, const std::string& shard, const std::string& from,
                       const std::string& to) {
    copy.edit_header(shard, [&](std::string header) {
        std::size_t at = header.find(from);
        REQUIRE(at != std::string::npos);
        return header.replace(at, from.size(), to);
    });
}

/// "/text_config/hidden_size" -> "text_config.hidden_size", as sentences spell it.
std::string dotted(std::string pointer) {
    pointer.erase(0, 1);
    for (char& c : pointer)
        if (c == '/') c = '.';
    return pointer;
}

void erase_field(CheckpointCopy& copy, const std::string& pointer) {
    json config = json::parse(read_file(copy.config()));
    json::json_pointer field(pointer);
    REQUIRE(config[field.parent_pointer()].erase(field.back()) == 1);
    write_file(copy.config(), config.dump());
}

}  // namespace

TEST_CASE("a checkpoint that is missing is refused by its path") {
    World world;
    check_refused(world, pipeline_of(world, "/nonexistent/k3"), 3,
                  {"/nonexistent/k3", "does not exist"});
    TempDir empty;
    check_refused(world, pipeline_of(world, empty.path()), 3,
                  {"checkpoint directory " + empty.path().string() + " has no config.json"});
}

TEST_CASE("a checkpoint that cannot be read is refused with the system's reason") {
    // The faults that root meets as well.
    auto in_place_of = [](const std::string& name, auto make) {
        return [name, make](CheckpointCopy& copy) {
            copy.remove(name);
            make(copy.file(name));
        };
    };
    auto directory = [](const fs::path& path) { fs::create_directory(path); };
    auto circle = [](const fs::path& path) { fs::create_symlink(path.filename(), path); };
    auto pipe = [](const fs::path& path) { REQUIRE(::mkfifo(path.c_str(), 0600) == 0); };
    auto dangling = [](const fs::path& path) { fs::create_symlink("gone", path); };
    check_damages({
        {"config: a directory",
         3,
         in_place_of("config.json", directory),
         {"config.json: not a regular file"}},
        {"config: a link to itself",
         4,
         in_place_of("config.json", circle),
         {"config.json: Too many levels of symbolic links"}},
        {"config: a link to nowhere",
         3,
         in_place_of("config.json", dangling),
         {"config.json: No such file or directory"}},
        {"shard: a directory",
         3,
         in_place_of(kShard, directory),
         {kShard + ": not a regular file"}},
        {"shard: a pipe that nobody writes to",
         3,
         in_place_of(kShard, pipe),
         {kShard + ": not a regular file"}},
        {"shard: a link to itself",
         4,
         in_place_of(kShard, circle),
         {kShard + ": Too many levels of symbolic links"}},
        {"shard: a link to nowhere",
         3,
         in_place_of(kShard, dangling),
         {kShard + ", and there is no such file"}},
        {"index: a directory",
         3,
         in_place_of(kIndex, directory),
         {kIndex + ": not a regular file"}},
        {"vocabulary: a link to itself",
         4,
         in_place_of("tiktoken.model", circle),
         {"tiktoken.model: Too many levels of symbolic links"}},
    });
}

TEST_CASE("files without permission are refused with the system's reason, also for root") {
    World world;
    // Root reads everything by virtue of these two capabilities, and obeys the files without them.
    std::vector<std::string> wrap;
    if (::geteuid() == 0)
        wrap = {"/usr/bin/setpriv", "--bounding-set=-dac_override,-dac_read_search"};
    for (const std::string& name : {std::string("config.json"), kShard, kIndex}) {
        CAPTURE(name);
        CheckpointCopy copy(tiny());
        REQUIRE(::chmod(copy.file(name).c_str(), 0) == 0);
        check_refused(world, pipeline_of(world, copy.path()), 4,
                      {"cannot open " + copy.file(name).string() + ": Permission denied"}, wrap);
    }
}

TEST_CASE("a config that lacks or contradicts a field is refused by the field's name") {
    // One of every section; all of them in turn below.
    std::vector<Damage> damages;
    for (const std::string field :
         {"/media_placeholder_token_id", "/text_config/kv_lora_rank",
          "/text_config/linear_attn_config/kda_layers",
          "/text_config/quantization_config/config_groups/group_0/weights/group_size"})
        damages.push_back({field,
                           3,
                           [field](CheckpointCopy& copy) { erase_field(copy, field); },
                           {"config.json lacks 1 needed field: " + dotted(field)}});
    damages.push_back({"two fields",
                       3,
                       [](CheckpointCopy& copy) {
                           erase_field(copy, "/text_config/num_experts");
                           erase_field(copy, "/bos_token_id");
                       },
                       {"lacks 2 needed fields", "bos_token_id", "text_config.num_experts"}});
    damages.push_back({"a contradiction",
                       3,
                       [](CheckpointCopy& copy) {
                           copy.replace_text("config.json", "\"num_experts_per_token\": 4",
                                             "\"num_experts_per_token\": 25");
                       },
                       {"config.json", "num_experts_per_token 25 exceeds num_experts 24"}});
    damages.push_back({"not JSON",
                       3,
                       [](CheckpointCopy& copy) { copy.truncate("config.json", 1000); },
                       {"config.json is not JSON"}});
    check_damages(damages);
}

TEST_CASE("each needed field of the config, removed in turn, ends a service with its name") {
    World world;
    const auto& fields = needed_fields();
    struct Run {
        CheckpointCopy copy{tiny()};
        std::string field;
        std::optional<Program> program;
    };
    // Side by side, because a service that fails stays a moment to tell its callers.
    constexpr std::size_t kAtOnce = 8;
    for (std::size_t first = 0; first < fields.size(); first += kAtOnce) {
        std::vector<std::unique_ptr<Run>> runs;
        for (std::size_t i = first; i < std::min(first + kAtOnce, fields.size()); ++i) {
            auto run = std::make_unique<Run>();
            run->field = fields[i];
            erase_field(run->copy, fields[i]);
            auto socket = [&](const std::string& name) {
                return "ipc://" + (world.path() / (name + std::to_string(i))).string();
            };
            const std::string service[] = {"tokenizer", "trunk", "experts"};
            const std::string& name = service[i % 3];
            std::vector<std::string> argv = {built("services/" + name + "/k3-" + name).string(),
                                             "--listen", socket("s"), "--model",
                                             run->copy.path().string()};
            if (name == "trunk") argv.insert(argv.end(), {"--experts", socket("e")});
            if (name == "experts") argv.insert(argv.end(), {"--share", "all"});
            run->program.emplace(world.start_program(argv));
            runs.push_back(std::move(run));
        }
        for (auto& run : runs) {
            CAPTURE(run->field);
            Ended ended = run->program->wait();
            INFO(ended.err);
            CHECK(ended.code == 3);
            CHECK(has(ended.err, run->copy.config().string() +
                                     " lacks 1 needed field: " + dotted(run->field) + ";"));
            CHECK(std::count(ended.err.begin(), ended.err.end(), '\n') == 1);
        }
    }
}

TEST_CASE("an index that does not fit its shards is refused with both names") {
    const std::string tensor = "language_model.model.layers.3.self_attn.q_a_proj.weight";
    const std::string lost = "language_model.model.layers.3.self_attn.q_z_proj.weight";
    check_damages({
        {"no index",
         3,
         [](CheckpointCopy& c) { c.remove(kIndex); },
         {kIndex + ": No such file or directory"}},
        {"a shard that is not there",
         3,
         [](CheckpointCopy& c) { c.remove(kShard); },
         {kIndex, " tensors in " + kShard + ", and there is no such file"}},
        {"a shard that never was",
         3,
         [](CheckpointCopy& c) {
             c.replace_text(kIndex, "lm_head.weight\":\"" + kEmbeddingShard,
                            "lm_head.weight\":\"model-00009-of-000005.safetensors");
         },
         {kIndex, "1 tensors in model-00009-of-000005.safetensors, and there is no such file"}},
        {"a tensor that the shard does not hold",
         3,
         [&](CheckpointCopy& c) { c.replace_text(kIndex, tensor, lost); },
         {kIndex, "promises tensor " + lost, "that file does not hold it"}},
        {"a tensor in another shard than promised",
         3,
         [](CheckpointCopy& c) {
             c.replace_text(kIndex, "lm_head.weight\":\"" + kEmbeddingShard,
                            "lm_head.weight\":\"" + kShard);
         },
         {kIndex, "lm_head.weight in " + kShard, "lies in " + kEmbeddingShard}},
        {"no vocabulary",
         3,
         [](CheckpointCopy& c) { c.remove("tiktoken.model"); },
         {"tiktoken.model"}},
    });
}

TEST_CASE("a shard that is cut short or has a damaged header is refused with its numbers") {
    const std::uint64_t shard_bytes = fs::file_size(tiny() / kShard);
    const std::string all = std::to_string(shard_bytes);
    check_damages({
        {"the last byte is missing",
         3,
         [&](CheckpointCopy& c) { c.truncate(kShard, shard_bytes - 1); },
         {kShard + ": truncated: tensor", std::to_string(shard_bytes - 1) + " bytes"}},
        {"cut inside the header",
         3,
         [](CheckpointCopy& c) { c.truncate(kShard, 50000); },
         {kShard, "header length 100680", "50000 bytes"}},
        {"empty",
         3,
         [](CheckpointCopy& c) { c.truncate(kShard, 0); },
         {kShard + ": truncated: 0 bytes"}},
        {"header length 0",
         3,
         [](CheckpointCopy& c) {
             for (std::uint64_t i = 0; i < 8; ++i) c.set_byte(kShard, i, 0);
         },
         {kShard + ": header length 0"}},
        {"header length just beyond the file",
         3,
         [&](CheckpointCopy& c) {
             for (std::uint64_t i = 0; i < 8; ++i)
                 c.set_byte(kShard, i, static_cast<std::uint8_t>((shard_bytes - 7) >> (8 * i)));
         },
         {kShard, "header length " + std::to_string(shard_bytes - 7), all + " bytes"}},
        {"header length of all ones",
         3,
         [](CheckpointCopy& c) {
             for (std::uint64_t i = 0; i < 8; ++i) c.set_byte(kShard, i, 0xFF);
         },
         {kShard, "header length 18446744073709551615", all + " bytes"}},
        {"header not JSON",
         3,
         [](CheckpointCopy& c) { c.set_byte(kShard, 8, 'x'); },
         {kShard + ": the header (100680 bytes at offset 8) is not the JSON"}},
    });
}

TEST_CASE("tensors of a shard that cannot be what the config calls for are refused by name") {
    check_damages({
        {"overlapping ranges",
         3,
         [](CheckpointCopy& c) {
             replace_in_header(c, kEmbeddingShard, "[122880,245760]", "[122879,245759]");
         },
         {kEmbeddingShard + ": tensors language_model.lm_head.weight and", "overlap: bytes"}},
        {"a dtype nobody knows",
         3,
         [](CheckpointCopy& c) { replace_in_header(c, kShard, "\"F32\"", "\"I32\""); },
         {kShard + ": tensor", "has dtype I32, and only U8, BF16 and F32 are known"}},
        {"a dtype of another size",
         3,
         [](CheckpointCopy& c) { replace_in_header(c, kEmbeddingShard, "\"BF16\"", "\"F32\""); },
         {kEmbeddingShard + ": tensor", "dtype F32 takes", "but its range has"}},
        {"another dtype of that size",
         3,
         [](CheckpointCopy& c) {
             replace_in_header(c, kEmbeddingShard,
                               "\"language_model.lm_head.weight\":{\"dtype\":\"BF16\",\"shape\":["
                               "768,80]",
                               "\"language_model.lm_head.weight\":{\"dtype\":\"F32\",\"shape\":["
                               "384,80]");
         },
         {"1 of 340 tensors",
          "language_model.lm_head.weight (is F32 [384, 80], config.json calls "
          "for BF16 [768, 80])"}},
    });
}
