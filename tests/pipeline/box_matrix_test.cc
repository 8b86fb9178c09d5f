// Pipelines over 1 to 8 boxes, in every pair of circumstances that may meet: the same bytes as on
// one, and nobody taken for dead because the network is slow.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/kernels/kernel_table.h"
#include "tests/support/boxes.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

/// Servers are one on each box, two on a single box, so that every value goes with every other.
enum Factor : std::size_t { boxes, stages, replicas, uneven, mixed_isa, round_trip_us, lossy };
constexpr std::size_t kFactors = 7;
using Row = std::array<int, kFactors>;

const std::array<std::vector<int>, kFactors> kValues = {
    {{1, 2, 3, 5, 8}, {1, 2, 3, 4}, {1, 2}, {0, 1}, {0, 1}, {0, 100, 1000, 10000}, {0, 1}}};

/// Round trip 0 without loss is a plain cable; otherwise there is jitter of a fifth of the delay.
constexpr std::array<Row, 20> kRows = {{
    {1, 1, 2, 0, 0, 100, 0},   {1, 2, 1, 1, 1, 10000, 1}, {1, 3, 1, 1, 1, 0, 0},
    {1, 4, 1, 1, 1, 1000, 0},  {2, 1, 1, 1, 0, 10000, 0}, {2, 2, 1, 0, 0, 100, 1},
    {2, 3, 2, 0, 1, 1000, 1},  {2, 4, 1, 1, 0, 0, 0},     {3, 1, 2, 1, 1, 0, 1},
    {3, 2, 2, 0, 0, 100, 1},   {3, 3, 1, 0, 0, 10000, 0}, {3, 4, 2, 0, 0, 1000, 1},
    {5, 1, 1, 1, 0, 10000, 1}, {5, 2, 1, 0, 0, 1000, 0},  {5, 3, 2, 1, 1, 0, 1},
    {5, 4, 2, 1, 1, 100, 1},   {8, 1, 1, 1, 1, 1000, 0},  {8, 2, 2, 0, 0, 0, 1},
    {8, 3, 1, 1, 0, 100, 0},   {8, 4, 2, 0, 0, 10000, 0},
}};

constexpr std::size_t kBoxes = 8;
constexpr std::uint32_t kTokens = 6;
constexpr std::uint32_t kLossPer1000 = 1;

/// Of two sessions, which are computed at the same time.
std::vector<msg::Submit> requests() {
    std::vector<msg::Submit> submits = {of_ids({3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8}, kTokens),
                                        of_ids({2, 7, 1, 8, 2, 8, 1}, kTokens)};
    for (msg::Submit& submit : submits) {
        submit.ignore_eos = true;
        submit.want_logits = msg::WantLogits::all;
    }
    return submits;
}

std::vector<Answer> answers_of(const Pipeline& pipeline) {
    std::vector<Answer> answers = ask_all(pipeline.gateway(), requests(), 2);
    REQUIRE(answers.size() == 2);
    for (const Answer& answer : answers) {
        REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
        REQUIRE(answer.ids.size() == kTokens);
        REQUIRE_FALSE(answer.logits.empty());
    }
    return answers;
}

/// Instruction set of a box; empty: its own choice.
std::string isa_of(const Row& row, std::size_t box) {
    if (row[mixed_isa] == 0) return "";
    const kernels::KernelTables tables = kernels::available_kernels();
    return tables.tables[box % tables.count]->isa;
}

std::string on_box(const Row& row, std::size_t box) {
    std::string keys = "host = 'box" + std::to_string(box) + "'\nthreads = 1\n";
    if (const std::string isa = isa_of(row, box); !isa.empty())
        keys += "env = { K3_ISA = '" + isa + "' }\n";
    return keys;
}

std::size_t n_servers(const Row& row) { return static_cast<std::size_t>(std::max(2, row[boxes])); }

