#include "tests/faults/refusal.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <sstream>

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

void check_refused_command(const World& world, const std::vector<std::string>& argv, int code,
                           const std::vector<std::string>& parts) {
    double fastest = 1e9;
    for (int i = 0; i < kAttempts && fastest > kPromptSeconds; ++i) {
        Ended ended = world.start_program(argv).wait();
        fastest = std::min(fastest, ended.seconds);
        INFO(ended.err);
        CHECK(ended.code == code);
        CHECK(ended.out.empty());
        for (const std::string& part : parts) CHECK(has(ended.sentence(), part));
        // Said once: what comes before is only how it began, and how far a busy machine had come.
        std::istringstream lines(ended.err);
        int n_lines = 0;
        for (std::string line; std::getline(lines, line);) n_lines += has(line, " loads: ") ? 0 : 1;
        CHECK(n_lines <= 2);
    }
    CHECK(fastest <= kPromptSeconds);
}

void check_refused(const World& world, const std::string& file, int code,
                   const std::vector<std::string>& parts, const std::vector<std::string>& wrap) {
    std::vector<std::string> argv = wrap;
    argv.insert(argv.end(), {built("launcher/k3pipe").string(), "run", "--ids", "5", "--max-tokens",
                             "1", "-c", file});
    check_refused_command(world, argv, code, parts);
}

}  // namespace k3::test
