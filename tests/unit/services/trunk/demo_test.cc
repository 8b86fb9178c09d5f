// The embedded demo model: expected continuations, 380 answers, held-out perplexity. Sessions are
// batched, because one row at a time would read the weights once per row.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/golden.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

using Ids = std::vector<std::uint32_t>;

struct Question {
    std::string name;
    Ids ids;
    Ids expected;
};

nlohmann::json load_json(const std::string& name) {
    std::ifstream file(golden_dir() / "demo-k3" / name);
    return nlohmann::json::parse(file);
}

/// Answers all questions side by side: every step takes the next rows of as many as fit.
std::vector<Ids> answer(Harness& trunk, const std::vector<Question>& questions,
                        std::size_t max_rows) {
    std::vector<Ids> answers(questions.size());
    std::vector<Ids> next(questions.size());
    for (std::size_t i = 0; i < questions.size(); ++i) {
        trunk.open(i + 1);
        next[i] = questions[i].ids;
    }
    while (true) {
        std::vector<TokenRow> rows;
        Ids wanted;
        std::vector<std::size_t> owner;
        for (std::size_t i = 0; i < questions.size(); ++i) {
            if (next[i].empty() || rows.size() + next[i].size() > max_rows) continue;
            for (std::uint32_t id : next[i]) rows.push_back({i + 1, id});
            wanted.push_back(static_cast<std::uint32_t>(rows.size() - 1));
            owner.push_back(i);
        }
        if (rows.empty()) return answers;
        const std::vector<float> logits = trunk.step(rows, wanted).value();
        for (std::size_t w = 0; w < wanted.size(); ++w) {
            Ids& given = answers[owner[w]];
            given.push_back(argmax(row_of(logits, w, trunk.vocab_size())));
            next[owner[w]].clear();
            if (given.size() < questions[owner[w]].expected.size())
                next[owner[w]].push_back(given.back());
            else
                trunk.drop(owner[w] + 1);
        }
    }
}

void check_answers(const std::vector<Question>& questions) {
    Harness trunk(demo_model());
    const std::vector<Ids> answers = answer(trunk, questions, 256);
    for (std::size_t i = 0; i < questions.size(); ++i) {
        CAPTURE(questions[i].name);
        CHECK(answers[i] == questions[i].expected);
    }
}

/// -ln softmax(logits)[target], in double.
double surprise(std::span<const float> logits, std::uint32_t target) {
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (float logit : logits) sum += std::exp(logit - largest);
    return std::log(sum) + largest - logits[target];
}

}  // namespace

TEST_CASE("all 28 prompts of the demo model continue as expected") {
    std::vector<Question> questions;
    const nlohmann::json expected = load_json("expected.json");
    for (const auto& prompt : expected["prompts"])
        questions.push_back(
            {prompt["name"], prompt["ids"].get<Ids>(), prompt["greedy_ids"].get<Ids>()});
    REQUIRE(questions.size() == 28);
    check_answers(questions);
}

TEST_CASE("all 380 questions of the demo model are answered as expected") {
    std::vector<Question> questions;
    const nlohmann::json semantic = load_json("semantic.json");
    for (const auto& suite : semantic["suites"])
        for (const auto& item : suite["items"])
            questions.push_back(
                {item["prompt"], item["ids"].get<Ids>(), item["greedy_ids"].get<Ids>()});
    REQUIRE(questions.size() == 380);
    check_answers(questions);
}

TEST_CASE("the held-out perplexity of the demo model is reproduced to four digits") {
    const nlohmann::json expected = load_json("expected.json")["perplexity"];
    const auto texts = load_json("heldout_ids.json")["rows"].get<std::vector<Ids>>();
    Harness trunk(demo_model());
    double total = 0;
    std::size_t n = 0;
    for (const Ids& text : texts) {
        trunk.open(1);
        const std::vector<float> logits = trunk.feed(1, text, 128);
        trunk.drop(1);
        for (std::size_t i = 0; i + 1 < text.size(); ++i, ++n)
            total += surprise(row_of(logits, i, trunk.vocab_size()), text[i + 1]);
    }
    REQUIRE(n == expected["tokens"].get<std::size_t>());
    const double perplexity = std::exp(total / static_cast<double>(n));
    MESSAGE("nats per token " << total / static_cast<double>(n) << ", perplexity " << perplexity);
    CHECK(std::abs(perplexity - expected["perplexity"].get<double>()) < 5e-5);
}

}  // namespace k3::test
