// A second turn from a saved session: the bytes of one uninterrupted run, through real pipelines.

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
using nlohmann::json;

namespace {

constexpr std::uint32_t kFirst = 12;   // tokens of the first answer
constexpr std::uint32_t kSecond = 16;  // of the second

msg::Submit request(std::vector<std::uint32_t> ids, std::uint32_t max_tokens) {
    msg::Submit submit = of_ids(std::move(ids), max_tokens);
    submit.ignore_eos = true;
    submit.want_logits = msg::WantLogits::all;
    return submit;
}

/// The prompt of a second turn: everything of the first, and more.
std::vector<std::uint32_t> next_prompt(const Answer& first) {
    std::vector<std::uint32_t> ids = first.prompt_ids;
    ids.insert(ids.end(), first.ids.begin(), first.ids.end());
    ids.insert(ids.end(), {40, 77, 300, 12, 5});
    return ids;
}

std::string pipeline_tables(const std::filesystem::path& sessions, const std::string& trunk,
                            const std::string& others) {
    return others + "[trunk]\nsession_dir = '" + sessions.string() + "'\n" + trunk;
}

/// The last `n` bytes.
std::string tail(const std::string& bytes, std::size_t n) { return bytes.substr(bytes.size() - n); }

json finished_line(const std::string& out) {
    std::size_t at = out.rfind("{\"", out.size());
    at = out.rfind('\n', out.size() - 2);
    return json::parse(out.substr(at == std::string::npos ? 0 : at + 1));
}

/// Removes a file at the end of a scope.
struct Removal {
    std::filesystem::path path;
    ~Removal() { std::filesystem::remove(path); }
};

}  // namespace

TEST_CASE("a second turn after a load has the bytes of one uninterrupted run") {
    std::filesystem::path model = golden_dir() / "tiny-k3";
    std::string first_trunk = "threads = 1\n";
    std::string second_trunk = "threads = 2\n";
    std::string others;
    SUBCASE("tiny-k3, another number of threads, and servers that differ") {
        others = "[experts]\ncount = 2\n";
    }
    SUBCASE("tiny-k3, two trunk stages, inline") {
        first_trunk += "count = 2\npayload = 'inline'\n";
        second_trunk += "count = 2\n";
    }
    SUBCASE("the demo model") { model = demo_model_dir(); }

    TempDir sessions;
    Answer uninterrupted;
    Answer first;
    const std::vector<std::uint32_t> prompt = {5, 17, 31, 201, 9, 44, 300, 8, 120, 61};
    {
        World world;
        Pipeline pipeline(world, "first", model,
                          pipeline_tables(sessions.path(), first_trunk, others));
        msg::Submit submit = request(prompt, kFirst);
        submit.save_session = "turn";
        first = pipeline.ask(submit);
        REQUIRE_MESSAGE(!first.error.has_value(), first.error->sentence());
        REQUIRE(first.saved.has_value());
        REQUIRE_FALSE(first.saved->failure.has_value());
        CHECK(first.saved->n_ids == prompt.size() + kFirst - 1);
        std::uint64_t bytes = 0;
        for (const auto& entry : std::filesystem::directory_iterator(sessions.path()))
            bytes += entry.file_size();
        CHECK(first.saved->bytes == bytes);
        uninterrupted = pipeline.ask(request(next_prompt(first), kSecond));
        REQUIRE_MESSAGE(!uninterrupted.error.has_value(), uninterrupted.error->sentence());
    }
    World world;
    Pipeline pipeline(world, "second", model, pipeline_tables(sessions.path(), second_trunk, ""));
    const std::vector<std::uint32_t> prompt2 = next_prompt(first);
    msg::Submit submit = request(prompt2, kSecond);
    submit.load_session = "turn";
    submit.save_session = "turn-2";
    const std::uint64_t rows = pipeline.counter("step_rows");
    const Answer second = pipeline.ask(submit);
    REQUIRE_MESSAGE(!second.error.has_value(), second.error->sentence());
    const std::uint32_t n_saved = first.saved->n_ids;
    REQUIRE(second.loaded.has_value());
    CHECK(*second.loaded == msg::SessionLoaded{n_saved, n_saved, n_saved});
    CHECK(pipeline.counter("step_rows") - rows == prompt2.size() - n_saved + kSecond - 1);
    CHECK(second.ids == uninterrupted.ids);
    CHECK(second.text == uninterrupted.text);
    // Logits of the prompt positions that were computed, and of every token.
    const std::size_t row_bytes = uninterrupted.logits.size() / (prompt2.size() + kSecond);
    REQUIRE(second.logits.size() == (prompt2.size() - n_saved + kSecond) * row_bytes);
    CHECK(second.logits == tail(uninterrupted.logits, second.logits.size()));
    // And a third turn from the second's session, next to one that cannot use it.
    msg::Submit third = request(next_prompt(second), 4);
    const Answer plain = pipeline.ask(third);
    third.load_session = "turn-2";
    const Answer again = pipeline.ask(third);
    REQUIRE(again.loaded.has_value());
    CHECK(again.loaded->n_reused == prompt2.size() + kSecond - 1);
    CHECK(again.ids == plain.ids);
    CHECK(again.logits == tail(plain.logits, again.logits.size()));
    msg::Submit unrelated = request({1, 2, 3}, 4);
    const Answer fresh = pipeline.ask(unrelated);
    unrelated.load_session = "turn-2";
    const Answer unused = pipeline.ask(unrelated);
    REQUIRE(unused.loaded.has_value());
    CHECK(unused.loaded->n_reused == 0);
    CHECK(unused.logits == fresh.logits);
}

