// The demo model through real processes: it answers what the reference answered.

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
using nlohmann::json;

namespace {

json load(const std::string& name) { return json::parse(read_file(golden_dir() / name)); }

/// The demo, its steps shared by many requests.
Pipeline demo(World& world) {
    return Pipeline(world, "demo", demo_model_dir(),
                    "[experts]\ncache_bytes = '16MiB'\n[trunk]\nthreads = 2\n"
                    "[gateway]\nmax_requests = 16\n");
}

/// The ids that belong to the answer: what the reference lists includes the stop id, and whether a
/// gateway shows that id is its own matter.
std::vector<std::uint32_t> without_stop(std::vector<std::uint32_t> ids, std::uint32_t stop_id) {
    if (!ids.empty() && ids.back() == stop_id) ids.pop_back();
    return ids;
}

void check_ids(const Answer& answer, const json& expected, const std::string& what) {
    CAPTURE(what);
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    auto wanted = expected.get<std::vector<std::uint32_t>>();
    std::uint32_t stop = 0;
    if (answer.finished.reason == msg::FinishReason::stop_id) {
        stop = answer.finished.stop_id;
        CHECK(wanted.back() == stop);
    }
    CHECK(without_stop(answer.ids, stop) == without_stop(wanted, stop));
}

msg::Submit request_of(const json& prompt) {
    auto n = static_cast<std::uint32_t>(prompt["greedy_ids"].size());
    if (prompt.contains("prompt")) return of_text(prompt["prompt"], n);
    json chat = {{"messages", prompt["messages"]}};
    if (prompt.contains("thinking_effort") && !prompt["thinking_effort"].is_null())
        chat["thinking_effort"] = prompt["thinking_effort"];
    msg::Submit submit = of_text("", n);
    submit.input = msg::ChatInput{chat.dump()};
    return submit;
}

}  // namespace

TEST_CASE("the first command of the readme continues the sentence") {
    World world;
    Ended ended = world.k3pipe({"run", "-p", "The capital of France is"});
    INFO(ended.err);
    CHECK(ended.code == 0);
    CHECK(ended.out.starts_with(
        " Paris. France is a country in Europe. People in France speak French."));
    CHECK(ended.err.find("greedy") != std::string::npos);
    CHECK(ended.err.find("is ready after") != std::string::npos);
}