std::string stage_tables(const Row& row) {
    const auto n_boxes = static_cast<std::size_t>(row[boxes]);
    std::string tables;
    for (std::size_t i = 0; i < n_servers(row); ++i)
        tables += "[[experts]]\n" + on_box(row, i % n_boxes) +
                  "weight = " + std::to_string(row[uneven] == 0 ? 1 : 1 + i % 3) + "\n";
    // From the last box on, so that with two stages or more some box has both and some has not.
    for (std::size_t i = 0; i < static_cast<std::size_t>(row[stages]); ++i)
        tables += "[[trunk]]\n" + on_box(row, (n_boxes - 1 + i) % n_boxes);
    for (std::size_t i = 0; i < n_boxes; ++i)
        tables += "[hosts.box" + std::to_string(i) + "]\nbinary = '" +
                  built("launcher/k3pipe").string() + "'\n";
    return tables;
}

/// The key of [pipeline] for a placement with the row's replicas and weights.
std::string placement_key(const World& world, const Row& row, const std::string& keys) {
    if (row[replicas] == 1 && row[uneven] == 0) return "";
    const std::string file =
        world
            .write("unplaced.toml", "[pipeline]\nmodel = '" + (golden_dir() / "tiny-k3").string() +
                                        "'\n" + keys + stage_tables(row))
            .string();
    const std::string out = (world.path() / "boxes.placement").string();
    const Ended made = world.k3pipe(
        {"placement", "-c", file, "--replicas", std::to_string(row[replicas]), "--out", out});
    REQUIRE_MESSAGE(made.code == 0, made.err);
    return "placement = 'boxes.placement'\n";
}

void set_links(Boxes& network, const Row& row, std::uint64_t seed) {
    LinkShape shape;
    shape.delay_us = row[round_trip_us] / 2;
    shape.jitter_us = shape.delay_us / 5;
    shape.loss_per_1000 = row[lossy] != 0 ? kLossPer1000 : 0;
    const bool is_plain = row[round_trip_us] == 0 && row[lossy] == 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(row[boxes]); ++i) {
        network.set_link(i, std::nullopt);
        shape.seed = seed * kBoxes + i;
        if (!is_plain) network.set_link(i, shape);
    }
}

DelayLink::Counts counts_of(const Boxes& network) {
    DelayLink::Counts sum;
    for (std::size_t i = 0; i < kBoxes; ++i) {
        const DelayLink::Counts counts = network.link_counts(i);
        sum.n_passed += counts.n_passed;
        sum.n_lost += counts.n_lost;
        sum.n_dropped += counts.n_dropped;
    }
    return sum;
}

std::string name_of(const Row& row) {
    std::string name;
    for (int value : row) name += (name.empty() ? "" : "-") + std::to_string(value);
    return name;
}

}  // namespace

TEST_CASE("every value of a factor meets every value of every other one") {
    for (std::size_t a = 0; a < kFactors; ++a)
        for (std::size_t b = a + 1; b < kFactors; ++b) {
            std::set<std::pair<int, int>> met;
            for (const Row& row : kRows) met.emplace(row[a], row[b]);
            CAPTURE(a);
            CAPTURE(b);
            CHECK(met.size() == kValues[a].size() * kValues[b].size());
            for (int x : kValues[a])
                for (int y : kValues[b]) CHECK(met.contains({x, y}));
        }
}

