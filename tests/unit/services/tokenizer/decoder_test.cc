// Ids to text: the golden cases, every way to split them into calls, and what is not a character.

#include "services/tokenizer/decoder.h"

#include <doctest/doctest.h>

#include <random>

#include "services/tokenizer/encoder.h"
#include "services/tokenizer/utf8.h"
#include "tests/unit/services/tokenizer/fixtures.h"

using namespace k3;
using namespace k3::tokenizer;
using Ids = std::vector<std::uint32_t>;

namespace {

/// Decodes in calls that end at `cuts` (ascending), checking each call's promises.
std::string decode_in_parts(const Decoder& decoder, const Ids& ids,
                            const std::vector<std::size_t>& cuts) {
    std::string text;
    std::string pending;
    std::size_t from = 0;
    for (std::size_t i = 0; i <= cuts.size(); ++i) {
        bool final = i == cuts.size();
        std::size_t to = final ? ids.size() : cuts[i];
        auto part =
            decoder.decode(pending, std::span(ids).subspan(from, to - from), {.final = final});
        REQUIRE(part.has_value());
        CHECK_FALSE(first_invalid_utf8(part->text).has_value());
        CHECK(part->pending.size() <= 3);
        if (final) CHECK(part->pending.empty());
        text += part->text;
        pending = part->pending;
        from = to;
    }
    return text;
}

std::string decode_whole(const Decoder& decoder, const Ids& ids) {
    return decode_in_parts(decoder, ids, {});
}

/// The ids of single bytes.
Ids ids_of_bytes(const Vocabulary& vocabulary, std::string_view bytes) {
    Ids ids;
    for (std::size_t i = 0; i < bytes.size(); ++i)
        ids.push_back(vocabulary.rank_of(bytes.substr(i, 1)).value());
    return ids;
}

}  // namespace

TEST_CASE("the golden ids decode to their bytes, each id to its own") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Decoder decoder(vocabulary);
    auto golden = test::golden_json("tokenizer/cases.json");
    CHECK(golden.at("decode").size() == 5);
    for (const auto& item : golden.at("decode")) {
        CAPTURE(item.at("name"));
        Ids ids = item.at("ids").get<Ids>();
        CHECK(decoder.bytes_of(ids, false).value() ==
              test::from_base64(item.at("bytes_base64").get<std::string>()));
        if (item.at("per_id_base64").is_null()) continue;
        for (std::size_t i = 0; i < ids.size(); ++i)
            CHECK(vocabulary.token(ids[i]) ==
                  test::from_base64(item.at("per_id_base64").at(i).get<std::string>()));
    }
}

TEST_CASE("a stream of ids gives the same text however it is split") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Decoder decoder(vocabulary);
    auto golden = test::golden_json("tokenizer/cases.json");
    for (const auto& item : golden.at("decode")) {
        CAPTURE(item.at("name"));
        Ids ids = item.at("ids").get<Ids>();
        std::string whole = decode_whole(decoder, ids);
        for (std::size_t cut = 0; cut <= ids.size(); ++cut)
            CHECK(decode_in_parts(decoder, ids, {cut}) == whole);
        std::vector<std::size_t> everywhere;
        for (std::size_t cut = 0; cut < ids.size(); ++cut) everywhere.push_back(cut);
        CHECK(decode_in_parts(decoder, ids, everywhere) == whole);
        if (ids.size() > 15) continue;
        for (std::uint32_t mask = 0; mask < 1U << ids.size(); ++mask) {
            std::vector<std::size_t> cuts;
            for (std::size_t cut = 0; cut < ids.size(); ++cut)
                if ((mask >> cut & 1U) != 0) cuts.push_back(cut);
            if (decode_in_parts(decoder, ids, cuts) != whole) FAIL_CHECK("split ", mask);
        }
    }
}

TEST_CASE("random ids give the same text however they are split") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Decoder decoder(vocabulary);
    constexpr std::uint64_t kSeed = 3;
    CAPTURE(kSeed);
    std::mt19937_64 random(kSeed);
    for (int i = 0; i < 2'000; ++i) {
        Ids ids(random() % 24);
        // Mostly single bytes above 0x7F, so that characters break in every possible way.
        for (auto& id : ids)
            id = static_cast<std::uint32_t>(random() % 4 == 0 ? random() % vocabulary.size()
                                                              : 94 + random() % 162);
        std::vector<std::size_t> cuts;
        for (std::size_t cut = 0; cut <= ids.size(); ++cut)
            if (random() % 2 == 0) cuts.push_back(cut);
        CHECK(decode_in_parts(decoder, ids, cuts) == decode_whole(decoder, ids));
    }
}

