// The two files of a vocabulary: what they say, and every way they can be wrong.

#include "services/tokenizer/vocabulary.h"

#include <doctest/doctest.h>

#include <filesystem>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/unit/services/tokenizer/fixtures.h"

using namespace k3;
using namespace k3::tokenizer;

namespace {

std::string tiny_ranks() {
    return test::read_file(test::golden_dir() / "tiny-k3" / "tiktoken.model");
}
std::string tiny_config() {
    return test::read_file(test::golden_dir() / "tiny-k3" / "tokenizer_config.json");
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
}

void check_refused(const std::string& ranks, const std::string& config, std::uint32_t vocab_size,
                   ErrorCode code, const std::vector<std::string>& words) {
    auto refused = Vocabulary::parse(ranks, config, vocab_size, "dir");
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == code);
    CHECK_FALSE(refused.error().remedy.empty());
    for (const std::string& word : words) {
        CAPTURE(refused.error().message);
        CAPTURE(word);
        CHECK(refused.error().message.find(word) != std::string::npos);
    }
}

void check_bad_ranks(const std::string& ranks, const std::vector<std::string>& words) {
    check_refused(ranks, tiny_config(), 768, ErrorCode::corrupt, words);
}

void check_bad_config(const std::string& config, const std::vector<std::string>& words) {
    check_refused(tiny_ranks(), config, 768, ErrorCode::corrupt, words);
}

}  // namespace

TEST_CASE("the tiny vocabulary is what its files say") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    CHECK(vocabulary.size() == 768);
    CHECK(vocabulary.n_ranks() == 512);
    CHECK(vocabulary.token(0) == "!");
    CHECK(vocabulary.rank_of(" it") == 307);
    CHECK_FALSE(vocabulary.rank_of("[BOS]").has_value());
    CHECK(vocabulary.special_id("[BOS]") == 512);
    CHECK(vocabulary.special_id("<|end_of_msg|>") == 514);
    CHECK(vocabulary.special_id("<|reserved_token_700|>") == 700);
    CHECK_FALSE(vocabulary.special_id("<|im_end|>").has_value());
    CHECK(vocabulary.eos_id() == 513);
    CHECK(vocabulary.is_marked_special(514));
    CHECK_FALSE(vocabulary.is_marked_special(515));
    CHECK_FALSE(vocabulary.is_marked_special(700));
    CHECK_FALSE(vocabulary.is_marked_special(5));
}

TEST_CASE("a vocabulary keeps its words when it is moved") {
    Vocabulary first = test::tiny_vocabulary();
    Vocabulary second = std::move(first);
    CHECK(second.rank_of(" it") == 307);
    CHECK(second.token(767) == "[PAD]");
}

TEST_CASE("lines may end like on another system and come in any order") {
    std::string ranks = tiny_ranks();
    std::string other = ranks.substr(ranks.find('\n') + 1) + ranks.substr(0, ranks.find('\n'));
    CHECK(Vocabulary::parse(other, tiny_config(), 768, "dir").has_value());
    std::string windows;
    for (char c : ranks) windows += c == '\n' ? "\r\n" : std::string(1, c);
    CHECK(Vocabulary::parse(windows, tiny_config(), 768, "dir").has_value());
}

TEST_CASE("a damaged line of the rank file is named") {
    std::string ranks = tiny_ranks();
    check_bad_ranks("", {"dir/tiktoken.model", "no token"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ig==1\n"), {"line 2", "space"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "I*== 1\n"), {"line 2", "I*==", "base64"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ig= 1\n"), {"line 2", "base64"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ih== 1\n"), {"line 2", "base64"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", " 1\n"), {"line 2", "base64"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ig== one\n"), {"line 2", "\"one\"", "rank"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ig== 1 \n"), {"line 2", "rank"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ig== -1\n"), {"line 2", "rank"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ig== 99999999999\n"), {"line 2", "rank"});
}

TEST_CASE("gaps and repetitions among the ranks are named") {
    std::string ranks = tiny_ranks();
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ig== 0\n"), {"line 2", "rank 0", "line 1"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "Ig== 512\n"), {"line 2", "rank 512", "gap"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", ""), {"rank 511", "gap", "511 lines"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "IQ== 1\n"), {"line 2", "line 1", "same token"});
    check_bad_ranks(replaced(ranks, "Ig== 1\n", "IiIiIg== 1\n"), {"byte 0x22", "512 lines"});
}

