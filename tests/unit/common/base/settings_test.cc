// Settings: flags, the TOML file, which of both counts, and refusals.

#include "common/base/settings.h"

#include <doctest/doctest.h>

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/checkpoint_copy.h"

namespace k3 {
namespace {

/// A program with one setting of each kind.
struct Program {
    std::string listen;
    std::string payload = "shm";
    std::int64_t threads = 2;
    std::uint64_t cache_bytes = 1024;
    double scale = 0.5;
    bool insecure = false;
    std::vector<std::string> experts = {"default"};
    std::string note = "none";

    Result<Settings::Action> parse(std::vector<std::string> arguments, bool require_listen = true) {
        Settings settings("k3-test", "A program to test settings with.");
        settings.add_text("listen", &listen, "endpoint to listen on", require_listen);
        settings.add_choice("payload", &payload, {"shm", "inline"}, "how tensors travel");
        settings.add_integer("threads", &threads, 1, 64, "compute threads");
        settings.add_bytes("cache_bytes", &cache_bytes, "memory of the cache");
        settings.add_number("scale", &scale, -1, 1, "a number");
        settings.add_flag("insecure", &insecure, "no keys");
        settings.add_list("experts", &experts, "endpoints of expert servers");
        settings.add_text("note", &note, "anything");
        arguments.insert(arguments.begin(), "k3-test");
        std::vector<const char*> argv;
        for (const std::string& argument : arguments) argv.push_back(argument.c_str());
        return settings.parse(static_cast<int>(argv.size()), argv.data());
    }
    /// With `file` as the settings file.
    Result<Settings::Action> parse_file(const std::string& file,
                                        std::vector<std::string> arguments = {}) {
        test::TempDir dir;
        test::write_file(dir.path() / "test.toml", file);
        arguments.insert(arguments.end(), {"--config", (dir.path() / "test.toml").string()});
        return parse(std::move(arguments));
    }
};

void check_runs(const Result<Settings::Action>& result) {
    if (!result) FAIL(result.error().sentence());
    CHECK(*result == Settings::Action::run);
}

void check_refused(const Result<Settings::Action>& result, const std::vector<std::string>& parts) {
    if (result.has_value()) FAIL("was accepted");
    const std::string sentence = result.error().sentence();
    CAPTURE(sentence);
    CHECK(result.error().code == ErrorCode::invalid_argument);
    CHECK(exit_code(result.error().code) == kExitUsage);
    CHECK(!result.error().remedy.empty());
    CHECK(sentence.find('\n') == std::string::npos);
    for (const std::string& part : parts) {
        CAPTURE(part);
        CHECK(sentence.find(part) != std::string::npos);
    }
}

/// Replaces the buffer of a standard stream while it lives.
class Redirect {
  public:
    Redirect(std::ios& stream, std::streambuf* buffer)
        : stream_(stream), old_(stream.rdbuf(buffer)) {}
    ~Redirect() { stream_.rdbuf(old_); }
    Redirect(const Redirect&) = delete;
    Redirect& operator=(const Redirect&) = delete;

