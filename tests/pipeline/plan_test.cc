// `k3pipe plan` on a checkpoint of the released size, of which only the headers exist.

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <string>

#include "common/model/synthetic.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

double seconds_of(const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

/// The line of the table that begins with `name`, or "".
std::string row_of(const std::string& table, const std::string& name) {
    const std::size_t at = table.find("\n  " + name + "  ");
    return at == std::string::npos ? "" : table.substr(at + 1, table.find('\n', at + 1) - at - 1);
}

}  // namespace

// First in this file: the memory of all children so far is the memory of this one.
TEST_CASE("plan on the released size tells its exact bytes within a second and 200 MB") {
    World world;
    const auto full = model::plan_synthetic(model::kReleasedSize);
    REQUIRE(full.has_value());
    const Status written = model::write_synthetic(*full, world.path() / "full",
                                                  [](std::uint64_t, std::uint64_t) { return true; });
    REQUIRE_MESSAGE(written.has_value(), written.error().sentence());
    const std::string config =
        world.write("full.toml", "[pipeline]\nmodel = 'full'\n").string();
    const Ended plan = world.k3pipe({"plan", "-c", config});
    INFO(plan.err);
    INFO(plan.out);
    REQUIRE(plan.code == 0);

    rusage used = {};
    REQUIRE(::getrusage(RUSAGE_CHILDREN, &used) == 0);
    if (!kIsSanitized) {
        CHECK(used.ru_maxrss * 1024 < 200'000'000);
        // Processor time, because other processes may keep the disk and the processor busy; twice
        // what is wanted, because the neighbour of a busy core has half of it.
        CHECK(seconds_of(used.ru_utime) + seconds_of(used.ru_stime) < 2.0);
    }

    CHECK(has(plan.out, "complete: 497,052 tensors in 94 files"));  // without vision's 168 and 2
    struct Row {
        const char* name;
        std::vector<const char*> figures;
    };
    const Row rows[] = {
        {"one routed expert", {" 33,030,144 ", " 17,547,264 ", "16,515,072", "1,032,192"}},
        {"  w1 or w3", {" 5,849,088 ", "packed 5,505,024, scales 344,064"}},
        {"  w2", {" 5,849,088 ", "packed 5,505,024, scales 344,064"}},
        {"experts of one layer", {" 29,595,009,024 ", " 15,722,348,544"}},
        {"all 82,432 experts", {" 2,722,740,830,208 ", " 1,446,456,066,048"}},
        {"trunk run of layer 0", {" 2,341,213,184"}},
        {"  norms, attention residuals", {" 43,008 ", " 86,016"}},
        {"  dense FFN", {" 726,663,168 ", " 1,453,326,336"}},
        {"trunk run, KDA with experts", {" 1,267,744,256"}},
        {"  KDA attention", {" 443,740,416 ", " 887,800,832"}},
        {"  MoE without routed experts",
         {" 189,927,808 ", " 379,857,408 ", "shared 264,241,152", "router 12,848,640"}},
        {"trunk run, MLA with experts", {" 844,335,616"}},
        {"  MLA attention", {" 232,196,096 ", " 464,392,192"}},
        {"trunk", {" 54,394,816,256 ", " 108,811,877,376"}},
        {"  attention of 69 KDA layers", {" 61,258,257,408"}},
        {"  attention of 24 MLA layers", {" 11,145,412,608"}},
        {"  shared experts", {" 24,310,185,984"}},
        {"  latent projections", {" 9,454,620,672"}},
        {"  routers", {" 1,182,074,880"}},
        {"embedding", {" 1,174,405,120 ", " 2,348,810,240"}},
        {"output head", {" 1,174,405,120 ", " 2,348,810,240"}},
        {"both, and the model's vectors", {" 2,348,831,744 ", " 4,697,663,488"}},
        {"trunk and these", {" 56,743,648,000 ", " 113,509,540,864"}},
        {"text model", {" 2,779,484,478,208 ", " 1,559,965,606,912"}},
        {"1,472 picked experts", {" 25,829,572,608"}},
        {"read per token, at most", {" 104,189,614,848 ", " 136,990,260,224"}},
    };
    for (const Row& row : rows) {
        const std::string line = row_of(plan.out, row.name);
        CAPTURE(row.name);
        CAPTURE(line);
        for (const char* figure : row.figures) CHECK(has(line + " ", figure));
    }
}

TEST_CASE("plan refuses a checkpoint that lacks a tensor, and names it") {
    World world;
    auto small = model::plan_synthetic({4, 16, 512, 1, true});
    REQUIRE(small.has_value());
    REQUIRE(small->shards[2].tensors.back().name.ends_with("w3.weight_scale"));
    small->shards[2].tensors.pop_back();
    REQUIRE(model::write_synthetic(*small, world.path() / "small",
                                   [](std::uint64_t, std::uint64_t) { return true; })
                .has_value());
    const std::string config =
        world.write("small.toml", "[pipeline]\nmodel = 'small'\n").string();
    const Ended plan = world.k3pipe({"plan", "-c", config});
    CHECK(plan.code == 3);
    CHECK(has(plan.sentence(), "lacks 1 of"));
    CHECK(has(plan.sentence(), "layers.2.block_sparse_moe.experts.9.w3.weight_scale"));
}