TEST_CASE("ranks, special slots and vocab_size must add up") {
    std::string ranks = tiny_ranks();
    std::string cut = ranks.substr(0, ranks.find(" 400\n") + 5);
    check_refused(cut, tiny_config(), 768, ErrorCode::incompatible, {"401", "256", "657", "768"});
    check_refused(ranks, tiny_config(), 163840, ErrorCode::incompatible, {"512", "768", "163840"});
    check_refused(ranks, tiny_config(), 0, ErrorCode::incompatible, {"768", " 0"});
}

TEST_CASE("a tokenizer_config that does not name the special tokens is refused") {
    std::string config = tiny_config();
    check_bad_config("", {"dir/tokenizer_config.json", "not JSON"});
    check_bad_config("[1,2", {"not JSON at byte 4"});
    check_bad_config("{}", {"added_tokens_decoder"});
    check_bad_config(R"({"added_tokens_decoder": []})", {"added_tokens_decoder"});
    check_bad_config(replaced(config, "\"512\"", "\"51x\""), {"51x", "not an id"});
    check_bad_config(replaced(config, "\"512\"", "\"511\""), {"511", "512 to 767"});
    check_bad_config(replaced(config, "\"512\"", "\"768\""), {"768", "512 to 767"});
    check_bad_config(replaced(config, "\"512\"", "\"0513\""), {"513", "twice"});
    check_bad_config(replaced(config, "\"[BOS]\"", "\"\""), {"512", "content"});
    check_bad_config(replaced(config, "\"[BOS]\"", "7"), {"512", "content"});
    check_bad_config(replaced(config, "\"special\": true", "\"special\": 1"), {"512", "special"});
    check_bad_config(replaced(config, "\"[BOS]\"", "\"[EOS]\""), {"512", "513", "[EOS]"});
    check_bad_config(replaced(config, "\"[BOS]\"", "\"<|reserved_token_700|>\""), {"512", "700"});
    check_bad_config(replaced(config, "\"eos_token\"", "\"no_token\""), {"eos_token"});
    check_bad_config(replaced(config, "\"eos_token\": \"[EOS]\"", "\"eos_token\": \"</s>\""),
                     {"eos_token", "</s>"});
}

TEST_CASE("eos_token may be an object that holds the spelling") {
    std::string config = replaced(tiny_config(), "\"eos_token\": \"[EOS]\"",
                                  "\"eos_token\": {\"content\": \"[EOT]\", \"special\": true}");
    auto vocabulary = Vocabulary::parse(tiny_ranks(), config, 768, "dir");
    REQUIRE(vocabulary.has_value());
    CHECK(vocabulary->token(vocabulary->eos_id()) == "[EOT]");
}

TEST_CASE("missing and unreadable files are told apart") {
    auto absent = Vocabulary::load(test::golden_dir() / "no-such-model", 768);
    REQUIRE_FALSE(absent.has_value());
    CHECK(absent.error().code == ErrorCode::not_found);
    CHECK(absent.error().message.find("no-such-model/tiktoken.model") != std::string::npos);

    test::TempDir dir;
    std::filesystem::create_directories(dir.path() / "tiktoken.model");
    auto unreadable = Vocabulary::load(dir.path(), 768);
    REQUIRE_FALSE(unreadable.has_value());
    CHECK(unreadable.error().code == ErrorCode::corrupt);
}
