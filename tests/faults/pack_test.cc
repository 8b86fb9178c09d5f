// Damaged and wrong packs: a clear refusal at start or of the request, never a token from other
// bytes than were packed.

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "common/pack/pack.h"
#include "tests/support/golden.h"
#include "tests/support/packs.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

std::filesystem::path tiny() { return golden_dir() / "tiny-k3"; }

void flip_bit(const std::filesystem::path& file, std::uint64_t offset) {
    std::string bytes = read_file(file);
    REQUIRE(offset < bytes.size());
    bytes[offset] = static_cast<char>(bytes[offset] ^ 0x04);
    write_file(file, bytes);
}

/// `service`, started by hand with these flags, ends with `code` and a sentence of these parts.
void check_refused_service(const World& world, const std::string& service,
                           const std::vector<std::string>& flags, int code,
                           const std::vector<std::string>& parts) {
    std::vector<std::string> argv = {built("services/" + service + "/k3-" + service).string(),
                                     "--listen", "ipc://" + (world.path() / "s").string()};
    argv.insert(argv.end(), flags.begin(), flags.end());
    const Ended ended = world.start_program(argv).wait(20000);
    INFO(ended.err);
    CHECK(ended.code == code);
    for (const std::string& part : parts) CHECK(has(ended.err, part));
    CHECK(ended.err.find("ready") == std::string::npos);
}

void check_refused_experts(const World& world, const std::filesystem::path& pack, int code,
                           const std::vector<std::string>& parts,
                           const std::filesystem::path& model = tiny()) {
    check_refused_service(world, "experts", {"--model", model.string(), "--pack", pack.string()},
                          code, parts);
}

void check_refused_trunk(const World& world, const std::filesystem::path& pack, int code,
                         const std::vector<std::string>& parts, const std::string& layers = "all",
                         const std::string& weights_bytes = "0") {
    check_refused_service(
        world, "trunk",
        {"--model", tiny().string(), "--pack", pack.string(), "--layers", layers, "--weights-bytes",
         weights_bytes, "--experts", "ipc://" + (world.path() / "nobody").string()},
        code, parts);
}

}  // namespace

TEST_CASE("a pack of something else is refused at start, with names and numbers") {
    World world;
    Packs packs(world);
    check_refused_experts(world, packs.experts("0/2"), 3,
                          {"holds 144 experts and lacks 144 of the 288 of this share", "layer 1"});
    check_refused_experts(world, packs.trunk("all"), 3,
                          {"is a pack of kind 'trunk', and 'experts' is needed"});
    check_refused_trunk(world, packs.experts("0/2"), 3,
                        {"is a pack of kind 'experts', and 'trunk' is needed"});
    check_refused_trunk(world, packs.trunk("0-4"), 3,
                        {"lacks 9 of the 10 runs of layers 4-12, first layer 5"}, "4-12");
    check_refused_trunk(world, packs.trunk("all"), 2, {"is too small: the smallest is "}, "all",
                        "20KiB");
    check_refused_trunk(world, packs.trunk("0-4"), 3, {"lacks 9 of the 10 runs"}, "4-12", "700KiB");
    check_refused_experts(world, packs.experts("0/2"), 3,
                          {"was made from another checkpoint than", "fingerprint"},
                          demo_model_dir());
    check_refused_trunk(world, packs.trunk_part("1/2"), 3,
                        {"is part 1/2 of a pack, and part 0/2 is missing"});
    check_refused_trunk(world, packs.trunk_part("1/3"), 3,
                        {"is part 1/3 of a pack, and parts 0/3, 2/3 are missing"});
    check_refused_experts(world, "/nonexistent/pack", 3, {"/nonexistent/pack"});
    // Only a config, and another one.
    TempDir other;
    std::filesystem::copy_file(demo_model_dir() / "config.json", other.path() / "config.json");
    check_refused_experts(world, packs.experts("0/2"), 3, {"config digest"}, other.path());
}

TEST_CASE("damage of a trunk pack is found before the stage is ready") {
    World world;
    Packs packs(world);
    const std::filesystem::path file = packs.trunk("all");
    const std::string good = read_file(file);
    const auto pack = pack::Pack::open(file).value();
    for (const pack::Entry& entry : pack->entries()) {
        if (entry.key.layer != 4 && entry.key.part == 0) continue;  // embedding and head, too
        const std::string name = pack->name_of(entry.key);
        CAPTURE(name);
        flip_bit(file, entry.offset + entry.bytes / 2);
        check_refused_trunk(world, file, 3, {file.string() + ": " + name + ": the checksum of"});
        write_file(file, good);
    }
    write_file(file, good.substr(0, good.size() - 4096));
    check_refused_trunk(world, file, 3, {"and its header says " + std::to_string(good.size())});
    write_file(file, good);
    flip_bit(file, 4096 + 8);
    check_refused_trunk(world, file, 3, {"the checksum of the table is wrong"});
}

TEST_CASE("a flipped bit in an expert ends the requests that need it, and is not remembered") {
    World world;
    Packs packs(world);
    const std::filesystem::path file = packs.experts("all");
    const auto pack = pack::Pack::open(file).value();
    msg::Submit submit = of_ids({5, 17, 300, 41, 9}, 8);
    submit.ignore_eos = true;
    Pipeline pipeline(world, "packed", tiny(),
                      "[experts]\ncache_bytes = '64KiB'\npack = '" + file.string() + "'\n");
    const Answer good = pipeline.ask(submit);
    REQUIRE_FALSE(good.error.has_value());
    auto flip_layer = [&](std::uint32_t layer) {
        std::string bytes = read_file(file);
        for (const pack::Entry& entry : pack->entries())
            if (entry.key.layer == layer)
                bytes[entry.offset + 9791] = static_cast<char>(bytes[entry.offset + 9791] ^ 1);
        // In place: the server keeps its file open.
        write_file(file, bytes);
    };
    flip_layer(6);
    const Answer bad = pipeline.ask(submit);
    REQUIRE(bad.error.has_value());
    CHECK(bad.error->code == ErrorCode::corrupt);
    CHECK(has(bad.error->message, file.string() + ": layer 6 expert "));
    CHECK(has(bad.error->message, "the checksum of 12288 bytes at offset "));
    CHECK(bad.ids.empty());
    flip_layer(6);
    const Answer again = pipeline.ask(submit);
    REQUIRE_FALSE(again.error.has_value());
    CHECK(again.ids == good.ids);
}

TEST_CASE("an expert pack that is truncated under a running server fails the requests") {
    World world;
    Packs packs(world);
    const std::filesystem::path file = packs.experts("all");
    Pipeline pipeline(world, "packed", tiny(),
                      "[experts]\ncache_bytes = '64KiB'\npack = '" + file.string() + "'\n");
    std::filesystem::resize_file(file, 8192);
    const Answer bad = pipeline.ask(of_ids({5, 17, 300}, 4));
    REQUIRE(bad.error.has_value());
    CHECK(bad.error->code == ErrorCode::corrupt);
    CHECK(has(bad.error->message, "ends early"));
    CHECK(bad.ids.empty());
}
