// The placement file: what comes back, and what is refused with which sentence.

#include "common/model/placement_file.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <fstream>
#include <string>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::model;
using test::contains;

namespace {

const Model& tiny_k3() {
    static const Model opened = open_model(test::golden_dir() / "tiny-k3").value();
    return opened;
}

PlacementFile thirds() {
    PlacementFile file{tiny_k3().fingerprint, {}};
    for (std::uint32_t i = 0; i < 3; ++i)
        file.servers.push_back({"experts-" + std::to_string(i), 10 + i,
                                parse_share(std::to_string(i) + "/3", tiny_k3().config).value()});
    return file;
}

Result<PlacementFile> parse(const std::string& text) {
    return parse_placement(text, "p.txt", tiny_k3().config, tiny_k3().fingerprint);
}

/// With another text in it, and the checksum that belongs to that.
std::string with(const std::string& from, const std::string& to) {
    std::string text = format_placement(thirds());
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    text.replace(at, from.size(), to);
    text.resize(text.rfind("checksum "));
    return text + fmt::format("checksum {:016x}\n", XXH3_64bits(text.data(), text.size()));
}

void check_refused(const Result<PlacementFile>& parsed, ErrorCode code, const std::string& part) {
    REQUIRE(!parsed.has_value());
    CAPTURE(parsed.error().message);
    CHECK(parsed.error().code == code);
    CHECK(contains(parsed.error().message, part));
    CHECK(contains(parsed.error().message, "p.txt"));
}

}  // namespace

TEST_CASE("a placement comes back from its text, which is always the same") {
    const std::string text = format_placement(thirds());
    CHECK(text == format_placement(thirds()));
    const auto parsed = parse(text);
    REQUIRE_MESSAGE(parsed.has_value(), parsed.error().sentence());
    CHECK(parsed->fingerprint == tiny_k3().fingerprint);
    REQUIRE(parsed->servers.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(parsed->servers[i].name == thirds().servers[i].name);
        CHECK(parsed->servers[i].weight == 10 + i);
        CHECK(parsed->servers[i].held.holdings() == thirds().servers[i].held.holdings());
    }
}

TEST_CASE("every changed byte and every cut is refused") {
    const std::string text = format_placement(thirds());
    for (std::size_t at = 0; at < text.size(); at += 7) {
        std::string changed = text;
        changed[at] = static_cast<char>(changed[at] ^ 1);
        CHECK(!parse(changed).has_value());
        CHECK(!parse(text.substr(0, at)).has_value());
    }
    check_refused(parse(""), ErrorCode::corrupt, "does not begin with 'k3pipe placement 1'");
    check_refused(parse(text.substr(0, text.size() / 2)), ErrorCode::corrupt, "cut off");
}

TEST_CASE("what a right checksum covers is checked, too") {
    const auto& config = tiny_k3().config;
    check_refused(parse(with("placement 1", "placement 2")), ErrorCode::corrupt, "does not begin");
    check_refused(parse(with("experts-1", "experts-0")), ErrorCode::corrupt, "wrong line");
    check_refused(parse(with("weight 11", "weight 0")), ErrorCode::corrupt, "wrong line");
    check_refused(parse(with("weight 11", "weight 11 x")), ErrorCode::corrupt, "wrong line");
    check_refused(parse(with("layer 1 ", "layer 0 ")), ErrorCode::corrupt, "wrong line 5");
    check_refused(parse(with("layer 1 ", "layer 99 ")), ErrorCode::corrupt, "wrong line 5");
    check_refused(parse(with("layer 1 ", "layer 1 0")), ErrorCode::corrupt, "wrong line 5");
    check_refused(parse(with("layer 1 ", "note 1 ")), ErrorCode::corrupt, "wrong line 5");
    check_refused(parse(with(fmt::format("experts {}", config.moe.n_experts), "experts 7")),
                  ErrorCode::corrupt, "7 experts of a layer");
    check_refused(parse(with("fingerprint " + tiny_k3().fingerprint,
                             "fingerprint 0123456789abcdef0123456789abcdef")),
                  ErrorCode::incompatible, tiny_k3().fingerprint);
}

TEST_CASE("experts on no server are refused with their number and the first of them") {
    PlacementFile file = thirds();
    file.servers.pop_back();
    const auto first = [&] {
        for (std::uint32_t e = 0;; ++e)
            if (thirds().servers[2].held.holds(1, e)) return fmt::format("layer 1 expert {}", e);
    }();
    check_refused(parse(format_placement(file)), ErrorCode::incompatible,
                  fmt::format("{} experts are on no server, the first is {}",
                              thirds().servers[2].held.count(), first));
}

TEST_CASE("a share is read from a placement file by the name of its server") {
    const test::TempDir folder;
    const std::filesystem::path path = folder.path() / "p.txt";
    std::ofstream(path) << format_placement(thirds());
    const auto share = read_share(share_in_file(path, "experts-1"), tiny_k3());
    REQUIRE_MESSAGE(share.has_value(), share.error().sentence());
    CHECK(share->weight == 11);
    CHECK(share->held.holdings() == thirds().servers[1].held.holdings());
    CHECK(read_share("1/3", tiny_k3())->held.holdings() == share->held.holdings());

    const auto unknown = read_share(share_in_file(path, "experts-3"), tiny_k3());
    CHECK(unknown.error().code == ErrorCode::not_found);
    CHECK(contains(unknown.error().message,
                   "has no server 'experts-3', but experts-0, experts-1, experts-2"));
    CHECK(read_share("@" + path.string(), tiny_k3()).error().code == ErrorCode::invalid_argument);
    CHECK(read_share("@/nowhere/p.txt#experts-1", tiny_k3()).error().code == ErrorCode::not_found);
}
