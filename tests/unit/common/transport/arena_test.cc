#include "common/transport/arena.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "common/base/deadline.h"
#include "common/transport/arena_layout.h"
#include "common/transport/exit_files.h"

using namespace k3;
using namespace k3::transport;

namespace {

/// A name that no other test run uses.
std::string own_name(const std::string& what) { return segment_name(0x7E57, what); }

std::unique_ptr<Arena> make_arena(const std::string& name, std::size_t slot_bytes = 4096,
                                  std::uint32_t n_slots = 4) {
    Result<std::unique_ptr<Arena>> arena = Arena::create({name, slot_bytes, n_slots});
    REQUIRE_MESSAGE(arena.has_value(), (arena.has_value() ? "" : arena.error().message));
    return std::move(arena).value();
}

msg::Bytes pattern(std::size_t n, unsigned seed) {
    msg::Bytes bytes(n);
    for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>(i * 31 + seed);
    return bytes;
}

bool exists(const std::string& name) { return ::access(segment_path(name).c_str(), F_OK) == 0; }

template <typename T>
void poke(const std::string& name, std::size_t offset, T value) {
    Fd fd(::shm_open(name.c_str(), O_RDWR, 0));
    REQUIRE(::pwrite(fd.get(), &value, sizeof(value), static_cast<off_t>(offset)) ==
            ssize_t{sizeof(value)});
}

ErrorCode code_of(const Result<msg::Bytes>& result) {
    REQUIRE_FALSE(result.has_value());
    return result.error().code;
}

/// A child that makes an arena, says so through a pipe, and waits to be killed.
class ArenaOwner {
  public:
    explicit ArenaOwner(const std::string& what) {
        std::array<int, 2> ends{};
        REQUIRE(::pipe(ends.data()) == 0);
        pid_ = ::fork();
        if (pid_ == 0) {
            auto arena = Arena::create({own_name(what), 4096, 1});
            char name[256] = {};
            if (arena.has_value()) (*arena)->probe().segment.copy(name, 255);
            ssize_t n = ::write(ends[1], name, sizeof(name));
            while (n > 0) ::pause();  // NOLINT(bugprone-infinite-loop): until it is killed
            ::_exit(1);
        }
        ::close(ends[1]);
        char name[256] = {};
        REQUIRE(::read(ends[0], name, sizeof(name)) == ssize_t{sizeof(name)});
        ::close(ends[0]);
        segment_ = name;
        REQUIRE(exists(segment_));
    }
    ~ArenaOwner() { kill(); }

    const std::string& segment() const { return segment_; }
    /// Dead, but not reaped yet.
    void make_zombie() {
        ::kill(pid_, SIGKILL);
        siginfo_t info{};
        ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
    }
    void kill() {
        if (pid_ <= 0) return;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
        pid_ = -1;
    }

  private:
    pid_t pid_ = -1;
    std::string segment_;
};

/// True if it is gone after a sweep. By whose does not matter: pipelines of other tests sweep too.
bool sweeps(const std::string& name) {
    sweep_dead_segments();
    return !exists(name);
}

}  // namespace

TEST_CASE("a reader gets the bytes that were written, whatever their number") {
    auto arena = make_arena(own_name("bytes"), 20000);
    CHECK(arena->slot_bytes() == 20480);
    ArenaReader reader;
    REQUIRE(reader.can_read(arena->probe()));
    for (std::size_t n : {0, 1, 7, 8, 4095, 4096, 14336, 20480}) {
        msg::Bytes bytes = pattern(n, 3);
        Result<msg::ShmPayload> place = arena->write(bytes);
        REQUIRE(place.has_value());
        CHECK(place->bytes == n);
        Result<msg::Bytes> read = reader.read(*place);
        REQUIRE_MESSAGE(read.has_value(), (read.has_value() ? "" : read.error().message));
        CHECK(*read == bytes);
    }
}

TEST_CASE("more than a slot holds is refused with both numbers") {
    auto arena = make_arena(own_name("large"));
    Result<msg::ShmPayload> place = arena->write(pattern(4097, 0));
    REQUIRE_FALSE(place.has_value());
    CHECK(place.error().code == ErrorCode::resource_exhausted);
    CHECK(place.error().message.find("4097") != std::string::npos);
    CHECK(place.error().message.find("4096") != std::string::npos);
}