TEST_CASE("half a character is held back until it is whole") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Decoder decoder(vocabulary);
    std::string smile = "\xF0\x9F\x99\x82";
    std::string pending;
    for (std::size_t i = 0; i < 4; ++i) {
        auto part = decoder.decode(pending, ids_of_bytes(vocabulary, smile.substr(i, 1)), {});
        REQUIRE(part.has_value());
        CHECK(part->text == (i == 3 ? smile : ""));
        CHECK(part->pending == (i == 3 ? "" : smile.substr(0, i + 1)));
        pending = part->pending;
    }
    auto rest = decoder.decode("\xF0\x9F", {}, {.final = true});
    CHECK(rest->text == "\xEF\xBF\xBD");
    CHECK(rest->pending.empty());
}

TEST_CASE(
    "bytes that can never become a character come out at once, one mark per maximal subpart") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Decoder decoder(vocabulary);
    const std::string mark = "\xEF\xBF\xBD";
    struct Case {
        std::string bytes;
        std::string text;     // before the end of the stream
        std::string pending;  // then
    };
    // The sequences of the Unicode standard, section 3.9, tables 3-8 to 3-11, and the edges of 3-7.
    for (const Case& item : std::vector<Case>{
             {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", test::repeat(mark, 8) + "A", ""},
             {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", test::repeat(mark, 8) + "A", ""},
             {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42",
              test::repeat(mark, 5) + "A" + mark + mark + "B", ""},
             {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", test::repeat(mark, 4) + "A", ""},
             {"\x80", mark, ""},
             {"\xC1", mark, ""},
             {"\xC2", "", "\xC2"},
             {"\xE0\x9F", mark + mark, ""},
             {"\xE0\xA0", "", "\xE0\xA0"},
             {"\xED\x9F", "", "\xED\x9F"},
             {"\xF0\x8F", mark + mark, ""},
             {"\xF4\x8F\xBF", "", "\xF4\x8F\xBF"},
             {"\xF4\x90", mark + mark, ""},
             {"\xF5", mark, ""},
             {"a\xE4\xBD"
              "b",
              "a" + mark + "b", ""},
         }) {
        CAPTURE(item.bytes);
        auto part = decoder.decode("", ids_of_bytes(vocabulary, item.bytes), {});
        REQUIRE(part.has_value());
        CHECK(part->text == item.text);
        CHECK(part->pending == item.pending);
        auto whole = decoder.decode("", ids_of_bytes(vocabulary, item.bytes), {.final = true});
        CHECK(whole->text == item.text + (item.pending.empty() ? "" : mark));
    }
}

TEST_CASE("skipping leaves out the tokens marked special and keeps the tags of the chat format") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Decoder decoder(vocabulary);
    auto id = [&](std::string_view name) { return vocabulary.special_id(name).value(); };
    Ids ids = {id("[BOS]"),     id("<|open|>"),       39,  id("<|sep|>"),
               id("<|close|>"), id("<|end_of_msg|>"), 700, id("[EOS]")};
    CHECK(decoder.decode("", ids, {.final = true})->text ==
          "[BOS]<|open|>H<|sep|><|close|><|end_of_msg|><|reserved_token_700|>[EOS]");
    CHECK(decoder.decode("", ids, {.final = true, .skip_specials = true})->text ==
          "<|open|>H<|sep|><|close|><|reserved_token_700|>");
}

TEST_CASE("an id outside the vocabulary is refused by number, place and size") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Decoder decoder(vocabulary);
    auto refused = decoder.decode("", Ids{5, 767, 768}, {});
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::invalid_argument);
    CHECK(refused.error().message ==
          "id 768 at position 2 is outside the vocabulary of 768 ids (0 to 767)");
    CHECK_FALSE(decoder.decode("", Ids{0xFFFF'FFFF}, {}).has_value());
}

TEST_CASE("more held bytes than any character leaves open are refused") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    auto refused = Decoder(vocabulary).decode("\xF0\x9F\x99\x82", {}, {});
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::invalid_argument);
}

TEST_CASE("ids that stand for more than 8 MiB are refused") {
    Vocabulary vocabulary = test::tiny_vocabulary();
    Decoder decoder(vocabulary);
    Ids longest(600'000, 700);  // 22 bytes each
    CHECK(decoder.decode("", longest, {}).error().code == ErrorCode::resource_exhausted);
    // Every byte becomes three.
    Ids bad(kMaxDecodeBytes / 2, vocabulary.rank_of("\xFF").value());
    CHECK(decoder.decode("", bad, {}).error().code == ErrorCode::resource_exhausted);
}
