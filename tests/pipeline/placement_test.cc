// `k3pipe placement`, pipelines that use its file, and `k3pipe plan --simulate`.

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

/// Three expert servers of tiny-k3.
std::string write_config(const World& world, const std::string& extra = "",
                         const std::string& more = "") {
    return world
        .write("boxes.toml", "[pipeline]\nmodel = '" + (golden_dir() / "tiny-k3").string() + "'\n" +
                                 extra +
                                 "[[experts]]\nweight = 2\n[[experts]]\nweight = 1\n"
                                 "[[experts]]\nweight = 1\n" +
                                 more)
        .string();
}

/// Of layers 1 and 2 of tiny-k3, which has 24 experts and four picks.
std::string write_small_trace(const World& world) {
    return world
        .write("trace.csv",
               "position,layer,rank0,rank1,rank2,rank3\n0,1,0,1,2,3\n0,2,4,8,12,16\n1,1,0,1,2,5\n"
               "1,2,4,8,12,20\n")
        .string();
}

}  // namespace

TEST_CASE("a placement is shown, written, always the same, and used") {
    World world;
    const std::string config = write_config(world);
    const Ended shown = world.k3pipe({"placement", "-c", config});
    CHECK(shown.code == 0);
    for (const char* part : {"experts-0", "144", "50.0%", "25.0%", "288 experts, 1.00 holders"})
        CHECK_MESSAGE(has(shown.out, part), shown.out);

    const std::string first = (world.path() / "a").string();
    const std::string second = (world.path() / "b").string();
    const std::string trace = write_small_trace(world);
    for (const std::string& out : {first, second}) {
        const Ended made = world.k3pipe(
            {"placement", "-c", config, "--replicas", "2", "--trace", trace, "--out", out});
        CHECK_MESSAGE(made.code == 0, made.err);
        CHECK(has(made.out, "2.00 holders of each"));
        CHECK(has(made.out, "busiest server has 1.000 times the mean"));
    }
    CHECK(read_file(first) == read_file(second));

    const std::string using_it = write_config(world, "placement = 'a'\n");
    const Ended used = world.k3pipe({"placement", "-c", using_it});
    CHECK_MESSAGE(has(used.out, "2.00 holders of each"), used.err);
    const Ended plan = world.k3pipe({"plan", "-c", using_it});
    CHECK_MESSAGE(has(plan.out, "--share '@" + first + "#experts-1'"), (plan.out + plan.err));
}

TEST_CASE("a placement that cannot be meant is one sentence") {
    World world;
    const std::string config = write_config(world);
    const auto refusal = [&](std::vector<std::string> arguments, int code) {
        const Ended ended = world.k3pipe(std::move(arguments));
        CHECK(ended.code == code);
        return ended.sentence();
    };
    CHECK(has(refusal({"placement", "-c", config, "--replicas", "4"}, 2), "4 replicas"));
    CHECK(has(refusal({"placement", "-c", config, "--replicas", "2", "--replicated", "0.1"}, 2),
              "no trace"));
    CHECK(has(refusal({"placement", "-c", config, "--trace",
                       (golden_dir() / "routing-trace" / "decode_order.csv").string()},
                      2),
              "the trace uses expert"));
    CHECK(has(refusal({"placement", "-c", write_config(world, "", "[[experts]]\n")}, 2),
              "'experts-3' has no weight"));

    // Of a pipeline with fewer servers, and one that is damaged.
    const std::string made = (world.path() / "made").string();
    CHECK(world.k3pipe({"placement", "-c", write_config(world), "--out", made}).code == 0);
    const std::string plain = write_config(world);
    const std::string before = read_file(plain);
    CHECK(has(refusal({"placement", "-c", plain, "--out", plain}, 2), "not a placement"));
    CHECK(read_file(plain) == before);
    const std::string four = write_config(world, "placement = 'made'\n", "[[experts]]\n");
    CHECK(has(refusal({"plan", "-c", four}, 3), "has no server 'experts-3', but experts-0"));
    CHECK(has(refusal({"run", "-c", four, "--ids", "1"}, 3), "has no server 'experts-3'"));
    const std::string three = write_config(world, "placement = 'made'\n");
    CHECK(has(refusal({"placement", "-c", three, "--replicas", "2"}, 2), "shown as it is"));
    std::string text = read_file(made);
    text[text.size() / 2] = '?';
    world.write("made", text);
    CHECK(has(refusal({"plan", "-c", three}, 3), "is damaged or cut off"));
    std::filesystem::remove(made);
    CHECK(has(refusal({"plan", "-c", three}, 3), made));
}

