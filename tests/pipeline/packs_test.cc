// Weights from packs instead of the checkpoint: the same bytes of logits, whatever is packed.

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/support/golden.h"
#include "tests/support/packs.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

/// Logits of every prompt position and of 24 tokens, of two prompts at a time.
std::vector<Answer> answers_of(const Pipeline& pipeline) {
    std::vector<msg::Submit> submits = {of_ids({5, 17, 300, 41, 9}, 24),
                                        of_ids({700, 2, 2, 8}, 24)};
    for (msg::Submit& submit : submits) {
        submit.ignore_eos = true;
        submit.want_logits = msg::WantLogits::all;
    }
    return ask_all(pipeline.gateway(), submits, submits.size());
}

const std::vector<Answer>& reference() {
    static const std::vector<Answer> answers = [] {
        World world;
        Pipeline pipeline(world, "plain", golden_dir() / "tiny-k3", "");
        return answers_of(pipeline);
    }();
    return answers;
}

std::string quoted(const std::filesystem::path& path) { return "'" + path.string() + "'\n"; }

}  // namespace

TEST_CASE("packed weights do not change a bit") {
    reference();
    World world;
    Packs packs(world);
    std::string stages;
    SUBCASE("one pack for the trunk, one for all experts") {
        stages = "[trunk]\npack = " + quoted(packs.trunk("all")) +
                 "[experts]\npack = " + quoted(packs.experts("all"));
    }
    SUBCASE("a pack for every stage and server, nothing of the checkpoint but its config") {
        const std::string model = "model = " + quoted(packs.config_only());
        stages = "[[trunk]]\nlayers = '0-4'\n" + model + "pack = " + quoted(packs.trunk("0-4")) +
                 "[[trunk]]\nlayers = '5-12'\n" + model + "pack = " + quoted(packs.trunk("5-12")) +
                 "[[experts]]\nshare = '0/2'\n" + model + "pack = " + quoted(packs.experts("0/2")) +
                 "[[experts]]\nshare = '1/2'\ncache_bytes = '64KiB'\ndirect = 'off'\n" + model +
                 "pack = " + quoted(packs.experts("1/2"));
    }
    SUBCASE("packs beside checkpoints, and packs of more than the stage needs") {
        stages = "[[trunk]]\nlayers = '0-7'\n[[trunk]]\nlayers = '8-12'\npack = " +
                 quoted(packs.trunk("all")) +
                 "[[experts]]\nshare = '0/2'\n[[experts]]\nshare = '1/2'\npack = " +
                 quoted(packs.experts("all"));
    }
    SUBCASE("a trunk that streams from its pack, in the smallest budget") {
        stages = "[trunk]\nweights_bytes = 571264\npack = " + quoted(packs.trunk("all"));
    }
    SUBCASE("the same with half of it kept, through the page cache, and nothing but a config") {
        stages = "[trunk]\nweights_bytes = '900KB'\ndirect_reads = 'off'\nthreads = 2\nmodel = " +
                 quoted(packs.config_only()) + "pack = " + quoted(packs.trunk("all"));
    }
    SUBCASE("two stages that stream, one from a pack, one from the checkpoint") {
        stages = "[[trunk]]\nlayers = '0-5'\nweights_bytes = '600KB'\npack = " +
                 quoted(packs.trunk("0-5")) +
                 "[[trunk]]\nlayers = '6-12'\nweights_bytes = '500KB'\n";
    }
    const auto parts = [&] {
        return "pack = ['" + packs.trunk_part("0/2").string() + "', '" +
               packs.trunk_part("1/2").string() + "']\n";
    };
    SUBCASE("a trunk that streams from a pack in two parts, with half of it kept") {
        stages = "[trunk]\nweights_bytes = '900KB'\n" + parts();
    }
    SUBCASE("two stages that read the same two parts, one into memory, one streaming") {
        stages = "[[trunk]]\nlayers = '0-6'\n" + parts() +
                 "[[trunk]]\nlayers = '7-12'\nweights_bytes = '500KB'\ndirect_reads = 'off'\n" +
                 parts();
    }
    Pipeline pipeline(world, "packed", golden_dir() / "tiny-k3", stages);
    const std::vector<Answer> answers = answers_of(pipeline);
    REQUIRE(answers.size() == reference().size());
    for (std::size_t i = 0; i < answers.size(); ++i) {
        REQUIRE_MESSAGE(!answers[i].error.has_value(), answers[i].error->sentence());
        CHECK(answers[i].ids == reference()[i].ids);
        CHECK(answers[i].ids.size() == 24);
        CHECK(answers[i].logits == reference()[i].logits);
        CHECK(!answers[i].logits.empty());
    }
}

TEST_CASE("a pack is found from the folder of the pipeline file") {
    World world;
    Packs packs(world);
    std::filesystem::copy_file(packs.experts("all"), world.path() / "experts.k3pack");
    {
        Pipeline pipeline(world, "relative", golden_dir() / "tiny-k3",
                          "[experts]\npack = 'experts.k3pack'\n");
        CHECK(answers_of(pipeline)[0].logits == reference()[0].logits);
    }
    std::filesystem::remove(world.path() / "experts.k3pack");
}
