// What comes out of services and models, taken apart: log lines, chat markers, JSON, .npy.

#include <doctest/doctest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "launcher/chat_view.h"
#include "launcher/run_output.h"
#include "launcher/service_output.h"
#include "tests/support/checkpoint_copy.h"

using namespace k3;
using namespace k3::launcher;

TEST_CASE("a log line is taken apart, and anything else is not mistaken for one") {
    OutputLine line = parse_line("2026-11-29 22:04:11.532 error trunk run=7f3a no such layer; see");
    CHECK(line.level == LineLevel::error);
    CHECK(line.message == "no such layer; see");
    CHECK(parse_line("2026-11-29 22:04:11.532 warning x slow").level == LineLevel::warning);
    CHECK(parse_line("2026-11-29 22:04:11.532 warning x slow").message == "slow");
    CHECK(parse_line("2026-11-29 22:04 error x y").level == LineLevel::other);
    CHECK(parse_line("==123== Memcheck").level == LineLevel::other);
    CHECK(parse_line("").level == LineLevel::other);
}

TEST_CASE("lines are whole however the bytes arrive, and endless ones are cut") {
    OutputReader reader;
    CHECK(reader.add("one\ntw").size() == 1);
    auto lines = reader.add("o\n\nthree");
    REQUIRE(lines.size() == 2);
    CHECK(lines[0].text == "two");
    REQUIRE(reader.finish().size() == 1);
    lines = reader.add(std::string(20000, 'x') + "\nend\n");
    REQUIRE(lines.size() == 4);
    CHECK(lines[0].text.size() == 8192);
    CHECK(lines[2].text.size() == 20000 - 2 * 8192);
    CHECK(lines[3].text == "end");
}

namespace {

ChatView::Text view(const std::string& channel, const std::string& stream, std::size_t step) {
    ChatView chat(channel);
    ChatView::Text all;
    auto keep = [&all](const ChatView::Text& text) {
        all.thinking += text.thinking;
        all.answer += text.answer;
    };
    for (std::size_t i = 0; i < stream.size(); i += step) keep(chat.add(stream.substr(i, step)));
    keep(chat.finish());
    return all;
}

}  // namespace

TEST_CASE("the answer is shown without its markers, wherever the stream is cut") {
    const std::string end = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>";
    for (std::size_t step : {1, 2, 5, 1000}) {
        CAPTURE(step);
        CHECK(view("response", "8 + 9 = 17." + end, step).answer == "8 + 9 = 17.");
        auto thought =
            view("think", "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes." + end, step);
        CHECK(thought.thinking == "Hm.");
        CHECK(thought.answer == "Yes.");
        CHECK(view("response", "a < b <| c <", step).answer == "a < b <| c <");
        CHECK(view("think", "never an answer", step).answer.empty());
        auto calls =
            view("response",
                 "<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"f\"<|sep|>"
                 "<|close|>call<|sep|><|close|>tools<|sep|>",
                 step);
        CHECK(calls.answer == "<|open|>call tool=\"f\"<|sep|><|close|>call<|sep|>");
    }
}

TEST_CASE("a conversation is handed on as it was written") {
    CHECK(*chat_of_json("[{\"role\":\"user\"}]", "", "f") ==
          "{\"messages\":[{\"role\":\"user\"}]}");
    CHECK(*chat_of_json("[]", "max", "f") == "{\"messages\":[],\"thinking_effort\":\"max\"}");
    CHECK(*chat_of_json("{\"b\": 1e2, \"a\": 2}", "", "f") == "{\"b\": 1e2, \"a\": 2}");
    CHECK(*chat_of_json(" {\"b\": 1e2}", "low", "f") ==
          " {\"thinking_effort\":\"low\",\"b\": 1e2}");
    CHECK(*chat_of_json("{\"thinking_effort\":\"max\"}", "low", "f") ==
          "{\"thinking_effort\":\"max\"}");
    CHECK(opened_channel("{\"thinking_effort\":\"max\"}") == "think");
    CHECK(opened_channel("{\"thinking_effort\":null}") == "response");
    CHECK(opened_channel("{}") == "response");
    auto text = chat_of_text("say \"hi\"\n", "high");
    REQUIRE(text.has_value());
    auto parsed = nlohmann::json::parse(*text);
    CHECK(parsed["messages"][0]["content"] == "say \"hi\"\n");
    CHECK(parsed["thinking_effort"] == "high");
}

TEST_CASE("a conversation that is none is refused in a sentence") {
    auto broken = chat_of_json("[{", "", "talk.json");
    REQUIRE_FALSE(broken.has_value());
    CHECK(broken.error().code == ErrorCode::invalid_argument);
    CHECK(broken.error().message.find("talk.json is not JSON") == 0);
    CHECK_FALSE(chat_of_json("3", "", "talk.json").has_value());
    auto bytes = chat_of_text("\xff\xfe", "");
    REQUIRE_FALSE(bytes.has_value());
    CHECK(bytes.error().message.find("not UTF-8") != std::string::npos);
}

TEST_CASE("logits are written as an array that numpy reads") {
    test::TempDir temp;
    auto file = LogitsFile::create(temp.path() / "l.npy");
    REQUIRE(file.has_value());
    const float row[] = {1.5F, -2.0F, 0.0F};
    REQUIRE((*file)->add(row).has_value());
    REQUIRE((*file)->add(row).has_value());
    REQUIRE((*file)->finish(3).has_value());
    std::string bytes = test::read_file(temp.path() / "l.npy");
    REQUIRE(bytes.size() == 128 + 24);
    CHECK(bytes.substr(0, 8) == std::string("\x93NUMPY\x01\x00", 8));
    CHECK(static_cast<unsigned char>(bytes[8]) == 118);
    CHECK(bytes[127] == '\n');
    CHECK(bytes.find("'shape': (2, 3)") != std::string::npos);
    float second = 0;
    std::memcpy(&second, bytes.data() + 128 + 4, 4);
    CHECK(second == -2.0F);
    CHECK_FALSE(LogitsFile::create("/nonexistent/l.npy").has_value());
}
