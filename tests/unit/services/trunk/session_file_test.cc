// Saved sessions as files: the same bytes back, and refusals of everything that is not them.

#include "services/trunk/session_file.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "services/trunk/session_directory.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

using trunk::LayerRange;
using trunk::Session;
using trunk::SessionFile;
using trunk::SessionLayout;

constexpr LayerRange kRange{2, 6};
constexpr std::size_t kHeaderBytes = 96;

trunk::SessionOrigin origin_of(LayerRange range) {
    return {tiny_model().fingerprint, range, tiny_model().config.n_layers,
            tiny_model().config.mla.lora_norm_eps};
}

std::vector<std::uint32_t> ids_of(std::size_t n, std::uint32_t first = 7) {
    std::vector<std::uint32_t> ids(n);
    for (std::size_t i = 0; i < n; ++i) ids[i] = first + static_cast<std::uint32_t>(i);
    return ids;
}

/// A stage's layout, and sessions filled with bytes that tell layers and places apart.
struct Fixture {
    TempDir dir;
    std::filesystem::path path = dir.path() / "s";
    SessionLayout layout{tiny_model().config, kRange, 1};

    std::unique_ptr<Session> session(std::uint64_t max_positions) const {
        return Session::create(layout, 1, max_positions).value();
    }
    std::unique_ptr<Session> filled(std::uint64_t max_positions, std::uint64_t n, int seed) const {
        auto made = session(max_positions);
        for (std::uint32_t layer = kRange.first; layer < kRange.end(); ++layer) {
            const trunk::LayerState state = made->layer_state(layer, n);
            std::uint32_t at = layer * 131 + static_cast<std::uint32_t>(seed);
            for (const auto part : {state.first, state.second})
                for (std::byte& byte : part)
                    byte = static_cast<std::byte>(at++ * 2654435761U >> 24U);
        }
        made->set_position(n);
        return made;
    }
    void save(Session& session, std::uint32_t first_id = 7) const {
        const auto bytes = trunk::write_session_file(path, origin_of(kRange), layout,
                                                     ids_of(session.position(), first_id), session);
        REQUIRE_MESSAGE(bytes.has_value(), bytes.error().sentence());
        CHECK(*bytes == std::filesystem::file_size(path));
    }
    Result<SessionFile> open(const trunk::SessionOrigin& origin = origin_of(kRange)) const {
        return SessionFile::open(path, origin, layout, 4096);
    }
    bool same(Session& a, Session& b, std::uint64_t n) const {
        for (std::uint32_t layer = kRange.first; layer < kRange.end(); ++layer) {
            const trunk::LayerState x = a.layer_state(layer, n);
            const trunk::LayerState y = b.layer_state(layer, n);
            if (std::memcmp(x.first.data(), y.first.data(), x.first.size()) != 0) return false;
            if (!x.second.empty() &&
                std::memcmp(x.second.data(), y.second.data(), x.second.size()) != 0)
                return false;
        }
        return a.position() == b.position();
    }
    /// What a file with these bytes is refused with, at open or while it is read.
    Error refusal(const std::string& bytes) const {
        write_file(path, bytes);
        auto file = open();
        if (!file.has_value()) return file.error();
        auto target = session(100);
        const Status read = file->read_into(*target);
        REQUIRE_FALSE(read.has_value());
        CHECK(target->position() == 0);
        return read.error();
    }
};

/// The header with one field changed and its checksum made right again.
std::string with_field(std::string bytes, std::size_t offset, std::uint32_t value) {
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
    const std::uint64_t sum = XXH3_64bits(bytes.data(), kHeaderBytes - 8);
    std::memcpy(bytes.data() + kHeaderBytes - 8, &sum, sizeof(sum));
    return bytes;
}

}  // namespace

TEST_CASE("a session comes back bit for bit, into one of another size") {
    Fixture f;
    for (const std::uint64_t n : {std::uint64_t{1}, std::uint64_t{37}}) {
        auto source = f.filled(64, n, 1);
        f.save(*source);
        auto file = f.open();
        REQUIRE(file.has_value());
        CHECK(std::vector(file->ids().begin(), file->ids().end()) == ids_of(n));
        for (const std::uint64_t max_positions : {n, std::uint64_t{500}}) {
            auto target = f.session(max_positions);
            REQUIRE(file->read_into(*target).has_value());
            CHECK(f.same(*source, *target, n));
        }
    }
}