TEST_CASE("any number of boxes, stages and replicas over any link computes the bytes of one box" *
          doctest::skip(!boxes_can_be_made())) {
    std::vector<Answer> expected;
    {
        World world;
        Pipeline pipeline(world, "one-box", golden_dir() / "tiny-k3", "");
        expected = answers_of(pipeline);
    }
    World world;
    Boxes network(world.path(), kBoxes);
    std::uint64_t n_lost = 0;
    for (std::size_t i = 0; i < kRows.size(); ++i) {
        const Row& row = kRows[i];
        const std::string name = name_of(row);
        CAPTURE(name);
        set_links(network, row, i + 1);
        const std::string keys =
            network.pipeline_keys() + placement_key(world, row, network.pipeline_keys());
        const Clock::time_point begin = Clock::now();
        {
            Pipeline pipeline(world, "matrix", golden_dir() / "tiny-k3", stage_tables(row), keys);
            const std::vector<Answer> answers = answers_of(pipeline);
            for (std::size_t s = 0; s < answers.size(); ++s) {
                CHECK(answers[s].ids == expected[s].ids);
                CHECK(answers[s].logits == expected[s].logits);
            }
            // A slow or lossy network is no dead server.
            const auto record = world.record("matrix");
            REQUIRE(record.has_value());
            for (const launcher::StageRecord& stage : record->stages)
                CHECK_MESSAGE(stage.restarts == 0, stage.name);
            for (int s = 0; s < row[stages]; ++s) {
                const std::string trunk = row[stages] == 1 ? "trunk" : "trunk-" + std::to_string(s);
                CHECK(pipeline.counter("expert_server_losses", trunk) == 0);
                CHECK(pipeline.counter("expert_calls_repeated", trunk) == 0);
                // Each has a server on its own box, and those of others behind the network.
                const std::uint64_t n_near = pipeline.counter("expert_calls_fast_lane", trunk);
                const std::uint64_t n_calls = pipeline.counter("expert_calls", trunk);
                CHECK(n_near > 0);
                CHECK((row[boxes] == 1 ? n_near == n_calls : n_near < n_calls));
            }
            std::printf("%-22s %5.2f s, answers after %.2f and %.2f s, %llu frames, %llu lost\n",
                        name.c_str(), std::chrono::duration<double>(Clock::now() - begin).count(),
                        answers[0].seconds, answers[1].seconds,
                        static_cast<unsigned long long>(counts_of(network).n_passed),
                        static_cast<unsigned long long>(counts_of(network).n_lost));
            std::fflush(stdout);
        }
        const DelayLink::Counts counts = counts_of(network);
        const bool is_plain = row[round_trip_us] == 0 && row[lossy] == 0;
        CHECK((counts.n_passed > 0) != is_plain);
        CHECK((counts.n_lost > 0 ? row[lossy] != 0 : true));
        n_lost += counts.n_lost;
        for (std::size_t box = 0; box < kBoxes; ++box) network.set_link(box, std::nullopt);
    }
    CHECK(n_lost > 0);
    CHECK(network.all_clean(10000));
}

namespace {

/// Seconds of a token of one request: what 40 more of them take.
double token_seconds(const Pipeline& pipeline) {
    const auto seconds_of = [&pipeline](std::uint32_t n) {
        double least = 1e9;  // other work on this machine only adds
        for (int i = 0; i < 3; ++i) {
            msg::Submit submit = of_ids({3, 1, 4, 1, 5, 9, 2, 6}, n);
            submit.ignore_eos = true;
            const Answer answer = pipeline.ask(submit);
            REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
            least = std::min(least, answer.seconds);
        }
        return least;
    };
    const double few = seconds_of(5);
    return (seconds_of(45) - few) / 40;
}

}  // namespace

// The table of docs/operating.md: --no-skip -tc="a token over*"
TEST_CASE("a token over links of 0 to 10 ms" * doctest::skip()) {
    if (!boxes_can_be_made()) return;
    World world;
    Boxes network(world.path(), 4);
    std::printf("trunk stages,round trip us,loss per 1000,ms of a token\n");
    for (int n_stages : {0, 4})
        for (const Row& link :
             {Row{4, n_stages, 1, 0, 0, 0, 0}, Row{4, n_stages, 1, 0, 0, 100, 0},
              Row{4, n_stages, 1, 0, 0, 1000, 0}, Row{4, n_stages, 1, 0, 0, 10000, 0},
              Row{4, n_stages, 1, 0, 0, 10000, 1}}) {
            set_links(network, link, 1);
            Pipeline pipeline(world, "links", golden_dir() / "tiny-k3", stage_tables(link),
                              network.pipeline_keys());
            std::printf("%d,%d,%d,%.2f\n", n_stages, link[round_trip_us],
                        link[lossy] != 0 ? kLossPer1000 : 0, 1000 * token_seconds(pipeline));
            std::fflush(stdout);
        }
}
