// The arithmetic against the golden operators, and that its bits depend on nothing but the picks.

#include "services/experts/executor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/model/load.h"
#include "services/experts/expert_store.h"
#include "tests/support/golden.h"

using namespace k3;
using namespace k3::experts;

namespace {

model::ModelConfig config_of(std::uint32_t n_experts, std::uint32_t top_k, std::uint32_t latent,
                             std::uint32_t inner) {
    model::ModelConfig config;
    config.n_layers = 2;
    config.first_k_dense = 1;
    config.moe.n_experts = n_experts;
    config.moe.top_k = top_k;
    config.moe.latent_size = latent;
    config.moe.moe_intermediate_size = inner;
    config.situ_beta = 4.0F;
    config.situ_linear_beta = 25.0F;
    return config;
}

/// Records held in memory, [n_experts] for layer 1.
class RamStore final : public ExpertStore {
  public:
    explicit RamStore(std::vector<std::vector<std::byte>> records) : records_(std::move(records)) {}
    std::uint64_t record_bytes() const noexcept override { return records_[0].size(); }
    /// As a direct read would leave it: at any byte of the slot's first block.
    Result<std::span<const std::byte>> read(ExpertKey key, std::span<std::byte> slot) override {
        const auto record = slot.subspan(key.expert * 7 + 1, record_bytes());
        std::copy(records_[key.expert].begin(), records_[key.expert].end(), record.begin());
        return std::span<const std::byte>(record);
    }
    StoreCounts counts() const noexcept override { return {}; }

  private:
    std::vector<std::vector<std::byte>> records_;
};

/// Codes at random under scales of about 2^-6.
RamStore random_store(const model::ModelConfig& config, unsigned seed) {
    const ExpertRecord layout(config);
    std::mt19937 random(seed);
    std::vector<std::vector<std::byte>> records(config.moe.n_experts);
    for (auto& record : records) {
        record.resize(layout.bytes());
        for (std::size_t part = 0; part < ExpertRecord::kParts; ++part)
            for (std::uint64_t i = 0; i < layout.part_bytes(part); ++i)
                record[layout.offset(part) + i] =
                    static_cast<std::byte>(part % 2 == 0 ? random() % 256 : 119 + random() % 4);
    }
    return RamStore(std::move(records));
}

std::vector<float> random_rows(std::size_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> rows(n);
    for (float& value : rows) value = normal(random);
    return rows;
}

/// top_k different experts for each row, in order of rank.
std::vector<msg::Pick> random_picks(const model::ModelConfig& config, std::uint32_t n_rows,
                                    unsigned seed) {
    std::mt19937 random(seed);
    std::vector<msg::Pick> picks;
    std::vector<std::uint32_t> experts(config.moe.n_experts);
    for (std::uint32_t row = 0; row < n_rows; ++row) {
        for (std::uint32_t i = 0; i < experts.size(); ++i) experts[i] = i;
        std::shuffle(experts.begin(), experts.end(), random);
        for (std::uint32_t rank = 0; rank < config.moe.top_k; ++rank)
            picks.push_back(
                {row, experts[rank], 0.01F + static_cast<float>(random() % 1000) * 0.0005F, rank});
    }
    return picks;
}

/// An executor with all its parts; cache_slots 0: room for everything.
struct Rig {
    model::ModelConfig config;
    model::Placement held;
    std::unique_ptr<ExpertCache> cache;
    std::unique_ptr<Executor> executor;
    std::unique_ptr<PickGroups> groups;

    Rig(const model::ModelConfig& of, ExpertStore& store, std::size_t cache_slots = 0,
        const char* share = "all")
        : config(of), held(model::parse_share(share, of).value()) {
        ExpertCache::Options options;
        options.n_held = held.count();
        options.budget_bytes =
            (cache_slots == 0 ? options.n_held : cache_slots) * store.slot_bytes();
        options.n_layers = config.n_layers;
        options.n_experts = config.moe.n_experts;
        options.top_k = config.moe.top_k;
        auto made = ExpertCache::create(options, store);
        REQUIRE(made.has_value());
        cache = std::move(made).value();
        executor = std::make_unique<Executor>(config, kernels::kernels(), *cache);
        groups = std::make_unique<PickGroups>(
            PickGroups::Limits{config.moe.n_experts, config.moe.top_k, 512}, held, "experts");
    }

