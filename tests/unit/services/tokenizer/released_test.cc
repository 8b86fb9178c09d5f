// Vectors of the released vocabulary, which is not part of this tree: they run when
// K3_RELEASED_TOKENIZER names a directory with its tiktoken.model and tokenizer_config.json, and
// report NOT RUN otherwise.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "services/tokenizer/chat.h"
#include "services/tokenizer/decoder.h"
#include "services/tokenizer/encoder.h"
#include "services/tokenizer/vocabulary.h"

using namespace k3;
using namespace k3::tokenizer;
using Ids = std::vector<std::uint32_t>;

namespace {

constexpr const char* kVariable = "K3_RELEASED_TOKENIZER";
constexpr int kNotRun = 77;  // what the test runner counts as skipped

struct Released {
    Released() : vocabulary(load()), encoder(vocabulary) {}

    static Vocabulary load() {
        auto loaded = Vocabulary::load(std::getenv(kVariable), 163840);
        if (!loaded) FAIL(loaded.error().sentence());
        return std::move(loaded).value();
    }

    Ids encode(std::string_view text) const { return encoder.encode(text, {}).value(); }

    Ids render(std::string_view json) const {
        auto request = parse_chat_request(json);
        if (!request) FAIL(request.error().sentence());
        auto prompt = render_chat(*request);
        if (!prompt) FAIL(prompt.error().sentence());
        ChatEncoder chat = ChatEncoder::create(vocabulary, encoder).value();
        return chat.encode(prompt->pieces).value();
    }

    Vocabulary vocabulary;
    Encoder encoder;
};

Ids operator+(Ids left, const Ids& right) {
    left.insert(left.end(), right.begin(), right.end());
    return left;
}

// The prompt's end, with thinking on and off.
const Ids kThinkStub = {163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964, 163589};
const Ids kResponseStub = {163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 12092, 163589};
// "[close]message[sep][end_of_msg]".
const Ids kEndOfMessage = {163588, 2778, 163589, 163586};

}  // namespace

TEST_CASE("the vocabulary has the released sizes and names") {
    Released released;
    CHECK(released.vocabulary.n_ranks() == 163584);
    CHECK(released.vocabulary.size() == 163840);
    CHECK(released.vocabulary.max_token_bytes() == 256);
    CHECK(released.vocabulary.eos_id() == 163585);
    struct Special {
        std::uint32_t id;
        const char* name;
        bool marked;
    };
    for (const Special& special : std::vector<Special>{{163584, "[BOS]", true},
                                                       {163585, "[EOS]", true},
                                                       {163586, "<|end_of_msg|>", true},
                                                       {163587, "<|open|>", false},
                                                       {163588, "<|close|>", false},
                                                       {163589, "<|sep|>", false},
                                                       {163590, "[start_header_id]", true},
                                                       {163591, "[end_header_id]", true},
                                                       {163593, "[EOT]", true},
                                                       {163602, "<|media_begin|>", true},
                                                       {163603, "<|media_content|>", true},
                                                       {163604, "<|media_end|>", true},
                                                       {163605, "<|media_pad|>", true},
                                                       {163649, "<osagent_mode>", true},
                                                       {163838, "[UNK]", true},
                                                       {163839, "[PAD]", true}}) {
        CHECK(released.vocabulary.token(special.id) == special.name);
        CHECK(released.vocabulary.is_marked_special(special.id) == special.marked);
    }
    CHECK(released.vocabulary.token(163592) == "<|reserved_token_163592|>");
}

TEST_CASE("ordinary text encodes to the released ids") {
    Released released;
    struct Vector {
        std::string text;
        Ids ids;
    };
    for (const Vector& vector : std::vector<Vector>{
             {"Hello, world!", {19180, 11, 2695, 0}},
             {"The capital of France is", {1008, 10484, 318, 15383, 387}},
             {"你好，世界", {33845, 378, 2243}},
             {"Kimi K3 模型2026年发布", {42, 30223, 1040, 18, 220, 15662, 2975, 21, 532, 5073}},
             {"1234567", {6694, 12972, 22}},
             {"3.14159", {18, 13, 18702, 6276}},
             {"don't DON'T I'll we'Re", {88709, 92629, 64833, 17916, 645, 6, 902}},
             {"  leading", {220, 8134}},
             {"trailing  ", {523, 16627, 256}},
             {"a\n\n  b\r\n", {64, 382, 220, 291, 462}},
             {"\t\tif x:\n        return", {197, 1281, 1288, 777, 337, 745}},
             {"日本語テスト", {4546, 63011, 25875, 33360}},
             {"한국어", {17079, 54078, 28763}},
             {"naïve café", {4768, 44187, 367, 70591}},
             {"e\u0301", {68, 37484}},
             {"🙂👍🏽", {5885, 46813, 64390, 235, 92949, 121}},
             {"中a文b", {435, 64, 908, 65}},
             {"々〇⺀", {106101, 91894, 158, 118, 222}},
             {"x²+y²", {87, 39530, 17946, 39530}},
             {"\u00A0x", {5406, 87}},
             {"foo_bar(baz)", {10570, 30242, 2850, 1791, 8}},
             {"HTTPServer2", {88148, 4022, 17}},
             {"العربية", {6974, 5042, 26139, 12441}},
             {"हिन्दी", {21232, 48190, 84837, 10722}},
             {"<|open|>", {27, 91, 4454, 91, 29}},
             {"hello <|end_of_msg|> world", {22931, 22652, 517, 5118, 14222, 91, 29, 2695}}}) {
        CAPTURE(vector.text);
        CHECK(released.encode(vector.text) == vector.ids);
        CHECK(Decoder(released.vocabulary).bytes_of(vector.ids, false).value() == vector.text);
    }
}