TEST_CASE("a tensor lives until as many further ones were written as there are slots") {
    auto arena = make_arena(own_name("turn"));
    ArenaReader reader;
    std::vector<msg::ShmPayload> places;
    for (unsigned i = 0; i < 5; ++i) places.push_back(*arena->write(pattern(64, i)));
    Result<msg::Bytes> lost = reader.read(places[0]);
    CHECK(code_of(lost) == ErrorCode::stale);
    CHECK(lost.error().message.find(std::to_string(places[0].generation)) != std::string::npos);
    for (unsigned i = 1; i < 5; ++i) CHECK(*reader.read(places[i]) == pattern(64, i));
}

TEST_CASE("a slot that is being written is stale, and so is a generation of the future") {
    auto arena = make_arena(own_name("odd"), 4096, 1);
    ArenaReader reader;
    msg::ShmPayload place = *arena->write(pattern(64, 1));
    msg::ShmPayload future = place;
    future.generation += 2;
    CHECK(code_of(reader.read(future)) == ErrorCode::stale);
    poke(place.segment, kArenaPage, place.generation + 1);
    CHECK(code_of(reader.read(place)) == ErrorCode::stale);
}

TEST_CASE("a reader racing the writer sees whole tensors or none") {
    // One slot of 64 KiB is rewritten all the time; every byte of a tensor is the same.
    auto arena = make_arena(own_name("race"), 65536, 1);
    ArenaReader reader;
    std::atomic<std::uint64_t> generation{0};
    std::atomic<unsigned> n_reads{0};
    std::atomic<bool> stop{false};
    const msg::ShmPayload first = *arena->write(msg::Bytes(65536));
    generation.store(first.generation);
    std::thread writer([&] {
        for (unsigned value = 1; !stop.load(); ++value) {
            msg::Bytes bytes(65536, static_cast<std::byte>(value));
            generation.store(arena->write(bytes)->generation);
            // Now and then until a read that began in this pause has ended: that one is whole,
            // whoever gets the CPU.
            if (value % 64 != 0) continue;
            const unsigned seen = n_reads.load();
            while (n_reads.load() < seen + 2 && !stop.load()) std::this_thread::yield();
        }
    });
    unsigned whole = 0;
    unsigned stale = 0;
    // How many are stale depends on the scheduler, so they are waited for only so long.
    const Deadline deadline = Deadline::after_ms(5000);
    while (whole < 100 || (stale < 1 && !deadline.expired())) {
        msg::ShmPayload place = first;
        place.generation = generation.load();
        Result<msg::Bytes> read = reader.read(place);
        n_reads.fetch_add(1);
        if (!read.has_value()) {
            CHECK(read.error().code == ErrorCode::stale);
            ++stale;
            continue;
        }
        ++whole;
        CHECK(
            std::all_of(read->begin(), read->end(), [&](std::byte b) { return b == (*read)[0]; }));
    }
    stop.store(true);
    writer.join();
    MESSAGE("whole reads: " << whole << ", stale: " << stale);
}

TEST_CASE("offsets and sizes that no slot has are refused") {
    auto arena = make_arena(own_name("places"));
    ArenaReader reader;
    const msg::ShmPayload good = *arena->write(pattern(64, 0));
    REQUIRE(reader.read(good).has_value());
    std::vector<msg::ShmPayload> bad(8, good);
    bad[0].offset = 0;
    bad[1].offset += 1;
    bad[2].offset += 4 * 4096;
    bad[3].offset = ~std::uint64_t{0};
    bad[4].bytes = 4097;
    bad[5].bytes = ~std::uint64_t{0};
    bad[6].bytes = 63;
    bad[7].generation += 1;
    for (std::size_t i = 0; i < bad.size(); ++i) {
        CAPTURE(i);
        CHECK(code_of(reader.read(bad[i])) == ErrorCode::invalid_argument);
    }
}

TEST_CASE("a message cannot make its receiver open anything but a segment of ours") {
    ArenaReader reader;
    const std::vector<std::string> tricks = {
        "",         "/",          "k3-1-a-1",  "/k3-",         "/other",
        "/k3-../x", "/k3-a/../b", "/k3-a\nb",  "/k3-1 2",      std::string("/k3-a\0b", 7),
        "/../etc",  "//k3-a",     "/K3-1-a-1", "/k3-\xC3\xA4", "/k3-" + std::string(200, 'a')};
    for (const std::string& name : tricks) {
        CAPTURE(name);
        CHECK(code_of(reader.read({name, kArenaPage, 8, 2})) == ErrorCode::invalid_argument);
        CHECK_FALSE(reader.can_read({name, 1}));
        CHECK_FALSE(Arena::create({name, 4096, 1}).has_value());
    }
    CHECK(code_of(reader.read({"/k3-0-nobody-1", kArenaPage, 8, 2})) == ErrorCode::not_found);
}