    Result<std::vector<std::int64_t>> run(std::uint32_t layer, std::span<const float> rows,
                                          const std::vector<msg::Pick>& picks) {
        std::vector<std::int64_t> sums(rows.size(), 77);  // whatever was there before
        RETURN_IF_ERROR(groups->group(layer, rows.size() / config.moe.latent_size, picks));
        Executor::Times times;
        RETURN_IF_ERROR(
            executor->run(layer, rows, picks, *groups, Deadline::after_ms(20'000), sums, times));
        return sums;
    }
};

std::vector<float> to_floats(const std::vector<std::int64_t>& sums) {
    std::vector<float> out(sums.size());
    kernels::kernels().fixed_to_float(sums.data(), sums.size(), out.data());
    return out;
}

std::vector<std::byte> bytes_of(const test::Array& array) {
    std::vector<std::byte> out(array.bytes.size());
    std::memcpy(out.data(), array.bytes.data(), out.size());
    return out;
}

/// Sums of a whole call and of the same call cut into single rows, shuffled.
void check_grouping(Rig& rig, std::uint32_t layer, std::uint32_t n_rows, unsigned seed) {
    const std::size_t latent = rig.config.moe.latent_size;
    const std::vector<float> rows = random_rows(n_rows * latent, seed);
    std::vector<msg::Pick> picks = random_picks(rig.config, n_rows, seed);
    const auto whole = rig.run(layer, rows, picks);
    REQUIRE(whole.has_value());
    std::shuffle(picks.begin(), picks.end(), std::mt19937(seed));
    CHECK(*rig.run(layer, rows, picks) == *whole);
    for (std::uint32_t row = 0; row < n_rows; ++row) {
        std::vector<msg::Pick> own;
        for (msg::Pick pick : picks)
            if (pick.row == row) own.push_back({0, pick.expert, pick.weight, pick.rank});
        const auto alone = rig.run(layer, std::span(rows).subspan(row * latent, latent), own);
        REQUIRE(alone.has_value());
        REQUIRE(std::equal(alone->begin(), alone->end(), whole->begin() + row * latent));
    }
}

}  // namespace

TEST_CASE("the golden mixture of experts comes out") {
    for (const std::string name : {"moe", "moe_without_latent_norm"}) {
        CAPTURE(name);
        const model::ModelConfig config = config_of(6, 2, 64, 32);
        const ExpertRecord layout(config);
        std::vector<std::vector<std::byte>> records(6);
        for (const char* part :
             {"w1_packed", "w1_scale", "w2_packed", "w2_scale", "w3_packed", "w3_scale"}) {
            const auto bytes = bytes_of(test::load_npy("ops/" + name + "/" + part + ".npy"));
            const std::size_t each = bytes.size() / 6;
            for (std::size_t expert = 0; expert < 6; ++expert)
                records[expert].insert(
                    records[expert].end(),
                    bytes.begin() + static_cast<std::ptrdiff_t>(expert * each),
                    bytes.begin() + static_cast<std::ptrdiff_t>((expert + 1) * each));
        }
        REQUIRE(records[0].size() == layout.bytes());
        RamStore store(std::move(records));
        Rig rig(config, store);
        const std::vector<float> latent = test::load_npy("ops/" + name + "/latent.npy").as_f32();
        const auto ids = test::load_npy("ops/" + name + "/ids.npy").as_i64();
        const auto weights = test::load_npy("ops/" + name + "/weights.npy").as_f32();
        std::vector<msg::Pick> picks;
        for (std::uint32_t i = 0; i < ids.size(); ++i)
            picks.push_back({i / 2, static_cast<std::uint32_t>(ids[i]), weights[i], i % 2});
        const auto sums = rig.run(1, latent, picks);
        REQUIRE(sums.has_value());
        const auto aggregate = test::load_npy("ops/" + name + "/aggregate.npy").as_f64();
        CHECK(test::relative_error(to_floats(*sums), aggregate) <= 2e-5);
        // And each expert alone.
        const auto outputs = test::load_npy("ops/" + name + "/expert_outputs.npy").as_f64();
        for (std::uint32_t i = 0; i < picks.size(); ++i) {
            const auto one = rig.run(1, std::span(latent).subspan(picks[i].row * 64, 64),
                                     {{0, picks[i].expert, 1.0F, 0}});
            REQUIRE(one.has_value());
            CHECK(test::relative_error(to_floats(*one), std::span(outputs).subspan(i * 64, 64)) <=
                  2e-5);
        }
    }
}

TEST_CASE("a record's matrices are the golden MXFP4 matrices") {
    const model::ModelConfig config = config_of(1, 1, 96, 64);
    const ExpertRecord layout(config);
    const auto packed = bytes_of(test::load_npy("ops/mxfp4_small/packed.npy"));
    const auto scale = bytes_of(test::load_npy("ops/mxfp4_small/scale.npy"));
    const std::vector<float> x = test::load_npy("ops/mxfp4_small/x.npy").as_f32();
    const auto expected = test::load_npy("ops/mxfp4_small/y.npy").as_f64();
    for (std::size_t part : {0, 4}) {  // w1, then w3: [64, 96]
        std::vector<std::byte> record(layout.bytes());
        std::copy(packed.begin(), packed.end(),
                  record.begin() + static_cast<std::ptrdiff_t>(layout.offset(part)));
        std::copy(scale.begin(), scale.end(),
                  record.begin() + static_cast<std::ptrdiff_t>(layout.offset(part + 1)));
        const kernels::Matrix matrix = part == 0 ? layout.gate(record) : layout.up(record);
        std::vector<float> y(3 * 64);
        kernels::kernels().matmul(matrix, x.data(), 96, 3, y.data(), 64);
        CHECK(test::relative_error(y, expected) <= 1e-5);
        ExpertRecord::BadGroup bad;
        CHECK(!layout.find_bad_group(record, bad));
    }
}

TEST_CASE("the first corrupt group of a record is found by matrix, row and group") {
    const model::ModelConfig config = config_of(1, 1, 64, 32);
    const ExpertRecord layout(config);
    const auto packed = bytes_of(test::load_npy("ops/mxfp4_corrupt/packed.npy"));
    const auto scale = bytes_of(test::load_npy("ops/mxfp4_corrupt/scale.npy"));
    for (std::size_t part : {0, 4}) {  // 6 of the 32 rows of 64
        std::vector<std::byte> record(layout.bytes());
        std::copy(packed.begin(), packed.end(),
                  record.begin() + static_cast<std::ptrdiff_t>(layout.offset(part)));
        std::copy(scale.begin(), scale.end(),
                  record.begin() + static_cast<std::ptrdiff_t>(layout.offset(part + 1)));
        ExpertRecord::BadGroup bad;
        REQUIRE(layout.find_bad_group(record, bad));
        CHECK(bad.packed_part == part);
        CHECK(bad.row == 2);
        CHECK(bad.group == 1);
        CHECK(bad.scale == 255);
        CHECK(bad.scale_offset == 5);
    }
}

TEST_CASE("a row's bits do not depend on the call that carries it") {
    auto model = model::open_model(test::golden_dir() / "tiny-k3");
    REQUIRE(model.has_value());
    auto store = CheckpointStore::create(*model, *model::parse_share("all", model->config));
    REQUIRE(store.has_value());
    Rig everything(model->config, **store);
    check_grouping(everything, 7, 9, 1);
    Rig smallest(model->config, **store, 2);
    check_grouping(smallest, 7, 9, 1);
    // Blocks of rows: one expert for more rows than are computed together.
    const std::vector<float> rows = random_rows(200 * 64, 5);
    std::vector<msg::Pick> picks;
    for (std::uint32_t row = 0; row < 200; ++row) picks.push_back({row, 13, 0.5F, 0});
    const auto whole = everything.run(7, rows, picks);
    REQUIRE(whole.has_value());
    for (std::uint32_t row : {0U, 63U, 64U, 199U}) {
        const auto alone =
            everything.run(7, std::span(rows).subspan(row * 64, 64), {{0, 13, 0.5F, 0}});
        CHECK(std::equal(alone->begin(), alone->end(), whole->begin() + row * 64));
    }
}

TEST_CASE("1, 2, 3 and 5 servers add up to the same bits, with caches of any size") {
    auto model = model::open_model(test::golden_dir() / "tiny-k3");
    REQUIRE(model.has_value());
    const std::size_t latent = model->config.moe.latent_size;
    std::vector<std::int64_t> expected;
    for (std::uint32_t n_servers : {1U, 2U, 3U, 5U}) {
        for (std::size_t cache_slots : {0, 2, 7}) {
            CAPTURE(n_servers);
            CAPTURE(cache_slots);
            std::vector<std::unique_ptr<CheckpointStore>> stores;
            std::vector<std::unique_ptr<Rig>> rigs;
            for (std::uint32_t i = 0; i < n_servers; ++i) {
                const std::string share = std::to_string(i) + "/" + std::to_string(n_servers);
                auto held = model::parse_share(share, model->config);
                REQUIRE(held.has_value());
                stores.push_back(std::move(CheckpointStore::create(*model, *held)).value());
                rigs.push_back(std::make_unique<Rig>(model->config, *stores.back(), cache_slots,
                                                     share.c_str()));
            }
            std::vector<std::int64_t> all;
            for (std::uint32_t layer = 1; layer < 4; ++layer) {
                const std::vector<float> rows = random_rows(6 * latent, layer);
                const std::vector<msg::Pick> picks = random_picks(model->config, 6, layer);
                std::vector<std::int64_t> total(rows.size());
                for (auto& rig : rigs) {
                    std::vector<msg::Pick> own;
                    for (const msg::Pick& pick : picks)
                        if (rig->held.holds(layer, pick.expert)) own.push_back(pick);
                    const auto part = rig->run(layer, rows, own);
                    REQUIRE(part.has_value());
                    for (std::size_t i = 0; i < total.size(); ++i) total[i] += (*part)[i];
                }
                all.insert(all.end(), total.begin(), total.end());
            }
            if (expected.empty()) expected = all;
            CHECK(all == expected);
        }
    }
}

TEST_CASE("1, 2 and 4 threads give the same bits") {
    const model::ModelConfig config = config_of(4, 2, 512, 512);  // large enough to be split
    RamStore store = random_store(config, 3);
    Rig rig(config, store);
    const std::vector<float> rows = random_rows(std::size_t{70} * 512, 3);
    const std::vector<msg::Pick> picks = random_picks(config, 70, 3);
    std::vector<std::int64_t> expected;
    for (int threads : {1, 2, 4}) {
        kernels::set_threads(threads);
        const auto sums = rig.run(1, rows, picks);
        REQUIRE(sums.has_value());
        if (expected.empty()) expected = *sums;
        CHECK(*sums == expected);
    }
    kernels::set_threads(0);
}

TEST_CASE("a term beyond the fixed point is an error that names layer, expert and row") {
    const model::ModelConfig config = config_of(4, 2, 64, 64);
    RamStore store = random_store(config, 9);
    Rig rig(config, store);
    const std::vector<float> rows = random_rows(3 * 64, 9);
    std::vector<msg::Pick> picks{{0, 1, 0.5F, 0}, {1, 1, 3e9F, 0}, {2, 1, 3e9F, 0}};
    const auto sums = rig.run(1, rows, picks);
    REQUIRE(!sums.has_value());
    CHECK(sums.error().code == ErrorCode::corrupt);
    CHECK(sums.error().message.find("layer 1 expert 1 row 1") != std::string::npos);
    picks[1].weight = picks[2].weight = 0.5F;
    CHECK(rig.run(1, rows, picks).has_value());
}

TEST_CASE("picks that cannot be meant are refused by name") {
    const model::ModelConfig config = config_of(8, 3, 32, 32);
    RamStore store = random_store(config, 1);
    Rig rig(config, store, 0, "experts 0-5");
    const std::vector<float> rows = random_rows(2 * 32, 1);
    auto refused = [&](const std::vector<msg::Pick>& picks, ErrorCode code, const char* words) {
        const auto result = rig.run(1, rows, picks);
        REQUIRE(!result.has_value());
        CHECK(result.error().code == code);
        CAPTURE(result.error().message);
        CHECK(result.error().message.find(words) != std::string::npos);
    };
    const auto invalid = ErrorCode::invalid_argument;
    refused({{0, 0, 0.5F, 0}, {2, 1, 0.5F, 1}}, invalid, "pick 1 is for row 2");
    refused({{0, 8, 0.5F, 0}}, invalid, "experts 0 to 7");
    refused({{0, 6, 0.5F, 0}}, ErrorCode::not_found, "experts does not hold layer 1 expert 6");
    refused({{0, 1, std::numeric_limits<float>::quiet_NaN(), 0}}, invalid, "row 0 expert 1");
    refused({{0, 1, -std::numeric_limits<float>::infinity(), 0}}, invalid, "not finite");
    refused({{0, 1, 0.5F, 0}, {1, 1, 0.5F, 0}, {0, 1, 0.5F, 1}}, invalid, "expert 1 twice");
    refused({{0, 0, 1, 0}, {0, 1, 1, 1}, {0, 2, 1, 2}, {0, 3, 1, 3}}, invalid, "more than 3 picks");
    // The same picks without the fault work, and so does a call without any.
    CHECK(rig.run(1, rows, {{0, 0, 1, 0}, {0, 1, 1, 1}, {1, 1, 1, 4000000000U}}).has_value());
    CHECK(*rig.run(1, rows, {}) == std::vector<std::int64_t>(64, 0));
}

TEST_CASE("experts are used in order of their best rank over the rows") {
    const model::ModelConfig config = config_of(8, 3, 32, 32);
    const model::Placement held = model::parse_share("all", config).value();
    PickGroups groups({8, 3, 4}, held, "experts");
    const std::vector<msg::Pick> picks{{0, 5, 1, 2}, {1, 3, 1, 1}, {1, 5, 1, 0}, {2, 0, 1, 1}};
    REQUIRE(groups.group(1, 3, picks).has_value());
    REQUIRE(groups.uses().size() == 3);
    CHECK(groups.uses()[0].expert == 5);
    CHECK(groups.uses()[0].rank == 0);
    CHECK(groups.uses()[1].expert == 0);
    CHECK(groups.uses()[2].expert == 3);
    CHECK(groups.picks_of(0).size() == 2);
    CHECK(groups.picks_of(0)[1] == 2);
    CHECK(groups.picks_of(2)[0] == 1);
}
