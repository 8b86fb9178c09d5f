#include "tests/faults/refusal.h"

#include <doctest/doctest.h>

#include <algorithm>

namespace k3::test {

namespace {

// What may be known at the start is refused within a second, beside the start itself (measured:
// 0.3 s). A busy machine is slower now and then, so the fastest of several attempts counts.
constexpr double kPromptSeconds = 1.8;
constexpr int kAttempts = 8;

}  // namespace

std::string pipeline_of(const World& world, const std::filesystem::path& model,
                        const std::string& stages) {
    return world
        .write("p.toml", "[pipeline]\nname = 'p'\nmodel = '" + model.string() + "'\n" + stages)
        .string();
}

void check_refused(const World& world, const std::string& file, int code,
                   const std::vector<std::string>& parts, const std::vector<std::string>& wrap) {
    std::vector<std::string> argv = wrap;
    for (const std::string& word :
         {built("launcher/k3pipe").string(), std::string("run"), std::string("--ids"),
          std::string("5"), std::string("--max-tokens"), std::string("1"), std::string("-c"), file})
        argv.push_back(word);
    double fastest = 1e9;
    for (int i = 0; i < kAttempts && fastest > kPromptSeconds; ++i) {
        Ended ended = world.start_program(argv).wait();
        fastest = std::min(fastest, ended.seconds);
        INFO(ended.err);
        CHECK(ended.code == code);
        CHECK(ended.out.empty());
        for (const std::string& part : parts) {
            CAPTURE(part);
            CHECK(has(ended.sentence(), part));
        }
        // Said once: what comes before is only that it started.
        CHECK(std::count(ended.err.begin(), ended.err.end(), '\n') <= 2);
    }
    CHECK(fastest <= kPromptSeconds);
}

}  // namespace k3::test
