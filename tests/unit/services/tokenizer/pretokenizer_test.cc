// The scanner against the golden pieces and against ICU's regex engine running the published
// pattern.

#include "services/tokenizer/pretokenizer.h"

#include <doctest/doctest.h>
#include <unicode/uregex.h>
#include <unicode/utext.h>

#include <random>

#include "tests/unit/services/tokenizer/fixtures.h"

using namespace k3;
using namespace k3::tokenizer;
using Pieces = std::vector<std::string_view>;

namespace {

class Regex {
  public:
    explicit Regex(const std::string& pattern) {
        UErrorCode failure = U_ZERO_ERROR;
        UText* text = utext_openUTF8(nullptr, pattern.data(),
                                     static_cast<std::int64_t>(pattern.size()), &failure);
        regex_ = uregex_openUText(text, 0, nullptr, &failure);
        utext_close(text);
        // Without this a long run matches nothing.
        uregex_setStackLimit(regex_, 0, &failure);
        REQUIRE(U_SUCCESS(failure));
    }
    ~Regex() { uregex_close(regex_); }
    Regex(const Regex&) = delete;
    Regex& operator=(const Regex&) = delete;

    Pieces split(std::string_view utf8) {
        UErrorCode failure = U_ZERO_ERROR;
        UText* text =
            utext_openUTF8(nullptr, utf8.data(), static_cast<std::int64_t>(utf8.size()), &failure);
        uregex_setUText(regex_, text, &failure);
        Pieces pieces;
        while (uregex_findNext(regex_, &failure) != 0) {
            auto begin = static_cast<std::size_t>(uregex_start64(regex_, 0, &failure));
            auto end = static_cast<std::size_t>(uregex_end64(regex_, 0, &failure));
            pieces.push_back(utf8.substr(begin, end - begin));
        }
        utext_close(text);
        REQUIRE(U_SUCCESS(failure));
        return pieces;
    }

  private:
    URegularExpression* regex_ = nullptr;
};

Pieces split(const Pretokenizer& pretokenizer, std::string_view text) {
    Pieces pieces;
    pretokenizer.split(text, pieces);
    return pieces;
}

std::string joined(const Pieces& pieces) {
    std::string text;
    for (std::string_view piece : pieces) text += piece;
    return text;
}

}  // namespace

TEST_CASE("the golden strings are cut into their golden pieces") {
    Pretokenizer pretokenizer;
    auto golden = test::golden_json("tokenizer/cases.json");
    Regex regex(golden.at("pattern").get<std::string>());
    for (const auto& item : golden.at("text")) {
        CAPTURE(item.at("name"));
        std::string text = test::from_base64(item.at("utf8_base64").get<std::string>());
        auto expected = item.at("pieces").get<std::vector<std::string>>();
        CHECK(split(pretokenizer, text) == Pieces(expected.begin(), expected.end()));
        CHECK(regex.split(text) == Pieces(expected.begin(), expected.end()));
    }
}

TEST_CASE("the scanner agrees with the regular expression on random text") {
    Pretokenizer pretokenizer;
    Regex regex(test::golden_json("tokenizer/cases.json").at("pattern").get<std::string>());
    constexpr std::uint64_t kSeed = 20261129;
    CAPTURE(kSeed);
    std::mt19937_64 random(kSeed);
    int differing = 0;
    for (int i = 0; i < 20'000; ++i) {
        std::string text = test::random_text(random, 1 + random() % 24);
        Pieces pieces = split(pretokenizer, text);
        if (pieces == regex.split(text)) continue;
        if (++differing < 5) FAIL_CHECK("differs on \"", text, "\"");
    }
    CHECK(differing == 0);
}

TEST_CASE("the scanner agrees with the regular expression on every character in context") {
    Pretokenizer pretokenizer;
    Regex regex(test::golden_json("tokenizer/cases.json").at("pattern").get<std::string>());
    std::string text;
    for (char32_t c = 1; c < 0x32000; ++c) {
        if (c >= 0xD800 && c < 0xE000) continue;
        // Alone, before and after a small and a capital letter, a space, a full stop, itself.
        for (const char* context : {"a", "B", " ", ".", "1", "\n"}) {
            text += context;
            test::append_utf8(c, text);
        }
        test::append_utf8(c, text);
        if (c % 256 != 0) continue;
        Pieces pieces = split(pretokenizer, text);
        if (pieces != regex.split(text)) FAIL_CHECK("differs in the block that ends at ", int(c));
        text.clear();
    }
}

TEST_CASE("long runs of one kind are cut by the scanner as by the regular expression") {
    Pretokenizer pretokenizer;
    Regex regex(test::golden_json("tokenizer/cases.json").at("pattern").get<std::string>());
    for (std::string unit : {" ", "a", "A", "\n", " \n", "\xCC\x81", "A\xCC\x81", "'", "9", "aB",
                             "\xE4\xB8\xAD", "\xE3\x81\x82\x41", "\t", "!"}) {
        CAPTURE(unit);
        for (const char* end : {"", "x", "X", "\n", "."}) {
            std::string text = test::repeat(unit, 2'000) + end;
            CHECK(split(pretokenizer, text) == regex.split(text));
        }
    }
}

TEST_CASE("nothing is lost between pieces or stretches") {
    Pretokenizer pretokenizer;
    std::mt19937_64 random(7);
    for (int i = 0; i < 200; ++i) {
        std::string text = test::random_text(random, random() % 2'000);
        CHECK(joined(split(pretokenizer, text)) == text);
        CHECK(joined(cut_long_text(text)) == text);
    }
    std::string spaces = test::repeat(" ", 60'001);
    CHECK(cut_long_text(spaces).size() == 3);
    CHECK(cut_long_text(spaces)[0].size() == kMaxRunCharacters);
    CHECK(cut_long_text(test::repeat("ab ", 200'000)).size() == 2);
    CHECK(cut_long_text("").empty());
}

TEST_CASE("a run of separators counts as white space where long text is cut") {
    // U+001C to U+001F are not White_Space, so the pattern sees them as punctuation; the released
    // code counts runs by another definition, which includes them.
    std::string mixed = test::repeat("\x1C ", kMaxRunCharacters / 2) + "\x1F";
    CHECK(cut_long_text(mixed).size() == 2);
    CHECK(cut_long_text(test::repeat("\x1C"
                                     "a",
                                     kMaxRunCharacters))
              .size() == 1);
    CHECK(cut_long_text(test::repeat("\xE3\x80\x80", kMaxRunCharacters) + "a").size() == 1);
}