TEST_CASE("the command line saves a session in a file and goes on from it") {
    World world;
    const std::string file = (world.path() / "capitals").string();
    const std::string question = "The capital of France is";
    const Ended saved = world.k3pipe(
        {"run", "-p", question, "--max-tokens", "1", "--save-session", file, "--json"});
    INFO(saved.err);
    REQUIRE(saved.code == 0);
    CHECK(has(saved.out, "\"event\":\"session_saved\""));
    CHECK(has(saved.err, "session 'capitals' saved:"));
    CHECK(std::filesystem::exists(file));
    const std::vector<std::string> ask = {"run",    "-p",           question + " Paris. France is",
                                          "--json", "--max-tokens", "8"};
    std::vector<std::string> go_on = ask;
    go_on.insert(go_on.end(), {"--session", file});
    const Ended plain = world.k3pipe(ask);
    const Ended loaded = world.k3pipe(go_on);
    INFO(loaded.err);
    REQUIRE(loaded.code == 0);
    REQUIRE(plain.code == 0);
    CHECK(has(loaded.out, "\"event\":\"session_loaded\""));
    CHECK(has(loaded.err, "session 'capitals' has "));
    CHECK(finished_line(loaded.out)["ids"] == finished_line(plain.out)["ids"]);
    CHECK(finished_line(loaded.out)["text"] == finished_line(plain.out)["text"]);

    const Ended absent = world.k3pipe({"run", "-p", "x", "--session", file + "2"});
    CHECK(absent.code == 2);
    CHECK(has(absent.sentence(), file + "2 does not exist"));
    const Ended no_folder = world.k3pipe({"run", "-p", "x", "--save-session", file + "/a/b"});
    CHECK(no_folder.code == 2);
    CHECK(has(no_folder.sentence(), "there is no folder"));
    const Ended path = world.k3pipe({"run", "-p", "x", "--attach", "--session", file});
    CHECK(path.code == 2);
    CHECK(has(path.sentence(), "give a name without slashes: capitals"));
}

TEST_CASE("a disk that is full loses the session and nothing else") {
    World world;
    TempDir sessions;
    // No file may grow beyond a few pages: the session's needs more. Without segments, which are
    // files too.
    Pipeline pipeline(world, "full", golden_dir() / "tiny-k3",
                      "[trunk]\nsession_dir = '" + sessions.path().string() +
                          "'\nwrap = 'prlimit --fsize=20000'\nfast_lane = 'off'\n",
                      "payload = 'inline'\n");
    msg::Submit submit = request({5, 17, 31}, 6);
    const Answer plain = pipeline.ask(submit);
    REQUIRE_MESSAGE(!plain.error.has_value(), plain.error->sentence());
    submit.save_session = "s";
    const Answer answer = pipeline.ask(submit);
    REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
    CHECK(answer.logits == plain.logits);
    REQUIRE(answer.saved.has_value());
    REQUIRE(answer.saved->failure.has_value());
    CHECK(answer.saved->failure->error.code == ErrorCode::resource_exhausted);
    CHECK(has(answer.saved->failure->error.message, "bytes are left to write"));
    CHECK(std::filesystem::is_empty(sessions.path()));
    // On the command line the answer is printed, and the end is not a success.
    const Ended run = world.k3pipe({"run", "--attach", "full", "--ids", "5,17,31", "--max-tokens",
                                    "6", "--ignore-eos", "--save-session", "s"});
    CHECK(run.code == 4);
    CHECK(has(run.sentence(), "no room for"));
    CHECK(run.out == plain.text);
    CHECK(pipeline.ask(request({5, 17, 31}, 6)).logits == plain.logits);
}

