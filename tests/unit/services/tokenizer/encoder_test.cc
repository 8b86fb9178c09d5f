// The golden strings of tests/golden/tokenizer/cases.json and of the demo model, both directions.

#include "services/tokenizer/encoder.h"

#include <doctest/doctest.h>
#include <openssl/sha.h>

#include <random>

#include "services/tokenizer/decoder.h"
#include "services/tokenizer/utf8.h"
#include "tests/unit/services/tokenizer/fixtures.h"

using namespace k3;
using namespace k3::tokenizer;
using Ids = std::vector<std::uint32_t>;

namespace {

Ids encode(const Encoder& encoder, std::string_view text, const EncodeOptions& options = {}) {
    auto ids = encoder.encode(text, options);
    if (!ids) FAIL(ids.error().sentence());
    return std::move(ids).value();
}

std::string bytes_of(const Vocabulary& vocabulary, const Ids& ids) {
    return Decoder(vocabulary).bytes_of(ids, false).value();
}

std::string sha256_of(const Ids& ids) {
    std::string bytes;
    for (std::uint32_t id : ids)
        for (unsigned shift = 0; shift < 32; shift += 8)
            bytes += static_cast<char>(id >> shift & 0xFFU);
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
    std::string hex;
    for (unsigned char byte : digest) {
        hex += "0123456789abcdef"[byte >> 4U];
        hex += "0123456789abcdef"[byte & 15U];
    }
    return hex;
}

}  // namespace

TEST_CASE("every golden string encodes to its ids, specials recognised or not") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Encoder encoder(vocabulary);
    auto cases = test::golden_json("tokenizer/cases.json").at("text");
    CHECK(cases.size() == 108);
    for (const auto& item : cases) {
        CAPTURE(item.at("name"));
        CAPTURE(item.at("tag"));
        std::string text = test::from_base64(item.at("utf8_base64").get<std::string>());
        Ids with = item.at("ids").get<Ids>();
        CHECK(encode(encoder, text, {.recognise_specials = true}) == with);
        Ids without = item.value("ids_specials_off", item.at("ids")).get<Ids>();
        CHECK(encode(encoder, text) == without);
        CHECK(encode(encoder, text, {.keep_invalid_bytes = true}) == without);
        CHECK(bytes_of(vocabulary, with) == text);
        CHECK(bytes_of(vocabulary, without) == text);
    }
}

TEST_CASE("bytes that are not UTF-8 are refused with their offset, or kept exactly when asked") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Encoder encoder(vocabulary);
    auto cases = test::golden_json("tokenizer/cases.json").at("raw");
    CHECK(cases.size() == 16);
    for (const auto& item : cases) {
        CAPTURE(item.at("name"));
        CAPTURE(item.at("tag"));
        std::string bytes = test::from_base64(item.at("bytes_base64").get<std::string>());
        for (bool specials : {false, true}) {
            auto refused = encoder.encode(bytes, {.recognise_specials = specials});
            REQUIRE_FALSE(refused.has_value());
            CHECK(refused.error().code == ErrorCode::invalid_argument);
            CHECK(refused.error().message.find("at offset ") != std::string::npos);
            Ids kept = encode(encoder, bytes,
                              {.recognise_specials = specials, .keep_invalid_bytes = true});
            CHECK(kept == item.at("ids").get<Ids>());
            CHECK(bytes_of(vocabulary, kept) == bytes);
        }
        // The other treatment: what a whole decode makes of the bytes, encoded as text.
        auto replaced = Decoder(vocabulary).decode("", item.at("ids").get<Ids>(), {.final = true});
        REQUIRE(replaced.has_value());
        CHECK(encode(encoder, replaced->text) == item.at("ids_of_replaced_text").get<Ids>());
    }
    auto refused = encoder.encode("abc\xE4", {});
    CHECK(refused.error().message ==
          "the text is not UTF-8: byte 0xE4 at offset 3 of 4 begins no whole character");
}

TEST_CASE("long inputs are cut before the pattern as the released tokenizer cuts them") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Encoder encoder(vocabulary);
    auto cases = test::golden_json("tokenizer/cases.json").at("long");
    CHECK(cases.size() == 8);
    for (const auto& item : cases) {
        CAPTURE(item.at("name"));
        std::string text;
        for (const auto& part : item.at("parts"))
            text += test::repeat(part.at(0).get<std::string>(), part.at(1).get<std::size_t>());
        Ids ids = encode(encoder, text);
        CHECK(ids.size() == item.at("n_ids").get<std::size_t>());
        Ids first = item.at("first").get<Ids>();
        Ids last = item.at("last").get<Ids>();
        REQUIRE(ids.size() >= first.size());
        CHECK(std::equal(first.begin(), first.end(), ids.begin()));
        CHECK(std::equal(last.rbegin(), last.rend(), ids.rbegin()));
        CHECK(sha256_of(ids) == item.at("sha256_u32le").get<std::string>());
        CHECK(bytes_of(vocabulary, ids) == text);
    }
}