TEST_CASE("a flipped bit anywhere is found before the session is used") {
    Fixture f;
    f.save(*f.filled(16, 5, 2));
    const std::string good = read_file(f.path);
    std::size_t at = kHeaderBytes + 5 * 4 + 8;  // header, ids and their checksum
    std::vector<std::pair<std::size_t, std::string>> places = {{20, "header"},
                                                               {40, "header"},
                                                               {90, "header"},
                                                               {kHeaderBytes, "its ids"},
                                                               {at - 1, "its ids"}};
    for (std::uint32_t layer = kRange.first; layer < kRange.end(); ++layer) {
        places.emplace_back(at, "layer " + std::to_string(layer));
        at += f.layout.layer_bytes(layer, 5) + 8;
        places.emplace_back(at - 9, "layer " + std::to_string(layer));
        places.emplace_back(at - 1, "layer " + std::to_string(layer));
    }
    REQUIRE(at == good.size());
    for (const auto& [place, name] : places) {
        CAPTURE(place);
        std::string bad = good;
        bad[place] = static_cast<char>(bad[place] ^ 0x10);
        const Error error = f.refusal(bad);
        CHECK(error.code == ErrorCode::corrupt);
        CHECK_MESSAGE(contains(error.message, "the checksum of"), error.message);
        CHECK_MESSAGE(contains(error.message, name), error.message);
        CHECK(contains(error.message, f.path.string()));
    }
}

TEST_CASE("files that are cut, longer, something else or of another version are refused") {
    Fixture f;
    f.save(*f.filled(16, 5, 3));
    const std::string good = read_file(f.path);
    const std::string size = std::to_string(good.size());
    for (const std::size_t n : {good.size() - 1, good.size() / 2, kHeaderBytes}) {
        const Error error = f.refusal(good.substr(0, n));
        CHECK(error.code == ErrorCode::corrupt);
        CHECK(contains(error.message, "has " + std::to_string(n) + " bytes instead of " + size));
    }
    CHECK(contains(f.refusal(good + "x").message, "bytes instead of " + size));
    CHECK(contains(f.refusal("").message, "it has 0 bytes"));
    CHECK(contains(f.refusal(std::string(5000, 'a')).message, "is not a saved session"));
    const Error newer = f.refusal(with_field(good, 8, 2));
    CHECK(newer.code == ErrorCode::unsupported);
    CHECK(contains(newer.message, "version 2"));
    CHECK(contains(newer.message, "reads version 1"));
    // Sound checksums over impossible numbers.
    CHECK(contains(f.refusal(with_field(good, 24, 0)).message, "holds 0 positions"));
    CHECK(contains(f.refusal(with_field(good, 24, 4097)).message, "1 to 4096 are possible"));
    CHECK(contains(f.refusal(with_field(good, 24, 6)).message, "6 positions take"));
    CHECK(
        SessionFile::open(f.dir.path() / "none", origin_of(kRange), f.layout, 4096).error().code ==
        ErrorCode::not_found);
    CHECK(SessionFile::open(f.dir.path(), origin_of(kRange), f.layout, 4096).error().code ==
          ErrorCode::corrupt);
}

TEST_CASE("another checkpoint, other layers and another epsilon are refused with both sides") {
    Fixture f;
    f.save(*f.filled(16, 5, 4));
    trunk::SessionOrigin other = origin_of(kRange);
    other.fingerprint = "00112233445566778899aabbccddeeff";
    Error error = f.open(other).error();
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(contains(error.message, other.fingerprint));
    CHECK(contains(error.message, tiny_model().fingerprint));
    error = f.open(origin_of({2, 7})).error();
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(contains(error.message, "layers 2-7 of 13"));
    CHECK(contains(error.message, "layers 2-8 of 13"));
    other = origin_of(kRange);
    other.lora_norm_eps = 2.5e-6F;
    error = f.open(other).error();
    CHECK(error.code == ErrorCode::incompatible);
    CHECK(contains(error.message, "2.5e-06"));
}

