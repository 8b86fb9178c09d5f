#include "tests/faults/refusal.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <sstream>

#include "tests/support/golden.h"

namespace k3::test {

namespace {

// A refusal comes within a second of what starting takes: measured 0.3 s, where a sound pipeline
// takes 0.5 s to answer. On a busy machine, or under a sanitizer, both take longer.
constexpr double kPromptSeconds = 1.0;
constexpr int kAttempts = 4;

/// How long a sound pipeline takes now from the command to its end.
double sound_seconds(const World& world) {
    const std::string model = (golden_dir() / "tiny-k3").string();
    const std::string file =
        world.write("sound.toml", "[pipeline]\nname = 'sound'\nmodel = '" + model + "'\n").string();
    Ended ended = world.k3pipe({"run", "--ids", "5", "--max-tokens", "1", "-c", file});
    CHECK_MESSAGE(ended.code == 0, ended.err);
    return ended.seconds;
}

/// Lines that hold every one of `parts`.
std::size_t count_lines(const std::string& text, const std::vector<std::string>& parts) {
    std::istringstream lines(text);
    std::size_t n = 0;
    for (std::string line; std::getline(lines, line);) {
        auto is_in_line = [&](const std::string& part) {
            return line.find(part) != std::string::npos;
        };
        if (std::all_of(parts.begin(), parts.end(), is_in_line)) ++n;
    }
    return n;
}

}  // namespace

std::string pipeline_of(const World& world, const std::filesystem::path& model,
                        const std::string& stages) {
    return world
        .write("p.toml", "[pipeline]\nname = 'p'\nmodel = '" + model.string() + "'\n" + stages)
        .string();
}

void check_refused_command(const World& world, const std::vector<std::string>& argv, int code,
                           const std::vector<std::string>& parts) {
    bool prompt = false;
    for (int i = 0; i < kAttempts && !prompt; ++i) {
        Ended ended = world.start_program(argv).wait();
        INFO(ended.err);
        CHECK(ended.code == code);
        CHECK(ended.out.empty());
        for (const std::string& part : parts) CHECK(has(ended.sentence(), part));
        CHECK(count_lines(ended.err, parts) == 1);  // said once, whoever else found it too
        CHECK(count_lines(ended.err, {}) <= 2);     // what is started, and the sentence
        prompt =
            ended.seconds < kPromptSeconds || ended.seconds < kPromptSeconds + sound_seconds(world);
    }
    CHECK_MESSAGE(prompt, "it is refused later than a second after a sound pipeline answers");
}

void check_refused(const World& world, const std::string& file, int code,
                   const std::vector<std::string>& parts, const std::vector<std::string>& wrap) {
    std::vector<std::string> argv = wrap;
    argv.insert(argv.end(), {built("launcher/k3pipe").string(), "run", "--ids", "5", "--max-tokens",
                             "1", "-c", file});
    check_refused_command(world, argv, code, parts);
}

}  // namespace k3::test