TEST_CASE("a segment that replaced another of the same name is found, the old payload is stale") {
    const std::string name = own_name("again");
    ArenaReader reader;
    auto arena = make_arena(name);
    const msg::SegmentProbe old_probe = arena->probe();
    const msg::ShmPayload old_place = *arena->write(pattern(64, 1));
    REQUIRE(reader.read(old_place).has_value());
    arena.reset();
    CHECK_FALSE(exists(name));
    arena = make_arena(name);
    // What a reader still holds open stays what it was; it is given up once the name moved on.
    CHECK(*reader.read(old_place) == pattern(64, 1));
    CHECK(*reader.read(*arena->write(pattern(64, 2))) == pattern(64, 2));
    CHECK(code_of(reader.read(old_place)) == ErrorCode::stale);
    CHECK_FALSE(reader.can_read(old_probe));
    CHECK(reader.can_read(arena->probe()));
}

TEST_CASE("a segment that is cut under its reader is an error, not a signal") {
    auto arena = make_arena(own_name("cut"), 1 << 20, 2);
    ArenaReader reader;
    const msg::ShmPayload place = *arena->write(pattern(1 << 20, 1));
    REQUIRE(reader.read(place).has_value());
    REQUIRE(::truncate(segment_path(place.segment).c_str(), 500000) == 0);
    Result<msg::Bytes> read = reader.read(place);
    CHECK(code_of(read) == ErrorCode::corrupt);
    CHECK(read.error().message.find("500000") != std::string::npos);
    ArenaReader fresh;
    CHECK(code_of(fresh.read(place)) == ErrorCode::corrupt);
    CHECK_FALSE(fresh.can_read(arena->probe()));
}

TEST_CASE("foreign bytes and unknown layouts are told apart") {
    auto arena = make_arena(own_name("layout"));
    const msg::ShmPayload place = *arena->write(pattern(64, 1));
    SUBCASE("another layout version") {
        poke(place.segment, offsetof(ArenaHeader, layout_version), std::uint32_t{2});
        ArenaReader reader;
        Result<msg::Bytes> read = reader.read(place);
        CHECK(code_of(read) == ErrorCode::incompatible);
        CHECK(read.error().message.find("version 2") != std::string::npos);
    }
    SUBCASE("no magic") {
        poke(place.segment, 0, std::uint64_t{0});
        ArenaReader reader;
        CHECK(code_of(reader.read(place)) == ErrorCode::corrupt);
    }
    SUBCASE("sizes that cannot be") {
        const std::vector<std::pair<std::size_t, std::uint64_t>> damages = {
            {offsetof(ArenaHeader, slot_bytes), 0},
            {offsetof(ArenaHeader, slot_bytes), 4097},
            {offsetof(ArenaHeader, slot_bytes), ~std::uint64_t{0}},
            {offsetof(ArenaHeader, n_slots), 0},
            {offsetof(ArenaHeader, n_slots), ~std::uint64_t{0}},
            {offsetof(ArenaHeader, data_offset), 0},
            {offsetof(ArenaHeader, data_offset), ~std::uint64_t{0}}};
        for (const auto& damage : damages) {
            const std::size_t offset = damage.first;
            const std::uint64_t value = damage.second;
            CAPTURE(offset);
            CAPTURE(value);
            auto own = make_arena(own_name("sizes"));
            const msg::ShmPayload slot = *own->write(pattern(64, 1));
            poke(slot.segment, offset, value);
            ArenaReader reader;
            CHECK(code_of(reader.read(slot)) == ErrorCode::corrupt);
        }
    }
}

TEST_CASE("a probe with another nonce is not ours") {
    auto arena = make_arena(own_name("nonce"));
    ArenaReader reader;
    msg::SegmentProbe probe = arena->probe();
    probe.nonce += 1;
    CHECK_FALSE(reader.can_read(probe));
    CHECK(reader.can_read(arena->probe()));
}

TEST_CASE("a segment is private to its user, and ends with its arena") {
    const std::string name = own_name("mode");
    auto arena = make_arena(name);
    struct stat info {};
    REQUIRE(::stat(segment_path(name).c_str(), &info) == 0);
    CHECK((info.st_mode & 07777) == 0600);
    arena.reset();
    CHECK_FALSE(exists(name));
}

TEST_CASE("a name in use is refused, and its segment stays") {
    const std::string name = own_name("taken");
    auto arena = make_arena(name);
    Result<std::unique_ptr<Arena>> second = Arena::create({name, 4096, 1});
    REQUIRE_FALSE(second.has_value());
    CHECK(second.error().code == ErrorCode::resource_exhausted);
    CHECK(second.error().message.find(std::to_string(::getpid())) != std::string::npos);
    ArenaReader reader;
    CHECK(reader.can_read(arena->probe()));
}

