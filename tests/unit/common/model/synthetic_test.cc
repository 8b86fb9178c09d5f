#include "common/model/synthetic.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>

#include <string>

#include "common/model/token_cost.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

namespace k3::model {

namespace fs = std::filesystem;

TEST_CASE("the standard synthetic checkpoint has released layers and 11.5 GB") {
    const auto plan = plan_synthetic({});
    REQUIRE(plan.has_value());
    CHECK(plan->config.hidden_size == 7168);
    CHECK(plan->config.n_layers == 5);
    CHECK(expert_bytes(plan->config) == 17'547'264);
    REQUIRE(plan->shards.size() == 6);
    CHECK(plan->shards[0].bytes == 2'341'213'184);  // as released: it has no experts
    CHECK(plan->bytes > 11'500'000'000);
    CHECK(plan->bytes < 11'600'000'000);
    CHECK(plan->bytes_per_token > 8'050'000'000);
    CHECK(plan->bytes_per_token < 8'150'000'000);
    const std::vector<LayerKind> kinds = {LayerKind::kda, LayerKind::kda, LayerKind::kda,
                                          LayerKind::mla, LayerKind::kda};
    CHECK(plan->config.layer_kinds == kinds);
}

TEST_CASE("all layers and experts add up to the released bytes") {
    const auto plan = plan_synthetic({93, 896, 163840, 1});
    REQUIRE(plan.has_value());
    CHECK(plan->bytes == 1'559'965'606'912);
    CHECK(plan->config.layer_kinds[92] == LayerKind::mla);
    CHECK(plan->shards[93].file == "model-00094-of-000094.safetensors");

    const TokenCost cost = token_cost(plan->config);
    CHECK(cost.expert_bytes == 25'829'572'608);
    // All layers, the head, the three vectors of the model, one row of the embedding.
    CHECK(cost.trunk_bytes == 108'811'877'376 + 2'348'810'240 + 3 * 14336 + 14336);
    CHECK(cost.head_flops == 2'348'810'240);
    CHECK(cost.row_flops + cost.head_flops > 208'300'000'000);  // twice the 104.19 G parameters
    CHECK(cost.row_flops + cost.head_flops < 208'400'000'000);
}

TEST_CASE("sizes outside the architecture are refused with the range") {
    for (const SyntheticOptions& options :
         {SyntheticOptions{3, 64, 4096, 1}, SyntheticOptions{5, 15, 4096, 1},
          SyntheticOptions{5, 897, 4096, 1}, SyntheticOptions{5, 64, 511, 1}}) {
        const auto plan = plan_synthetic(options);
        REQUIRE_FALSE(plan.has_value());
        CHECK(plan.error().code == ErrorCode::invalid_argument);
        CHECK(test::contains(plan.error().message, " to "));
    }
}

TEST_CASE("a disk that is too small is known before anything is written") {
    auto plan = plan_synthetic({});
    REQUIRE(plan.has_value());
    plan->bytes = std::uint64_t{1} << 62U;  // more than any disk has
    test::TempDir dir;
    const Status status =
        write_synthetic(*plan, dir.path() / "out", [](std::uint64_t, std::uint64_t) {
            FAIL("something was written");
            return true;
        });
    REQUIRE_FALSE(status.has_value());
    CHECK(status.error().code == ErrorCode::resource_exhausted);
    CHECK(test::contains(status.error().message, "4611686018427387904"));
    CHECK(fs::is_empty(dir.path()));
}

TEST_CASE("an interrupted write leaves nothing, an existing directory is not touched") {
    const auto plan = plan_synthetic({4, 16, 512, 1});
    REQUIRE(plan.has_value());
    test::TempDir dir;
    const Status stopped =
        write_synthetic(*plan, dir.path() / "out",
                        [](std::uint64_t done, std::uint64_t) { return done < 20'000'000; });
    REQUIRE_FALSE(stopped.has_value());
    CHECK(stopped.error().code == ErrorCode::cancelled);
    CHECK(fs::is_empty(dir.path()));

    fs::create_directory(dir.path() / "out");
    const Status refused = write_synthetic(*plan, dir.path() / "out",
                                           [](std::uint64_t, std::uint64_t) { return false; });
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::invalid_argument);
    CHECK(fs::is_empty(dir.path() / "out"));
}

TEST_CASE("the sparse checkpoint has the released files, sizes and tensors") {
    const auto plan = plan_synthetic(kReleasedSize);
    REQUIRE(plan.has_value());
    CHECK(plan->shards.size() == 96);
    CHECK(plan->n_tensors == 497'220);
    CHECK(plan->bytes == 1'560'860'324'864);  // total_size of the released index
    test::TempDir dir;
    const fs::path out = dir.path() / "out";
    const Status written =
        write_synthetic(*plan, out, [](std::uint64_t, std::uint64_t) { return true; });
    REQUIRE_MESSAGE(written.has_value(), written.error().sentence());

    // Spec section 2.1: the bytes of each file, header included.
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < 96; ++i) {
        const bool long_name = i >= 10;  // of the layer, one digit more in every tensor's name
        std::uint64_t bytes = long_name ? 16'990'916'912 : 16'990'911'504;
        if (i < 93 && plan->config.layer_kinds[i] == LayerKind::mla)
            bytes = long_name ? 16'567'507'176 : 16'567'501'776;
        if (i == 0) bytes = 2'341'216'112;
        if (i == 93) bytes = 4'697'664'072;
        if (i == 94) bytes = 92'289'328;
        if (i == 95) bytes = 802'448'352;
        CAPTURE(i);
        CHECK(fs::file_size(out / plan->shards[i].file) == bytes);
        sum += bytes;
    }
    CHECK(sum == 1'560'936'091'448);
}

TEST_CASE("a file system that cannot hold a sparse file is refused by name and size") {
    const auto plan = plan_synthetic({4, 16, 512, 1, true});
    REQUIRE(plan.has_value());
    test::TempDir dir;
    rlimit before = {};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    const auto handler = ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small = {1'000'000'000, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    const Status status = write_synthetic(*plan, dir.path() / "out",
                                          [](std::uint64_t, std::uint64_t) { return true; });
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    ::signal(SIGXFSZ, handler);
    REQUIRE_FALSE(status.has_value());
    CHECK(status.error().code == ErrorCode::resource_exhausted);
    CHECK(test::contains(status.error().message, "2341216112"));
    CHECK(test::contains(status.error().message, "model-00001-of-000007.safetensors"));
    CHECK(fs::is_empty(dir.path()));
}

}  // namespace k3::model