TEST_CASE("a damaged session fails the request that names it, and no other") {
    World world;
    TempDir sessions;
    Pipeline pipeline(world, "damaged", golden_dir() / "tiny-k3",
                      "[trunk]\nsession_dir = '" + sessions.path().string() + "'\n");
    msg::Submit submit = request({5, 17, 31}, 6);
    submit.save_session = "s";
    const Answer first = pipeline.ask(submit);
    REQUIRE_FALSE(first.error.has_value());
    std::string bytes = read_file(sessions.path() / "s");
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
    write_file(sessions.path() / "s", bytes);
    msg::Submit next = request(next_prompt(first), 4);
    const Answer plain = pipeline.ask(next);
    next.load_session = "s";
    const Answer refused = pipeline.ask(next);
    REQUIRE(refused.error.has_value());
    CHECK(refused.error->code == ErrorCode::corrupt);
    CHECK(has(refused.error->message, (sessions.path() / "s").string()));
    CHECK(refused.ids.empty());
    next.load_session.clear();
    CHECK(pipeline.ask(next).logits == plain.logits);
}

TEST_CASE("while a session is saved or loaded other requests are served") {
    World world;
    TempDir sessions;
    const std::filesystem::path sync_gate = world.path() / "sync-gate";
    const std::filesystem::path read_gate = world.path() / "read-gate";
    // The address sanitizer wants to be the first library; the slow one does no harm before it.
    const std::string slow_disk =
        "env = { LD_PRELOAD = '" + built("tests/support/libk3_slow_disk.so").string() +
        "', K3_SYNC_GATE = '" + sync_gate.string() + "', K3_READ_GATE = '" + read_gate.string() +
        "', K3_SLOW_FILES = '" + sessions.path().string() +
        "', ASAN_OPTIONS = 'verify_asan_link_order=0' }\n";
    Pipeline pipeline(world, "gated", golden_dir() / "tiny-k3",
                      pipeline_tables(sessions.path(), "count = 2\n" + slow_disk, ""));
    const msg::Submit other = request({9, 8, 7}, 5);
    const Answer expected = pipeline.ask(other);
    REQUIRE_MESSAGE(!expected.error.has_value(), expected.error->sentence());

    const auto beside = [&](const msg::Submit& submit, const std::filesystem::path& gate) {
        write_file(gate, "");
        auto gated = std::async(std::launch::async, [&] { return pipeline.ask(submit); });
        const Removal open_at_end{gate};
        for (int i = 0; i < 3; ++i) {
            const Answer served = pipeline.ask(other);
            REQUIRE_MESSAGE(!served.error.has_value(), served.error->sentence());
            CHECK(served.logits == expected.logits);
        }
        CHECK(gated.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
        std::filesystem::remove(gate);
        return gated.get();
    };
    msg::Submit first = request({5, 17, 31}, 6);
    const Answer plain = pipeline.ask(first);
    first.save_session = "s";
    const Answer saved = beside(first, sync_gate);
    REQUIRE_MESSAGE(!saved.error.has_value(), saved.error->sentence());
    CHECK(saved.logits == plain.logits);
    REQUIRE(saved.saved.has_value());
    CHECK_FALSE(saved.saved->failure.has_value());

    msg::Submit second = request(next_prompt(saved), 4);
    const Answer straight = pipeline.ask(second);
    second.load_session = "s";
    const Answer loaded = beside(second, read_gate);
    REQUIRE_MESSAGE(!loaded.error.has_value(), loaded.error->sentence());
    REQUIRE(loaded.loaded.has_value());
    CHECK(loaded.loaded->n_reused == saved.saved->n_ids);
    CHECK(loaded.logits == tail(straight.logits, loaded.logits.size()));
}

TEST_CASE("files of two stages that were not saved together are refused, or stand for the same") {
    World world;
    TempDir sessions;
    Pipeline pipeline(world, "mixed", golden_dir() / "tiny-k3",
                      pipeline_tables(sessions.path(), "count = 2\n", ""));
    const auto save = [&](std::vector<std::uint32_t> ids, std::uint32_t n, const char* name) {
        msg::Submit submit = request(std::move(ids), n);
        submit.save_session = name;
        return pipeline.ask(submit);
    };
    const std::vector<std::uint32_t> prompt = {5, 17, 31, 201};
    const Answer first = save(prompt, 2, "a");
    const Answer longer = save(prompt, 3, "b");
    const Answer another = save({5, 17, 31, 77}, 2, "c");
    save(prompt, 2, "d");
    std::filesystem::path later;  // the part of the second stage
    for (const auto& entry : std::filesystem::directory_iterator(sessions.path()))
        later = std::max(later, entry.path().filename());
    const std::string layers = later.string().substr(1);
    msg::Submit next = request(next_prompt(first), 4);
    const Answer plain = pipeline.ask(next);
    next.load_session = "a";
    for (const std::string other : {"b", "c"}) {
        CAPTURE(other);
        std::filesystem::copy_file(sessions.path() / (other + layers),
                                   sessions.path() / ("a" + layers),
                                   std::filesystem::copy_options::overwrite_existing);
        const Answer refused = pipeline.ask(next);
        REQUIRE(refused.error.has_value());
        CHECK(refused.error->code == ErrorCode::incompatible);
        CHECK(has(refused.error->message, "the files of session 'a' do not belong together"));
    }
    // The same ids are the same state, whenever it was saved.
    std::filesystem::copy_file(sessions.path() / ("d" + layers), sessions.path() / ("a" + layers),
                               std::filesystem::copy_options::overwrite_existing);
    const Answer same = pipeline.ask(next);
    REQUIRE_MESSAGE(!same.error.has_value(), same.error->sentence());
    CHECK(same.logits == tail(plain.logits, same.logits.size()));
}

TEST_CASE("MLA latents in bf16: a choice that is told, and exact by itself") {
    World world;
    TempDir sessions;
    const std::string bf16 =
        "[trunk]\nmla_cache = 'bf16'\nsession_dir = '" + sessions.path().string() + "'\n";
    const msg::Submit submit = request({5, 17, 31, 201, 9, 44, 300, 8, 120, 61}, 8);
    Answer exact;
    Answer one;
    {
        Pipeline pipeline(world, "fp32", golden_dir() / "tiny-k3", "");
        exact = pipeline.ask(submit);
    }
    {
        Pipeline pipeline(world, "one", golden_dir() / "tiny-k3", bf16 + "threads = 1\n");
        msg::Submit saving = submit;
        saving.save_session = "s";
        one = pipeline.ask(saving);
        REQUIRE_MESSAGE(!one.error.has_value(), one.error->sentence());
        CHECK(one.logits != exact.logits);
        const Ended run =
            world.k3pipe({"run", "--attach", "one", "--ids", "1,2", "--max-tokens", "1"});
        CHECK(run.code == 0);
        CHECK(has(run.err, "keeps MLA latents in bf16"));
    }
    {
        Pipeline pipeline(world, "two", golden_dir() / "tiny-k3",
                          bf16 + "count = 2\nthreads = 2\n");
        CHECK(pipeline.ask(submit).logits == one.logits);
    }
    {
        Pipeline pipeline(world, "other", golden_dir() / "tiny-k3",
                          "[trunk]\nsession_dir = '" + sessions.path().string() + "'\n");
        msg::Submit next = request(next_prompt(one), 1);
        next.load_session = "s";
        const Answer refused = pipeline.ask(next);
        REQUIRE(refused.error.has_value());
        CHECK(refused.error->code == ErrorCode::incompatible);
        CHECK(has(refused.error->message, "with MLA latents in bf16"));
    }
    const std::filesystem::path mixed =
        world.write("mixed.toml", "[pipeline]\nmodel = '" + (golden_dir() / "tiny-k3").string() +
                                      "'\n[[trunk]]\nlayers = '0-5'\n[[trunk]]\nlayers = '6-12'\n"
                                      "mla_cache = 'bf16'\n");
    const Ended refused = world.k3pipe({"run", "-c", mixed.string(), "-p", "x"});
    CHECK(refused.code == 3);
    CHECK(has(refused.sentence(), "keeps MLA latents in fp32 and"));
}

TEST_CASE("a place for sessions that is no directory is refused before anything is loaded") {
    World world;
    const std::filesystem::path file = world.write("notes.txt", "mine");
    const std::filesystem::path config =
        world.write("p.toml", "[pipeline]\nmodel = '" + (golden_dir() / "tiny-k3").string() +
                                  "'\n[trunk]\nsession_dir = 'notes.txt'\n");
    const Ended refused = world.k3pipe({"run", "-c", config.string(), "--ids", "1"});
    CHECK(refused.code == 2);
    CHECK(has(refused.sentence(), file.string() + " is to keep sessions and is not a directory"));
    CHECK(read_file(file) == "mine");
}
