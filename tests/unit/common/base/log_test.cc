// Log lines. The output is a descriptor's, so it is caught by putting a pipe in the place of
// stderr.

#include "common/base/log.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <regex>
#include <string>

namespace k3 {
namespace {

/// What `write` puts on stderr, up to a pipe's 64 KiB.
template <typename Write>
std::string caught(Write write) {
    std::array<int, 2> ends{};
    REQUIRE(::pipe(ends.data()) == 0);
    int saved = ::dup(STDERR_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[1]);
    write();
    ::dup2(saved, STDERR_FILENO);  // closes the last writing end
    ::close(saved);
    std::string text;
    std::array<char, 4096> buffer{};
    for (ssize_t n = 0; (n = ::read(ends[0], buffer.data(), buffer.size())) > 0;)
        text.append(buffer.data(), static_cast<std::size_t>(n));
    ::close(ends[0]);
    return text;
}

TEST_CASE("a line has time, level, service, run and text") {
    std::string text = caught([] {
        log::init("trunk", "7f3a", log::Level::info);
        log::info("ready layers=0-8 bytes=3841200");
    });
    CAPTURE(text);
    CHECK(std::regex_match(
        text, std::regex("\\d{4}-\\d\\d-\\d\\d \\d\\d:\\d\\d:\\d\\d\\.\\d{3} info trunk run=7f3a "
                         "ready layers=0-8 bytes=3841200\n")));
}

TEST_CASE("levels below the chosen one are silent") {
    std::string text = caught([] {
        log::init("trunk", "", log::Level::warn);
        log::debug("one");
        log::info("two");
        log::warn("three");
        log::error("four");
    });
    CAPTURE(text);
    CHECK(text.find("one") == std::string::npos);
    CHECK(text.find("two") == std::string::npos);
    CHECK(text.find(" warning trunk three\n") != std::string::npos);
    CHECK(text.find(" error trunk four\n") != std::string::npos);
    CHECK(text.find("run=") == std::string::npos);
}

TEST_CASE("braces, percent signs and line breaks in a text stay one plain line") {
    std::string text = caught([] {
        log::init("trunk", "100%l", log::Level::info);
        log::info("{} %v\nforged line\x1b[2J");
    });
    CAPTURE(text);
    CHECK(text.ends_with(" info trunk run=100%l {} %v forged line [2J\n"));
}

}  // namespace
}  // namespace k3