TEST_CASE("the words of the chat format are single tokens") {
    Released released;
    for (auto [text, id] : std::vector<std::pair<std::string, std::uint32_t>>{{"message", 2778},
                                                                              {" role", 6244},
                                                                              {"=\"", 878},
                                                                              {"\"", 1},
                                                                              {"assistant", 69702},
                                                                              {"user", 2482},
                                                                              {"system", 14062},
                                                                              {"tool", 20960},
                                                                              {" type", 1798},
                                                                              {" name", 1530},
                                                                              {" tool", 4453},
                                                                              {" index", 4002},
                                                                              {" key", 2355},
                                                                              {"think", 39964},
                                                                              {"response", 12092},
                                                                              {"tools", 25385},
                                                                              {"call", 10257},
                                                                              {"argument", 47185},
                                                                              {"json", 5534}}) {
        const auto& seen = text;  // clang 14 lets no lambda take the binding itself
        CAPTURE(seen);
        CHECK(released.encode(text) == Ids{id});
    }
}

TEST_CASE("conversations encode to the released ids") {
    Released released;
    CHECK(released.render(R"({"messages": []})") == kResponseStub);

    const Ids hi = Ids{163587, 2778, 6244, 878, 2482, 1, 163589, 9663} + kEndOfMessage;
    Ids hi_max = released.render(
        R"({"messages": [{"role": "user", "content": "hi"}], "thinking_effort": "max"})");
    const Ids effort =
        Ids{163587, 2778,   6244, 878,    14062,  1,    1798,   878,   130400, 59991, 470,
            1,      163589, 63,   130400, 123074, 470,  63,     28560, 418,    1632,  2455,
            308,    2704,   306,  651,    9545,   8491, 347,    2976,  3411,   276,   4503,
            8491,   904,    9141, 4661,   3867,   1268, 1332,   5713,  1268,   50004, 5713,
            1268,   19421,  5713, 316,    1268,   5354, 16518,  10048, 276,    2403,  387,
            42070,  472,    1268, 130400, 123074, 470,  105281, 11369} +
        kEndOfMessage;
    CHECK(hi_max == effort + hi + kThinkStub);
    CHECK(hi_max.size() == 89);

    Ids alone = released.render(
        R"({"messages": [{"role": "assistant", "content": "你好"}], "thinking_effort": "high"})");
    CHECK(alone.size() == 102);
    const Ids message =
        Ids{163587, 2778,  6244,   878,    69702, 1,      163589, 163587, 39964, 163589,
            163588, 39964, 163589, 163587, 12092, 163589, 33845,  163588, 12092, 163589} +
        kEndOfMessage;
    CHECK(Ids(alone.begin() + 68, alone.end()) == message + kThinkStub);

    CHECK(released.render(R"({"messages": [], "add_generation_prompt": false, "tools":
              [{"type": "function", "function": {"name": "f",
                "parameters": {"type": "object", "properties": {}}}}]})") ==
          Ids{163587, 2778,   6244,  878,   14062, 1,     1798,  878,   20960, 120083, 677,
              1,      163589, 2,     30391, 198,   12214, 554,   276,   2878,  7697,   11,
              11880,  306,    11419, 11438, 1481,  3251,  5534,  198,   81103, 3879,   22849,
              1152,   7471,   69,    3923,  24453, 22849, 27129, 1289,  13071, 2020,   2217,
              7471,   3721,   60336, 2020,  2217,  7471,  3879,  16934, 1641,  3251} +
              kEndOfMessage);

    Ids call = released.render(R"({"add_generation_prompt": false, "thinking_effort": "max",
        "messages": [{"role": "assistant", "content": "", "reasoning_content": "ok", "tool_calls":
            [{"type": "function", "function": {"name": "get_weather",
              "arguments": {"city": "北京", "days": 3}}}]}]})");
    CHECK(Ids(call.begin() + static_cast<std::ptrdiff_t>(effort.size()), call.end()) ==
          Ids{163587, 2778,   6244,   878,    69702,  1,      163589, 163587, 39964,
              163589, 687,    163588, 39964,  163589, 163587, 12092,  163589, 163588,
              12092,  163589, 163587, 25385,  163589, 163587, 10257,  4453,   878,
              618,    21055,  2800,   1,      4002,   878,    16,     1,      163589,
              163587, 47185,  2355,   878,    37666,  1,      1798,   878,    2033,
              1,      163589, 3372,   163588, 47185,  163589, 163587, 47185,  2355,
              878,    21030,  1,      1798,   878,    10006,  1,      163589, 18,
              163588, 47185,  163589, 163588, 10257,  163589, 163588, 25385,  163589} +
              kEndOfMessage);
}

int main(int argc, char** argv) {
    const char* directory = std::getenv(kVariable);
    if (directory == nullptr || *directory == '\0') {
        std::printf(
            "NOT RUN: the vectors of the released vocabulary need its files; set %s to the "
            "directory "
            "that holds tiktoken.model and tokenizer_config.json\n",
            kVariable);
        return kNotRun;
    }
    return doctest::Context(argc, argv).run();
}