TEST_CASE("a /dev/shm that is too small is a sentence with both numbers") {
    const std::string name = own_name("full");
    Result<std::unique_ptr<Arena>> arena = Arena::create({name, std::size_t{1} << 40U, 4});
    REQUIRE_FALSE(arena.has_value());
    CHECK(arena.error().code == ErrorCode::resource_exhausted);
    CHECK(arena.error().message.find("4398046519296") != std::string::npos);
    CHECK(arena.error().message.find("bytes left") != std::string::npos);
    CHECK_FALSE(exists(name));
}

TEST_CASE("impossible numbers of slots and bytes are refused") {
    for (auto [bytes, slots] : {std::pair<std::size_t, std::uint32_t>{0, 1},
                                {4096, 0},
                                {~std::size_t{0}, 1},
                                {std::size_t{1} << 45U, 4}}) {
        Result<std::unique_ptr<Arena>> arena = Arena::create({own_name("none"), bytes, slots});
        REQUIRE_FALSE(arena.has_value());
        CHECK(arena.error().code == ErrorCode::invalid_argument);
    }
}

TEST_CASE("segment names are legal whatever the service is called") {
    CHECK(segment_name(0x7f3a, "experts-1") == "/k3-7f3a-experts-1-" + std::to_string(::getpid()));
    for (const std::string& service :
         {std::string("a/b c\n"), std::string(500, 'x'), std::string()}) {
        const std::string name = segment_name(~std::uint64_t{0}, service);
        CAPTURE(name);
        CHECK(check_segment_name(name).has_value());
    }
}

TEST_CASE("the sweep removes the segment of a killed process") {
    ArenaOwner owner("killed");
    CHECK_FALSE(sweeps(owner.segment()));
    owner.kill();
    CHECK(sweeps(owner.segment()));
}

TEST_CASE("the sweep tells what it removed") {
    bool told = false;
    for (int i = 0; i < 20 && !told; ++i) {  // the sweep of another test may be faster
        ArenaOwner owner("told");
        owner.kill();
        const std::vector<std::string> swept = sweep_dead_segments();
        told = std::find(swept.begin(), swept.end(), owner.segment()) != swept.end();
    }
    CHECK(told);
}

TEST_CASE("a process that only waits to be reaped counts as gone") {
    ArenaOwner owner("zombie");
    owner.make_zombie();
    CHECK(sweeps(owner.segment()));
}

TEST_CASE("a reused process number does not keep a segment alive") {
    auto arena = make_arena(own_name("reused"));
    const std::string name = arena->probe().segment;
    CHECK_FALSE(sweeps(name));
    poke(name, offsetof(ArenaHeader, owner_start_ticks),
         ProcessIdentity::of_this_process().start_ticks + 1);
    CHECK(sweeps(name));
}

TEST_CASE("the sweep leaves alone what is not ours to judge") {
    SUBCASE("no arena, though it is called like one") {
        const std::string name = own_name("foreign");
        Fd fd(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
        REQUIRE(::ftruncate(fd.get(), 8192) == 0);
        CHECK_FALSE(sweeps(name));
        ::shm_unlink(name.c_str());
    }
    SUBCASE("an owner in another process namespace") {
        ArenaOwner owner("namespace");
        poke(owner.segment(), offsetof(ArenaHeader, owner_pid_namespace), std::uint64_t{1});
        owner.kill();
        CHECK_FALSE(sweeps(owner.segment()));
        ::shm_unlink(owner.segment().c_str());
    }
}

TEST_CASE("a new arena replaces the segment that a dead process left under its name") {
    ArenaOwner owner("left");
    owner.kill();
    auto arena = make_arena(owner.segment());
    ArenaReader reader;
    CHECK(reader.can_read(arena->probe()));
}

TEST_CASE("a forced exit removes the segment") {
    pid_t child = ::fork();
    if (child == 0) {
        auto arena = Arena::create({own_name("forced"), 4096, 1});
        exit_at_once(arena.has_value() ? 7 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WEXITSTATUS(status) == 7);
    std::string name = own_name("forced");
    name.replace(name.rfind('-') + 1, std::string::npos, std::to_string(child));
    CHECK_FALSE(exists(name));
}

TEST_CASE("a forced exit of a child leaves its parent's segment") {
    auto arena = make_arena(own_name("parent"));
    pid_t child = ::fork();
    if (child == 0) exit_at_once(7);
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    CHECK(exists(arena->probe().segment));
}
