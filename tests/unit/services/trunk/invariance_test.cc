// What must not change a single bit of the logits: how a prompt is cut, threads, instruction set,
// neighbours in the step, where the layers are cut into stages, a fork.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

using Logits = std::vector<float>;

bool same_bytes(std::span<const float> a, std::span<const float> b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

/// The longest prompt, and its logits from one step with the default settings.
const GoldenPrompt& prompt() {
    static const GoldenPrompt longest = [] {
        std::vector<GoldenPrompt> all = golden_prompts();
        return *std::max_element(all.begin(), all.end(), [](const auto& a, const auto& b) {
            return a.ids.size() < b.ids.size();
        });
    }();
    return longest;
}

Logits run(const Harness::Options& options, std::size_t chunk) {
    Harness trunk(tiny_model(), options);
    trunk.open(1);
    return trunk.feed(1, prompt().ids, chunk);
}

const Logits& reference() {
    static const Logits logits = run({}, prompt().ids.size());
    return logits;
}

}  // namespace

TEST_CASE("prefill in pieces of any size gives the same bytes") {
    for (std::size_t chunk : {1, 2, 3, 4, 7, 15, 16, 17}) {
        CAPTURE(chunk);
        CHECK(same_bytes(run({}, chunk), reference()));
    }
}

TEST_CASE("a prompt longer than an attention block gives the same bytes in pieces") {
    std::vector<std::uint32_t> ids;
    for (std::uint32_t i = 0; i < 150; ++i) ids.push_back(prompt().ids[i * 7 % 40]);
    Harness trunk(tiny_model());
    trunk.open(1);
    const Logits whole = trunk.feed(1, ids, ids.size());
    for (std::size_t chunk : {1, 63, 64, 65}) {
        CAPTURE(chunk);
        trunk.open(2);
        CHECK(same_bytes(trunk.feed(2, ids, chunk), whole));
        trunk.drop(2);
    }
}

TEST_CASE("1, 2 and 4 threads give the same bytes") {
    // Small steps stay on one thread, so a large one of the larger model: 240 rows of 3 sessions.
    std::vector<Logits> results;
    for (int n_threads : {1, 2, 4}) {
        Harness::Options options;
        options.n_threads = n_threads;
        CHECK(same_bytes(run(options, 7), reference()));
        Harness trunk(demo_model(), options);
        std::vector<TokenRow> rows;
        for (std::uint64_t id : {1, 2, 3}) trunk.open(id);
        for (std::uint32_t i = 0; i < 240; ++i) rows.push_back({1 + i % 3, i * 37 % 2000});
        results.push_back(trunk.step(rows, {0, 100, 239}).value());
        CHECK(same_bytes(results.back(), results.front()));
    }
}

TEST_CASE("every instruction set gives the same bytes") {
    const kernels::KernelTables available = kernels::available_kernels();
    for (std::size_t i = 0; i < available.count; ++i) {
        CAPTURE(available.tables[i]->isa);
        Harness::Options options;
        options.table = available.tables[i];
        CHECK(same_bytes(run(options, 7), reference()));
    }
}

TEST_CASE("stages cut anywhere give the same bytes as one stage") {
    // 3, 6 and 12 begin a block of attention residuals, 3 and 7 are MLA layers, 12 is the last.
    const std::vector<std::vector<std::uint32_t>> all_cuts = {
        {1}, {2}, {3}, {4}, {6}, {7}, {8}, {11}, {12}, {3, 6}, {1, 12}, {5, 7}, {4, 9}};
    for (const auto& cuts : all_cuts) {
        std::string text;
        for (std::uint32_t cut : cuts) text += std::to_string(cut) + " ";
        CAPTURE(text);
        Harness::Options options;
        options.cuts = cuts;
        CHECK(same_bytes(run(options, 9), reference()));
    }
}

TEST_CASE("a session in company gives the same bytes as alone") {
    const std::size_t vocab = tiny_model().config.vocab_size;
    const std::vector<GoldenPrompt> prompts = golden_prompts();
    Harness trunk(tiny_model());
    std::vector<Logits> alone;
    std::vector<std::vector<std::uint32_t>> ids;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
        ids.push_back(prompts[i].ids);
        ids.back().insert(ids.back().end(), prompts[i].greedy.begin(), prompts[i].greedy.end());
        trunk.open(100 + i);
        alone.push_back(trunk.feed(100 + i, ids[i], ids[i].size()));
        trunk.open(i + 1);
    }
    // One row of each in turn, starting late and taking a few more rows now and then: prefill and
    // decode mixed, sessions interleaved within a step.
    std::vector<Logits> together(ids.size());
    std::vector<std::size_t> done(ids.size(), 0);
    for (std::size_t step = 0; step < 200; ++step) {
        std::vector<TokenRow> rows;
        std::vector<std::size_t> owner;
        for (std::size_t lap = 0; lap < 1 + step % 3; ++lap) {
            for (std::size_t i = ids.size(); i-- > 0;) {
                if (step < 5 * i || done[i] == ids[i].size()) continue;
                rows.push_back({i + 1, ids[i][done[i]++]});
                owner.push_back(i);
            }
        }
        if (rows.empty()) continue;
        std::vector<std::uint32_t> wanted(rows.size());
        for (std::uint32_t r = 0; r < wanted.size(); ++r) wanted[r] = r;
        const Logits logits = trunk.step(rows, wanted).value();
        for (std::size_t r = 0; r < rows.size(); ++r) {
            const auto row = row_of(logits, r, vocab);
            together[owner[r]].insert(together[owner[r]].end(), row.begin(), row.end());
        }
    }
    for (std::size_t i = 0; i < ids.size(); ++i) CHECK(same_bytes(together[i], alone[i]));
}

TEST_CASE("logits of some rows equal those rows of all logits") {
    const std::size_t vocab = tiny_model().config.vocab_size;
    Harness trunk(tiny_model());
    trunk.open(1);
    std::vector<TokenRow> rows;
    for (std::uint32_t id : prompt().ids) rows.push_back({1, id});
    const std::vector<std::uint32_t> wanted = {0, 17, 39};
    const Logits some = trunk.step(rows, wanted).value();
    REQUIRE(some.size() == wanted.size() * vocab);
    for (std::size_t i = 0; i < wanted.size(); ++i)
        CHECK(same_bytes(row_of(some, i, vocab), row_of(reference(), wanted[i], vocab)));
}

TEST_CASE("a fork goes on exactly as its source would, and neither disturbs the other") {
    const std::vector<std::uint32_t> head(prompt().ids.begin(), prompt().ids.begin() + 21);
    const std::vector<std::uint32_t> tail(prompt().ids.begin() + 21, prompt().ids.end());
    Harness::Options options;
    options.cuts = {5};
    Harness trunk(tiny_model(), options);
    trunk.open(1, 64);
    trunk.feed(1, head, 8);
    trunk.fork(1, 2, 300);
    const std::span<const float> expected =
        std::span(reference()).last(tail.size() * trunk.vocab_size());
    trunk.feed(1, {3, 1, 4, 1, 5}, 5);
    CHECK(same_bytes(trunk.feed(2, tail, tail.size()), expected));
    trunk.open(3);
    trunk.feed(3, head, head.size());
    const Logits straight = trunk.feed(3, {3, 1, 4, 1, 5, 9, 2}, 7);
    CHECK(same_bytes(trunk.feed(1, {9, 2}, 1), std::span(straight).last(2 * trunk.vocab_size())));
}

}  // namespace k3::test
