// Stages on cores of their own, and cores that they cannot have.

#include "common/base/cores.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;

namespace {

/// Where the threads of a process may run, each answer once: "0-7,16".
std::set<std::string> cores_of_threads(pid_t pid) {
    std::set<std::string> cores;
    const auto tasks = std::filesystem::path("/proc") / std::to_string(pid) / "task";
    for (const auto& task : std::filesystem::directory_iterator(tasks)) {
        std::ifstream status(task.path() / "status");
        const std::string key = "Cpus_allowed_list:\t";
        for (std::string line; std::getline(status, line);)
            if (line.starts_with(key)) cores.insert(line.substr(key.size()));
    }
    return cores;
}

}  // namespace

TEST_CASE("all threads of a stage keep to its cores") {
    World world;
    const CoreSet allowed = machine_cores().allowed;
    const std::string first = format_cores({allowed.front()});
    const std::string last = format_cores({allowed.back()});
    Pipeline pipeline(world, "cores", demo_model_dir(),
                      "[experts]\ncores = " + first + "\n[trunk]\ncores = '" + last +
                          "'\n[gateway]\ncores = '" + first + "'\n");
    CHECK(!pipeline.ask(of_text("The capital of France is", 4)).error.has_value());
    using Once = std::set<std::string>;
    CHECK(cores_of_threads(pipeline.stage("experts").pid) == Once{first});
    CHECK(cores_of_threads(pipeline.stage("trunk").pid) == Once{last});
    CHECK(cores_of_threads(pipeline.stage("gateway").pid) == Once{first});
    CHECK(cores_of_threads(pipeline.stage("sampler").pid) == Once{format_cores(allowed)});
}

TEST_CASE("cores that are not to be had end the start with one sentence") {
    World world;
    const std::string head =
        "[pipeline]\nmodel = '" + demo_model_dir().string() + "'\n[trunk]\ncores = ";
    struct Case {
        const char* cores;
        const char* part;
    };
    for (const Case& c :
         {Case{"'0-'", "cores '0-' is not a list of cores: '0-' is neither"},
          Case{"8191", "cores '8191' names core 8191, and the last one of this machine is"}}) {
        CAPTURE(c.cores);
        const auto file = world.write("cores.toml", head + c.cores + "\n");
        for (const char* verb : {"plan", "up"}) {
            CAPTURE(verb);
            const Ended ended = world.k3pipe({verb, "-c", file.string()});
            CHECK(ended.code == kExitUsage);
            CHECK(has(ended.sentence(), "cores.toml:3: "));
            CHECK(has(ended.sentence(), c.part));
        }
    }
}