  private:
    std::ios& stream_;
    std::streambuf* old_;
};

TEST_CASE("every kind of setting is taken from a flag") {
    Program p;
    check_runs(
        p.parse({"--listen", "ipc:///tmp/x", "--payload", "inline", "--threads=7", "--cache-bytes",
                 "1.5GiB", "--scale", "-0.25", "--insecure", "--experts", "a", "--experts", "b"}));
    CHECK(p.listen == "ipc:///tmp/x");
    CHECK(p.payload == "inline");
    CHECK(p.threads == 7);
    CHECK(p.cache_bytes == 1610612736);
    CHECK(p.scale == -0.25);
    CHECK(p.insecure);
    CHECK(p.experts == std::vector<std::string>{"a", "b"});
    CHECK(p.note == "none");
}

TEST_CASE("what is not given keeps its default") {
    Program p;
    check_runs(p.parse({"--listen", "x"}));
    CHECK(p.payload == "shm");
    CHECK(p.threads == 2);
    CHECK(p.cache_bytes == 1024);
    CHECK(p.scale == 0.5);
    CHECK(!p.insecure);
    CHECK(p.experts == std::vector<std::string>{"default"});
}

TEST_CASE("every kind of setting is taken from the file") {
    Program p;
    check_runs(
        p.parse_file("listen = 'ipc:///tmp/x'  # a comment\n"
                     "payload = 'inline'\nthreads = 7\ncache_bytes = '64KiB'\n"
                     "scale = -0.25\ninsecure = true\nexperts = ['a', 'b']\n"));
    CHECK(p.listen == "ipc:///tmp/x");
    CHECK(p.payload == "inline");
    CHECK(p.threads == 7);
    CHECK(p.cache_bytes == 65536);
    CHECK(p.scale == -0.25);
    CHECK(p.insecure);
    CHECK(p.experts == std::vector<std::string>{"a", "b"});
    Program q;
    check_runs(q.parse_file("listen = 'x'\ncache_bytes = 9007199254740993\nexperts = 'a'"));
    CHECK(q.cache_bytes == 9007199254740993);
    CHECK(q.experts == std::vector<std::string>{"a"});
}

TEST_CASE("a flag beats the file, which beats the default") {
    Program p;
    check_runs(p.parse_file("listen = 'file'\nthreads = 7\nexperts = ['a', 'b']\ninsecure = true",
                            {"--threads", "3", "--experts", "c", "--insecure=false"}));
    CHECK(p.listen == "file");
    CHECK(p.threads == 3);
    CHECK(p.experts == std::vector<std::string>{"c"});
    CHECK(!p.insecure);
}

TEST_CASE("a minus reads the file from standard input") {
    std::istringstream input("listen = 'from stdin'\nthreads = 5\n");
    Redirect redirect(std::cin, input.rdbuf());
    Program p;
    check_runs(p.parse({"--config", "-"}));
    CHECK(p.listen == "from stdin");
    CHECK(p.threads == 5);
}

TEST_CASE("a required setting that is missing is asked for by name") {
    Program p;
    check_refused(p.parse({"--threads", "3"}),
                  {"k3-test: --listen is required: endpoint to listen on", "k3-test --help"});
    check_refused(p.parse_file("threads = 3"), {"--listen is required"});
    check_runs(p.parse({}, false));
}

TEST_CASE("an unknown name is refused with the nearest known one") {
    Program p;
    check_refused(p.parse({"--listen", "x", "--theads", "3"}),
                  {"k3-test: unknown setting --theads", "did you mean --threads?"});
    check_refused(p.parse({"--listen", "x", "--cache_bytes", "3"}),
                  {"did you mean --cache-bytes?"});
    check_refused(p.parse({"--listen", "x", "--conifg=y"}),
                  {"unknown setting --conifg", "did you mean --config?"});
    check_refused(p.parse({"--listen", "x", "--zzzzzzzz"}), {"--zzzzzzzz", "see k3-test --help"});
    check_refused(p.parse({"--listen", "x", "leftover"}), {"unexpected argument 'leftover'"});
    check_refused(p.parse_file("listen = 'x'\ncache_byts = 3"),
                  {"unknown setting cache_byts in ", "test.toml", "did you mean cache_bytes?"});
}

TEST_CASE("a value that does not parse or is out of range is refused with the range") {
    Program p;
    for (const char* bad : {"0", "65", "-1", "3x", "3.5", " ", "99999999999999999999"})
        check_refused(p.parse({"--listen", "x", std::string("--threads=") + bad}),
                      {"--threads: '" + std::string(bad) + "' is not a whole number from 1 to 64"});
    for (const char* bad : {"1.5", "-1.01", "nan", "inf", "x"})
        check_refused(p.parse({"--listen", "x", "--scale", bad}),
                      {"--scale: '" + std::string(bad) + "' is not a number from -1 to 1"});
    check_refused(p.parse({"--listen", "x", "--payload", "tcp"}),
                  {"--payload: 'tcp' is not one of shm|inline"});
    check_refused(p.parse({"--listen", "x", "--cache-bytes", "3 potatoes"}),
                  {"--cache-bytes: '3 potatoes' is not a size", "KiB, MiB, GiB"});
    check_refused(p.parse_file("listen = 'x'\nthreads = 100"),
                  {"threads in ", "test.toml: '100' is not a whole number from 1 to 64"});
    check_refused(p.parse_file("listen = 'x'\nthreads = 2.0"), {"'2.0' is not a whole number"});
    check_refused(p.parse_file("listen = 'x'\ninsecure = 'yes'"), {"'yes' is neither true nor"});
}

TEST_CASE("a flag without its value is refused") {
    Program p;
    check_refused(p.parse({"--listen"}), {"--listen"});
    check_refused(p.parse({"--listen", "x", "--threads="}), {"--threads"});
    check_refused(p.parse({"--listen", "--threads", "3"}),
                  {"--listen needs a value, but --threads follows"});
    check_refused(p.parse({"--listen", "x", "--threads", "1", "--threads", "2"}), {"--threads"});
}

TEST_CASE("a settings file that is none is refused with its name and line") {
    Program p;
    check_refused(p.parse({"--config", "/nonexistent/x.toml"}),
                  {"k3-test: cannot read settings file /nonexistent/x.toml", "--config"});
    check_refused(p.parse({"--config", "/"}), {"cannot read settings file /;"});
    check_refused(p.parse_file("listen = 'x'\nthreads = = 3"), {"test.toml:2: "});
    check_refused(p.parse_file("listen = 'x'\nlisten = 'y'"), {"test.toml:2: "});
    check_refused(p.parse_file("listen = ['x']"), {"listen in ", "is a list"});
    check_refused(p.parse_file("[listen]\nx = 1"), {"listen in ", "is a table"});
    check_refused(p.parse_file("listen = 'x'\nexperts = [['a']]"),
                  {"experts in ", "list of lists"});
    check_refused(p.parse_file("[service]\nlisten = 'x'"), {"unknown setting service in "});
}

TEST_CASE("help lists every setting with its default, and nothing else happens") {
    std::ostringstream output;
    Redirect redirect(std::cout, output.rdbuf());
    Program p;
    auto result = p.parse({"--help", "--threads", "3"});
    REQUIRE(result.has_value());
    CHECK(*result == Settings::Action::exit);
    CHECK(p.threads == 2);
    const std::string text = output.str();
    CAPTURE(text);
    for (const char* part :
         {"A program to test settings with.", "--listen", "(required)", "--payload", "shm|inline",
          "--threads", "[2]", "--cache-bytes", "[1 KiB]", "--insecure", "--experts", "--config"})
        CHECK(text.find(part) != std::string::npos);
}

TEST_CASE("version prints the version of the build") {
    std::ostringstream output;
    Redirect redirect(std::cout, output.rdbuf());
    auto result = Program().parse({"--version"});
    REQUIRE(result.has_value());
    CHECK(*result == Settings::Action::exit);
    CHECK(output.str() == std::string(version()) + "\n");
    CHECK(version().find('.') != std::string_view::npos);
}

TEST_CASE("sizes are parsed exactly") {
    const std::pair<const char*, std::uint64_t> good[] = {
        {"0", 0},
        {"123", 123},
        {"123B", 123},
        {"64KiB", 65536},
        {"64 KiB", 65536},
        {"1.5GiB", 1610612736},
        {".5KiB", 512},
        {"20GB", 20'000'000'000},
        {"1kB", 1000},
        {"1KB", 1000},
        {"3TB", 3'000'000'000'000},
        {"2TiB", 2'199'023'255'552},
        {"9007199254740993", 9007199254740993},
        {"18446744073709551615", 18446744073709551615ULL},
    };
    for (const auto& [good_text, bytes] : good) {
        const char* text = good_text;  // clang 14 captures no bindings
        CAPTURE(text);
        auto parsed = parse_bytes(text);
        REQUIRE(parsed.has_value());
        CHECK(*parsed == bytes);
    }
    for (const char* bad :
         {"", " ", "B", "KiB", "-1", "+1", "1.5.5", "1e3", "0x10", "nan", "inf", "1kib", "1 Ki B",
          "1K", "18446744073709551616", "99999999999TiB", "1KiB ", " 1"}) {
        CAPTURE(bad);
        auto parsed = parse_bytes(bad);
        REQUIRE(!parsed);
        CHECK(parsed.error().code == ErrorCode::invalid_argument);
        CHECK(parsed.error().message == "'" + std::string(bad) + "' is not a size");
    }
}

TEST_CASE("sizes are printed short") {
    CHECK(format_bytes(0) == "0 B");
    CHECK(format_bytes(1023) == "1023 B");
    CHECK(format_bytes(1024) == "1 KiB");
    CHECK(format_bytes(1610612736) == "1.5 GiB");
    CHECK(format_bytes(17'547'264) == "16.73 MiB");
    CHECK(format_bytes(std::uint64_t{100} << 20) == "100 MiB");
    CHECK(format_bytes(1'560'860'324'864) == "1.42 TiB");
}

TEST_CASE("the nearest name is near enough or none") {
    const std::vector<std::string> names = {"threads", "listen", "cache_bytes", "name"};
    CHECK(nearest_name("theads", names) == "threads");
    CHECK(nearest_name("lisen", names) == "listen");
    CHECK(nearest_name("nmae", names) == "name");
    CHECK(nearest_name("naem", names) == "name");
    CHECK(nearest_name("rnu", std::vector<std::string>{"run", "up"}) == "run");
    CHECK(nearest_name("cachebytes", names) == "cache_bytes");
    CHECK(nearest_name("qqqqqq", names).empty());
    CHECK(nearest_name("na", names).empty());  // half of so short a word is one edit
    CHECK(nearest_name("", names).empty());
    CHECK(nearest_name("x", {}).empty());
}

}  // namespace
}  // namespace k3