TEST_CASE("the prompts of the demo model encode to their ids, its answers decode to their texts") {
    Vocabulary vocabulary = test::demo_vocabulary();
    Encoder encoder(vocabulary);
    auto expected = test::golden_json("demo-k3/expected.json");
    std::size_t n_prompts = 0;
    for (const auto& item : expected.at("prompts")) {
        CAPTURE(item.at("name"));
        Ids answer = item.at("greedy_ids").get<Ids>();
        CHECK(bytes_of(vocabulary, answer) == item.at("greedy_text").get<std::string>());
        if (item.contains("messages")) continue;  // chat_test.cc
        ++n_prompts;
        CHECK(encode(encoder, item.at("prompt").get<std::string>()) == item.at("ids").get<Ids>());
    }
    CHECK(n_prompts == 16);

    auto semantic = test::golden_json("demo-k3/semantic.json");
    n_prompts = 0;
    for (const auto& suite : semantic.at("suites")) {
        if (suite.at("name").get<std::string>().starts_with("chat")) continue;
        for (const auto& item : suite.at("items")) {
            CAPTURE(item.at("prompt"));
            ++n_prompts;
            Ids ids = item.at("ids").get<Ids>();
            CHECK(encode(encoder, item.at("prompt").get<std::string>()) == ids);
        }
    }
    CHECK(n_prompts == 256);
}

TEST_CASE("the prompts of the tiny model encode to their ids with specials recognised") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Encoder encoder(vocabulary);
    auto manifest = test::golden_json("expected/manifest.json");
    for (const auto& [name, item] : manifest.at("prompts").items()) {
        const auto& seen = name;  // clang 14 lets no lambda take the binding itself
        CAPTURE(seen);
        std::string text = item.at("text").get<std::string>();
        CHECK(encode(encoder, text, {.recognise_specials = true}) == item.at("ids").get<Ids>());
        CHECK(bytes_of(vocabulary, item.at("greedy").get<Ids>()) ==
              test::from_hex(item.at("greedy_bytes_hex").get<std::string>()));
    }
}

TEST_CASE("decoding gives back exactly what was encoded") {
    constexpr std::uint64_t kSeed = 42;
    CAPTURE(kSeed);
    std::mt19937_64 random(kSeed);
    for (const Vocabulary& vocabulary : {test::tiny_vocabulary(), test::demo_vocabulary()}) {
        Encoder encoder(vocabulary);
        for (int i = 0; i < 1'000; ++i) {
            std::string text = test::random_text(random, random() % 300);
            CHECK(bytes_of(vocabulary, encode(encoder, text)) == text);
            std::string bytes = test::random_bytes(random, random() % 300);
            CHECK(bytes_of(vocabulary, encode(encoder, bytes, {.keep_invalid_bytes = true})) ==
                  bytes);
            // Half text, half rubbish.
            bytes.insert(0, text);
            CHECK(bytes_of(vocabulary, encode(encoder, bytes, {.keep_invalid_bytes = true})) ==
                  bytes);
        }
    }
}

TEST_CASE("spellings of special tokens are recognised only on request") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Encoder encoder(vocabulary);
    std::string text;
    Ids ids;
    for (std::uint32_t id = vocabulary.n_ranks(); id < vocabulary.size(); ++id) {
        text += vocabulary.token(id);
        ids.push_back(id);
    }
    CHECK(encode(encoder, text, {.recognise_specials = true}) == ids);
    for (std::uint32_t id : encode(encoder, text)) CHECK(id < vocabulary.n_ranks());
    // A named slot has no reserved spelling, an id beyond the slots has none at all.
    for (const char* plain :
         {"<|reserved_token_512|>", "<|reserved_token_768|>", "<|open|", "[BOS"})
        for (std::uint32_t id : encode(encoder, plain, {.recognise_specials = true}))
            CHECK(id < vocabulary.n_ranks());
}

TEST_CASE("a text of more than 8 MiB is refused with both numbers") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Encoder encoder(vocabulary);
    auto refused = encoder.encode(std::string(kMaxEncodeBytes + 1, 'a'), {});
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::invalid_argument);
    CHECK(refused.error().message.find("8388609") != std::string::npos);
    CHECK(refused.error().message.find("8388608") != std::string::npos);
}

// An encoder that is not linear fails these by the test's timeout.
TEST_CASE("a megabyte of any shape is encoded and comes back") {
    Vocabulary vocabulary = test::demo_vocabulary();
    Encoder encoder(vocabulary);
    std::mt19937_64 random(1);
    constexpr std::size_t kBytes = std::size_t{1} << 20U;
    std::vector<std::string> shapes;
    for (const char* unit : {" ",
                             "a",
                             "A",
                             "ab",
                             "aB",
                             "a ",
                             "\n",
                             " \n",
                             "\r\n",
                             "9",
                             "!",
                             "'s",
                             "\xCC\x81",
                             "a\xCC\x81",
                             "\xE4\xB8\xAD",
                             "\xE3\x81\x82",
                             "\xF0\x9F\x99\x82",
                             "<|open|>",
                             "<",
                             "[",
                             "<|reserved_token_",
                             "the ",
                             "\xE3\x81\x82\x41"})
        shapes.push_back(test::repeat(unit, kBytes / std::string_view(unit).size()));
    shapes.push_back(test::random_text(random, kBytes / 2));
    for (const std::string& text : shapes) {
        CAPTURE(text.substr(0, 16));
        CHECK(bytes_of(vocabulary, encode(encoder, text)) == text);
        std::string less = text.substr(0, kBytes / 4 / 12 * 12);
        if (first_invalid_utf8(less)) continue;
        Ids with = encode(encoder, less, {.recognise_specials = true});
        CHECK(bytes_of(vocabulary, with) == less);
        // One bad byte in front makes all of it one piece.
        std::string broken = "\xFF" + less;
        CHECK(bytes_of(vocabulary, encode(encoder, broken, {.keep_invalid_bytes = true})) ==
              broken);
    }
}