TEST_CASE("plan replays a trace over the boxes that the file describes") {
    World world;
    const std::string config = write_config(
        world, "",
        "disk_rate = '1MB'\nlink_rate = '1MB'\nround_trip_us = 1000\ncache_bytes = 40000\n");
    const std::string trace = write_small_trace(world);
    const Ended plan = world.k3pipe({"plan", "-c", config, "--simulate", trace, "--disk-rate",
                                     "2MB", "--memory-rate", "1GB", "--boxes", "4"});
    CHECK_MESSAGE(plan.code == 0, plan.err);
    for (const char* part : {"2 tokens in 2 steps", "experts-2", "boxes like experts-0",
                             "2 replicas", "times the mean"})
        CHECK_MESSAGE(has(plan.out, part), plan.out);
    // Stages of other boxes count as well: their memories, and the links to trunk stages.
    const std::string far =
        world
            .write("far.toml",
                   "[pipeline]\nmodel = '" + (golden_dir() / "tiny-k3").string() +
                       "'\nssh = '/bin/true'\naddress = '10.0.0.1'\ninsecure = true\n"
                       "[experts]\nhost = 'far'\ncache_bytes = '100MB'\n[[trunk]]\n[[trunk]]\n"
                       "host = 'far'\nweights_bytes = '100MB'\n[hosts.far]\naddress = '10.0.0.2'\n"
                       "model = '/over/there'\n")
            .string();
    const Ended spread =
        world.k3pipe({"plan", "-c", far, "--simulate", trace, "--disk-rate", "2MB", "--memory-rate",
                      "1GB", "--link-rate", "1MB", "--round-trip-us", "1000"});
    CHECK_MESSAGE(spread.code == 0, spread.err);
    const auto line = [&spread](const std::string& begin) {
        const std::size_t at = spread.out.find("  " + begin);
        REQUIRE_MESSAGE(at != std::string::npos, spread.out);
        return spread.out.substr(at, spread.out.find('\n', at) - at);
    };
    CHECK(has(line("experts   "), "100.0%"));
    // Three vectors of 80 values come, 768 logits go: 4,032 bytes at 1 MB/s, and a round trip.
    for (const char* part : {" 960 ", " 3,072 ", " 0.0050"})
        CHECK(has(line("trunk-1 (layers 6-12)"), part));
    CHECK(has(line("trunk-0 (layers 0-5)"), " 0.0000"));
    CHECK(has(spread.out, "its links 0.005 s"));
    const Ended without = world.k3pipe({"plan", "-c", config, "--rows", "2"});
    CHECK(without.code == 2);
    CHECK(has(without.sentence(), "--rows has no effect without --simulate"));
    const Ended wrong = world.k3pipe(
        {"plan", "-c", write_config(world, "", "disk_rate = 'fast'\n"), "--simulate", trace});
    CHECK(wrong.code == 2);
    CHECK(has(wrong.sentence(), "disk_rate = 'fast' is no rate"));
}

TEST_CASE("the shipped files for several boxes can be planned as they stand") {
    World world;
    struct Shipped {
        const char* name;
        int n_servers;
        int n_stages;
    };
    for (const Shipped& shipped :
         {Shipped{"two-boxes.toml", 2, 1}, Shipped{"four-boxes.toml", 4, 4}}) {
        CAPTURE(shipped.name);
        std::string text = read_file(std::filesystem::path(std::getenv("K3_SOURCE_ROOT")) /
                                     "configs" / shipped.name);
        const auto put = [&text](const std::string& old, const std::string& now) {
            const std::size_t at = text.find(old);
            REQUIRE_MESSAGE(at != std::string::npos, old);
            text.replace(at, old.size(), now);
        };
        // What depends on this machine: where the model is, keys, an ssh client, names of boxes.
        put("\"models/demo-k3\"", "'" + demo_model_dir().string() + "'");
        put("[pipeline]\n",
            "[pipeline]\nssh = '/bin/true'\ninsecure = true\naddress = '10.0.10.1'\n");
        if (text.find("\n[hosts.laptop]\n") != std::string::npos)
            put("\n[hosts.laptop]\n", "\n[hosts.laptop]\naddress = '10.0.10.2'\n");
        const std::string file = world.write(shipped.name, text).string();
        const Ended plan = world.k3pipe({"plan", "-c", file});
        CHECK_MESSAGE(plan.code == 0, plan.err);
        const auto count = [&plan](const std::string& part) {
            int n = 0;
            for (std::size_t at = 0; (at = plan.out.find(part, at)) != std::string::npos; ++at) ++n;
            return n;
        };
        CHECK(count("\nk3-experts ") + count("/k3-experts ") == shipped.n_servers);
        CHECK(count("\nk3-trunk ") + count("/k3-trunk ") == shipped.n_stages);
    }
}