TEST_CASE("the demo model answers as the reference did") {
    World world;
    Pipeline pipeline = demo(world);
    json expected = load("demo-k3/expected.json");

    SUBCASE("all prompts and conversations, several at once") {
        std::vector<msg::Submit> submits;
        for (const json& prompt : expected["prompts"]) submits.push_back(request_of(prompt));
        REQUIRE(submits.size() == 28);
        std::vector<Answer> answers = ask_all(pipeline.gateway(), submits, 8);
        for (std::size_t i = 0; i < submits.size(); ++i) {
            const json& prompt = expected["prompts"][i];
            CHECK(json(answers[i].prompt_ids) == prompt["ids"]);
            check_ids(answers[i], prompt["greedy_ids"], prompt["name"]);
        }
        // Through the command line, against the pipeline that runs.
        Ended chat =
            world.k3pipe({"run", "--attach", "--chat", "-p", "What is 5 + 6?", "--effort", "low"});
        INFO(chat.err);
        CHECK(chat.code == 0);
        CHECK(chat.out == "5 + 6 = 11.");
        Ended lines = world.k3pipe({"run", "--attach", "demo", "-p", "The opposite of hot is",
                                    "--json", "--logprobs", "2"});
        CHECK(lines.code == 0);
        json last = json::parse(lines.out.substr(lines.out.rfind('\n', lines.out.size() - 2) + 1));
        CHECK(last["event"] == "finished");
        CHECK(last["text"].get<std::string>().starts_with(" cold."));
        // A chat as JSON: the answer without markers, unless the stream itself is asked for.
        const auto chat_json = [&](std::vector<std::string> more) {
            std::vector<std::string> words = {"run",      "--attach", "--chat", "--json",
                                              "--effort", "max",      "-p",     "What is 5 + 6?"};
            words.insert(words.end(), more.begin(), more.end());
            return world.k3pipe(words).out;
        };
        const auto last_of = [](const std::string& out) {
            return json::parse(out.substr(out.rfind('\n', out.size() - 2) + 1));
        };
        const std::string lines_of_chat = chat_json({});
        const json of_chat = last_of(lines_of_chat);
        CHECK(of_chat["text"] == "5 + 6 = 11.");
        REQUIRE(of_chat.contains("thinking"));
        CHECK(!of_chat["thinking"].get<std::string>().empty());
        CHECK(lines_of_chat.find("<|") == std::string::npos);
        std::string pieces;
        for (std::size_t at = 0; at < lines_of_chat.size();) {
            const std::size_t end = lines_of_chat.find('\n', at);
            const json line = json::parse(lines_of_chat.substr(at, end - at));
            if (line["event"] == "tokens") pieces += line["text"].get<std::string>();
            if (line["event"] == "accepted")
                CHECK(line["request"].get<std::uint64_t>() <= std::uint64_t{1} << 53U);
            at = end + 1;
        }
        CHECK(pieces == "5 + 6 = 11.");
        const json raw = last_of(chat_json({"--raw"}));
        CHECK(raw["text"].get<std::string>().find("<|close|>") != std::string::npos);
        CHECK_FALSE(raw.contains("thinking"));
        CHECK(raw["ids"] == of_chat["ids"]);
        Ended status = world.k3pipe({"status"});
        CHECK(status.code == 0);
        for (const char* stage : {"tokenizer", "sampler", "experts", "trunk", "gateway"})
            CHECK(status.out.find(stage) != std::string::npos);
    }
    SUBCASE("all 380 questions, many at once") {
        json semantic = load("demo-k3/semantic.json");
        std::vector<msg::Submit> submits;
        std::vector<const json*> items;
        for (const json& suite : semantic["suites"])
            for (const json& item : suite["items"]) {
                submits.push_back(of_ids(item["ids"].get<std::vector<std::uint32_t>>(),
                                         static_cast<std::uint32_t>(item["greedy_ids"].size())));
                items.push_back(&item);
            }
        REQUIRE(submits.size() == 380);
        std::vector<Answer> answers = ask_all(pipeline.gateway(), submits, 24);
        for (std::size_t i = 0; i < items.size(); ++i)
            check_ids(answers[i], (*items[i])["greedy_ids"], (*items[i])["prompt"]);
    }
    SUBCASE("the perplexity of text it has never seen") {
        json rows = load("demo-k3/heldout_ids.json")["rows"];
        std::vector<msg::Submit> submits;
        for (const json& row : rows) {
            submits.push_back(of_ids(row.get<std::vector<std::uint32_t>>(), 1));
            submits.back().want_logits = msg::WantLogits::all;
        }
        std::vector<Answer> answers = ask_all(pipeline.gateway(), submits, 4);
        double nll = 0;
        std::size_t n_tokens = 0;
        for (std::size_t r = 0; r < answers.size(); ++r) {
            REQUIRE_MESSAGE(!answers[r].error.has_value(), answers[r].error->sentence());
            auto ids = rows[r].get<std::vector<std::uint32_t>>();
            std::size_t vocab = 2304;
            REQUIRE(answers[r].logits.size() >= ids.size() * vocab * 4);
            std::vector<float> logits(ids.size() * vocab);
            std::memcpy(logits.data(), answers[r].logits.data(), logits.size() * 4);
            for (std::size_t t = 0; t + 1 < ids.size(); ++t) {
                const float* row = logits.data() + t * vocab;
                double sum = 0;
                for (std::size_t v = 0; v < vocab; ++v) sum += std::exp(double(row[v]));
                nll += std::log(sum) - double(row[ids[t + 1]]);
                ++n_tokens;
            }
        }
        CHECK(n_tokens == 14025);
        double perplexity = std::exp(nll / static_cast<double>(n_tokens));
        MESSAGE("perplexity " << perplexity);
        CHECK(std::abs(perplexity - 1.8276) < 0.00005);
    }
}