TEST_CASE("a process killed 200 times while it saves leaves a whole session and, swept, no part") {
    Fixture f;
    auto a = f.filled(64, 20, 5);
    auto b = f.filled(64, 40, 6);
    auto target = f.session(64);
    f.save(*a);
    const auto n_parts = [&f] {
        int n = 0;
        for (const auto& entry : std::filesystem::directory_iterator(f.dir.path()))
            n += entry.path().filename() != "s" ? 1 : 0;
        return n;
    };
    int n_caught = 0;
    int n_of_b = 0;
    for (int lap = 0; lap < 200; ++lap) {
        const pid_t pid = ::fork();
        if (pid == 0) {
            for (;;)
                for (Session* session : {b.get(), a.get()})
                    if (!trunk::write_session_file(f.path, origin_of(kRange), f.layout,
                                                   ids_of(session->position()), *session)
                             .has_value())
                        ::_exit(1);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(500 + 137 * lap % 4000));
        ::kill(pid, SIGKILL);
        int status = 0;
        REQUIRE(::waitpid(pid, &status, 0) == pid);
        REQUIRE(WIFSIGNALED(status));
        auto file = f.open();
        REQUIRE_MESSAGE(file.has_value(), file.error().sentence());
        REQUIRE(file->read_into(*target).has_value());
        const bool is_b = target->position() == 40;
        REQUIRE(f.same(*target, is_b ? *b : *a, is_b ? 40 : 20));
        n_of_b += is_b ? 1 : 0;
        n_caught += n_parts() > 0 ? 1 : 0;
        // What a stage does when it starts.
        const trunk::SessionDirectory next({f.dir.path(), 0}, origin_of(kRange), f.layout, 4096);
        REQUIRE(n_parts() == 0);
    }
    CHECK(n_caught > 0);  // some were indeed in the middle
    CHECK(n_of_b > 0);
}

TEST_CASE("what a start sweeps is parts of sessions of processes that are gone, and nothing else") {
    Fixture f;
    f.save(*f.filled(64, 20, 5));
    const std::string whole = read_file(f.path);
    const pid_t gone = ::fork();
    if (gone == 0) ::_exit(0);
    REQUIRE(::waitpid(gone, nullptr, 0) == gone);
    const std::string dead = std::to_string(gone);
    const std::string living = std::to_string(::getppid());
    for (const std::string& name : {".a." + dead + ".partial", ".a." + living + ".partial",
                                    ".a.layers-2-7." + dead + ".partial", "a." + dead + ".partial",
                                    ".a." + dead + ".part", std::string(".a.x.partial")})
        write_file(f.dir.path() / name, whole.substr(0, 200));
    write_file(f.dir.path() / (".empty." + dead + ".partial"), "");
    write_file(f.dir.path() / (".other." + dead + ".partial"), "something else entirely");
    const trunk::SessionDirectory next({f.dir.path(), 0}, origin_of(kRange), f.layout, 4096);
    std::vector<std::string> left;
    for (const auto& entry : std::filesystem::directory_iterator(f.dir.path()))
        left.push_back(entry.path().filename().string());
    std::sort(left.begin(), left.end());
    std::vector<std::string> expected = {".a." + dead + ".part",   ".a." + living + ".partial",
                                         ".a.x.partial",           ".other." + dead + ".partial",
                                         "a." + dead + ".partial", "s"};
    std::sort(expected.begin(), expected.end());
    CHECK(left == expected);
}

TEST_CASE("work on a file that is given up leaves the old file and no part") {
    Fixture f;
    f.save(*f.filled(64, 20, 5));
    auto b = f.filled(64, 40, 6);
    int n_asked = 0;
    const auto after = [&n_asked](int n) { return [&n_asked, n] { return ++n_asked > n; }; };
    const auto written =
        trunk::write_session_file(f.path, origin_of(kRange), f.layout, ids_of(40), *b, after(3));
    REQUIRE_FALSE(written.has_value());
    CHECK(written.error().code == ErrorCode::cancelled);
    CHECK(std::distance(std::filesystem::directory_iterator(f.dir.path()), {}) == 1);
    n_asked = 0;
    auto target = f.session(64);
    auto file = f.open();
    REQUIRE(file.has_value());
    CHECK(file->read_into(*target, after(2)).error().code == ErrorCode::cancelled);
    CHECK(target->position() == 0);
    REQUIRE(file->read_into(*target).has_value());
    CHECK(target->position() == 20);
}

}  // namespace k3::test
