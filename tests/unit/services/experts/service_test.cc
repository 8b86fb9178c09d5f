// The service behind a socket: every answer and every refusal, and that it survives all of them.

#include "services/experts/service.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/experts/trace_replay.h"
#include "common/transport/channel.h"
#include "common/transport/lane_host.h"
#include "common/transport/tensor_io.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/message_fuzzer.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::experts;

namespace {

constexpr std::uint64_t kLatent = 64;  // of tiny-k3
constexpr std::uint64_t kSlotBytes =
    16'384;  // its records of 9,792 bytes touch four blocks at most

model::Model open_or_fail(const std::filesystem::path& directory) {
    Result<model::Model> model = model::open_model(directory);
    REQUIRE_MESSAGE(model.has_value(), (model.has_value() ? "" : model.error().message));
    return std::move(model).value();
}

const model::Model& tiny() {
    static const model::Model model = open_or_fail(test::golden_dir() / "tiny-k3");
    return model;
}

/// A server on a socket of its own, served by a thread, and one client.
class Running {
  public:
    explicit Running(Service::Options options = {}, const model::Model& model = tiny()) {
        static std::atomic<std::uint64_t> n_runs{0};
        options.run_id = ++n_runs;  // a segment of its own
        auto made = Service::create(options, model);
        REQUIRE_MESSAGE(made.has_value(), (made.has_value() ? "" : made.error().message));
        service_ = std::move(made).value();
        transport::Server::Options server;
        server.endpoint = "ipc://" + (dir_.path() / "experts.sock").string();
        server.announcement.kind = msg::ServiceKind::experts;
        server.announcement.name = options.name;
        server.lanes = std::move(transport::LaneHost::create({})).value();
        auto bound = transport::Server::create(server);
        REQUIRE_MESSAGE(bound.has_value(), (bound.has_value() ? "" : bound.error().message));
        server_ = std::move(bound).value();
        server_->set_statistics([this] { return service_->statistics(); });
        server_->set_ready(service_->announcement());
        thread_ = std::thread([this] {
            while (!server_->stopping())
                if (auto request = server_->next(Deadline::after_ms(1000)))
                    service_->handle(std::move(*request));
        });
        connect();
    }
    ~Running() {
        server_->request_stop();
        thread_.join();
    }

    const msg::Announcement& peer() const { return peer_; }
    transport::Channel& channel() { return *channel_; }
    const std::string& endpoint() const { return server_->endpoint(); }

    Result<transport::Reply> send(msg::Body body, std::vector<msg::Bytes> frames = {}) {
        return channel_->call(std::move(body), std::move(frames), Deadline::after_ms(20'000));
    }

    /// A call whose rows go, and whose sums come back, through shared memory or inline.
    Result<std::vector<std::int64_t>> call(std::uint32_t layer, const std::vector<float>& rows,
                                           std::vector<msg::Pick> picks, bool shm = false,
                                           std::uint64_t hint = 0) {
        std::vector<msg::Bytes> frames;
        msg::ExpertCall body{
            layer,
            transport::put_tensor(msg::DType::f32, {rows.size() / kLatent, kLatent},
                                  std::as_bytes(std::span(rows)), arena_.get(), shm, frames),
            std::move(picks), shm, hint};
        auto reply = send(std::move(body), std::move(frames));
        if (!reply.has_value()) return std::move(reply).error();
        auto* sums = std::get_if<msg::PartialSums>(&reply->body);
        REQUIRE(sums != nullptr);
        CHECK(std::holds_alternative<msg::ShmPayload>(sums->sums.payload) == shm);
        const std::uint64_t shape[] = {rows.size() / kLatent, kLatent};
        auto bytes = transport::take_tensor(sums->sums, "sums", msg::DType::i64, shape,
                                            reply->frames, reader_);
        REQUIRE(bytes.has_value());
        const auto values = transport::view_as<std::int64_t>(*bytes);
        return std::vector<std::int64_t>(values.begin(), values.end());
    }

    std::uint64_t counter(const std::string& name) {
        auto reply = send(msg::GetStatistics{});
        REQUIRE(reply.has_value());
        for (const msg::Counter& counter : std::get<msg::Statistics>(reply->body).counters)
            if (counter.name == name) return counter.value;
        FAIL("no counter " << name);
        return 0;
    }

  private:
    void connect() {
        static std::atomic<int> n_segments{0};
        auto arena = transport::Arena::create(
            {transport::segment_name(0, "test" + std::to_string(++n_segments)), 1U << 16U, 4});
        REQUIRE(arena.has_value());
        arena_ = std::move(arena).value();
        transport::Channel::Options options;
        options.endpoint = server_->endpoint();
        options.peer = "experts";
        channel_ = std::move(transport::Channel::create(options)).value();
        auto peer = channel_->hello({arena_->probe()}, Deadline::after_ms(20'000));
        REQUIRE_MESSAGE(peer.has_value(), (peer.has_value() ? "" : peer.error().message));
        peer_ = std::move(peer).value();
        REQUIRE(peer_.probes == std::vector<bool>{true});
        if (!peer_.arena.segment.empty()) REQUIRE(reader_.can_read(peer_.arena));
    }

    test::TempDir dir_;
    std::unique_ptr<Service> service_;
    std::unique_ptr<transport::Server> server_;
    std::thread thread_;
    std::unique_ptr<transport::Arena> arena_;
    std::unique_ptr<transport::Channel> channel_;
    transport::ArenaReader reader_;
    msg::Announcement peer_;
};

std::vector<float> some_rows(std::size_t n_rows, unsigned seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> rows(n_rows * kLatent);
    for (float& value : rows) value = normal(random);
    return rows;
}

/// Four experts for each row, 13 of them at some time.
std::vector<msg::Pick> some_picks(std::uint32_t n_rows) {
    std::vector<msg::Pick> picks;
    for (std::uint32_t row = 0; row < n_rows; ++row)
        for (std::uint32_t rank = 0; rank < 4; ++rank)
            picks.push_back({row, (row * 5 + rank * 6 + 1) % 24,
                             0.4F - 0.07F * static_cast<float>(rank), rank});
    return picks;
}

Service::Options with(std::uint64_t n_slots, const char* share = "all") {
    Service::Options options;
    options.cache_bytes = n_slots * kSlotBytes;
    options.share = share;
    return options;
}

}  // namespace

TEST_CASE("the server tells what it holds") {
    Running server(with(300, "layers 2-3 experts 0-7,23"));
    CHECK(server.peer().kind == msg::ServiceKind::experts);
    CHECK(server.peer().fingerprint == tiny().fingerprint);
    const auto* facts = std::get_if<msg::ExpertFacts>(&server.peer().facts);
    REQUIRE(facts != nullptr);
    CHECK(facts->n_experts == 24);
    CHECK(facts->latent_size == kLatent);
    CHECK(facts->max_call_rows == 256);
    REQUIRE(facts->holdings.size() == 2);
    CHECK(facts->holdings[1].layer == 3);
    CHECK(facts->holdings[1].holds(23));
    CHECK(!facts->holdings[1].holds(8));
}

TEST_CASE("the sums are the same bytes inline and in shared memory, whole and split") {
    const std::vector<float> rows = some_rows(7);
    const std::vector<msg::Pick> picks = some_picks(7);
    Running whole;
    const auto expected = whole.call(7, rows, picks);
    REQUIRE(expected.has_value());
    CHECK(std::any_of(expected->begin(), expected->end(), [](auto sum) { return sum != 0; }));
    CHECK(*whole.call(7, rows, picks, true) == *expected);

    std::vector<std::int64_t> total(rows.size());
    for (const char* share : {"0/3", "1/3", "2/3"}) {
        Running part(with(2, share));
        std::vector<msg::Pick> own;
        const model::Placement held = model::parse_share(share, tiny().config).value();
        for (const msg::Pick& pick : picks)
            if (held.holds(7, pick.expert)) own.push_back(pick);
        const auto sums = part.call(7, rows, own, true);
        REQUIRE(sums.has_value());
        for (std::size_t i = 0; i < total.size(); ++i) total[i] += (*sums)[i];
    }
    CHECK(total == *expected);
}

TEST_CASE("without an arena of its own the server answers inline") {
    Service::Options options;
    options.use_shm = false;
    Running server(options);
    CHECK(server.peer().arena.segment.empty());
    std::vector<msg::Bytes> frames;
    const std::vector<float> rows = some_rows(1);
    msg::ExpertCall call{
        3,
        transport::put_tensor(msg::DType::f32, {1, kLatent}, std::as_bytes(std::span(rows)),
                              nullptr, false, frames),
        some_picks(1), true};
    auto reply = server.send(call, frames);
    REQUIRE(reply.has_value());
    CHECK(reply->frames.size() == 1);
}

TEST_CASE("a hint has the experts read before the call") {
    Running server(with(300));
    server.channel().post(msg::Prefetch{5, {1, 7, 13, 19}, {0, 1, 2, 3}});
    while (server.counter("expert_reads") < 4) std::this_thread::yield();
    REQUIRE(server.call(5, some_rows(1), some_picks(1)).has_value());
    CHECK(server.counter("prefetch_useful") == 4);
    CHECK(server.counter("expert_cache_misses") == 4);
    CHECK(server.counter("expert_reads") == 4);
    CHECK(server.counter("expert_read_bytes") == 4 * 9792);
    REQUIRE(server.call(5, some_rows(1), some_picks(1)).has_value());
    CHECK(server.counter("expert_cache_hits") == 4);
    CHECK(server.counter("expert_calls") == 2);
    CHECK(server.counter("expert_call_picks") == 8);
}

TEST_CASE("a hint that its call has overtaken reads nothing, and the next one does") {
    const std::vector<float> rows = some_rows(1);
    const std::vector<msg::Pick> picks = some_picks(1);
    Running whole;
    const auto expected = whole.call(5, rows, picks);
    REQUIRE(expected.has_value());
    Running server(with(4));  // too few to keep what a call has used
    const std::vector<std::uint32_t> experts = {1, 7, 13, 19};
    const std::vector<std::uint32_t> ranks = {0, 1, 2, 3};
    auto hints_taken = [&server] {
        return server.counter("prefetch_reads") + server.counter("prefetch_dropped");
    };
    auto hint = [&](std::uint64_t number) {
        REQUIRE(server.send(msg::Prefetch{5, experts, ranks, number}).has_value());
    };
    constexpr std::uint64_t kFirst = 0xFFFF'FFFF'FFFF'FF00;
    constexpr std::uint64_t kHints = CalledHints::kRemembered + 3;
    for (std::uint64_t number = kFirst; number < kFirst + kHints; ++number) {
        CHECK(*server.call(5, rows, picks, false, number) == *expected);
        CHECK(*server.call(5, rows, picks, false, number) == *expected);  // the rest of its rows
        hint(number);
    }
    CHECK(server.counter("prefetch_hints_overtaken") == kHints);
    CHECK(hints_taken() == 0);
    const std::uint64_t n_reads = server.counter("expert_reads");
    // One that comes in time, one from a sender that does not number them, and one of long ago.
    hint(kFirst + kHints);
    CHECK(hints_taken() > 0);
    CHECK(*server.call(5, rows, picks, false, kFirst + kHints) == *expected);
    CHECK(server.counter("expert_reads") > n_reads);
    for (const std::uint64_t number : {std::uint64_t{0}, kFirst}) {
        CAPTURE(number);
        CHECK(*server.call(5, rows, picks, false, 0) == *expected);
        const std::uint64_t n_taken = hints_taken();
        hint(number);
        CHECK(hints_taken() > n_taken);
    }
    CHECK(server.counter("prefetch_hints_overtaken") == kHints);
}

TEST_CASE("a hint with a call id is answered, and a bad one harms nothing") {
    Running server(with(300, "layers 1-6"));
    auto done = server.send(msg::Prefetch{5, {1}, {0}});
    REQUIRE(done.has_value());
    CHECK(std::holds_alternative<msg::Done>(done->body));
    for (std::uint32_t layer : {0U, 7U, 13U, 4000000000U})
        CHECK(!server.send(msg::Prefetch{layer, {1}, {0}}).has_value());
    CHECK(!server.send(msg::Prefetch{5, {24}, {0}}).has_value());
    server.channel().post(msg::Prefetch{5, {4000000000U}, {0}});
    CHECK(server.call(5, some_rows(1), some_picks(1)).has_value());
    CHECK(server.counter("prefetch_hints_refused") == 6);
}

TEST_CASE("a call that cannot be meant is refused by name and number, and the next one works") {
    Service::Options options = with(300, "experts 0-22");
    options.name = "experts-2";
    options.max_call_rows = 5;
    Running server(options);
    const std::vector<float> rows = some_rows(2);
    const auto good = server.call(4, rows, some_picks(2));
    REQUIRE(good.has_value());
    auto refused = [&](const Result<std::vector<std::int64_t>>& result, ErrorCode code,
                       const char* words) {
        REQUIRE(!result.has_value());
        CHECK(result.error().code == code);
        CHECK(test::contains(result.error().sentence(), words));
        CHECK(*server.call(4, rows, some_picks(2)) == *good);
    };
    const auto invalid = ErrorCode::invalid_argument;
    refused(server.call(0, rows, some_picks(2)), invalid, "layer 0 has no routed experts");
    refused(server.call(13, rows, some_picks(2)), invalid, "layers 1 to 12");
    refused(server.call(4294967295U, rows, some_picks(2)), invalid, "layer 4294967295");
    refused(server.call(4, rows, {{0, 23, 0.5F, 0}}), ErrorCode::not_found,
            "experts-2 does not hold layer 4 expert 23");
    refused(server.call(4, rows, {{2, 1, 0.5F, 0}}), invalid, "row 2");
    refused(server.call(4, some_rows(6), some_picks(6)), invalid, "experts-2 takes 1 to 5");
    refused(server.call(4, {}, {}), invalid, "0 rows");
    std::vector<float> bad = rows;
    bad[kLatent + 3] = std::numeric_limits<float>::quiet_NaN();
    refused(server.call(4, bad, some_picks(2)), invalid, "row 1");
    bad[kLatent + 3] = std::numeric_limits<float>::infinity();
    refused(server.call(4, bad, some_picks(2), true), invalid, "column 3");
    CHECK(server.counter("expert_calls_failed") == 9);
}

TEST_CASE("rows of a wrong shape, type or place are refused") {
    Running server;
    const std::vector<float> rows = some_rows(2);
    msg::Bytes bytes(rows.size() * sizeof(float));
    std::memcpy(bytes.data(), rows.data(), bytes.size());
    auto refused = [&](msg::Tensor tensor, std::vector<msg::Bytes> frames) {
        auto reply = server.send(msg::ExpertCall{4, std::move(tensor), some_picks(2), false},
                                 std::move(frames));
        REQUIRE(!reply.has_value());
        CHECK(server.call(4, rows, some_picks(2)).has_value());
    };
    const msg::InlinePayload first{1};
    refused({msg::DType::f32, {}, first}, {bytes});
    refused({msg::DType::f32, {2 * kLatent}, first}, {bytes});
    refused({msg::DType::f32, {1, kLatent}, first}, {bytes});
    refused({msg::DType::f32, {4, kLatent / 2}, first}, {bytes});
    refused({msg::DType::u32, {2, kLatent}, first}, {bytes});
    refused({msg::DType::i64, {1, kLatent}, first}, {bytes});
    refused({msg::DType::f32, {2, kLatent}, msg::InlinePayload{0}}, {bytes});
    refused({msg::DType::f32, {2, kLatent}, msg::InlinePayload{2}}, {bytes});
    refused({msg::DType::f32, {2, kLatent}, first}, {});
    refused({msg::DType::f32, {2, kLatent}, msg::ShmPayload{"/k3-nobody", 4096, 512, 2}}, {});
    refused({msg::DType::f32, {2, kLatent}, msg::ShmPayload{"../../etc/passwd", 0, 512, 2}}, {});
}

TEST_CASE("other services' messages are refused by name") {
    Running server;
    auto reply = server.send(msg::Encode{"hello", false, false});
    REQUIRE(!reply.has_value());
    CHECK(reply.error().code == ErrorCode::unsupported);
    CHECK(test::contains(reply.error().sentence(), "Encode"));
}

TEST_CASE("a corrupt expert fails its calls and no others, and heals with its file") {
    test::CheckpointCopy copy(test::golden_dir() / "tiny-k3");
    const model::Model model = open_or_fail(copy.path());
    for (std::uint64_t n_slots : {2, 300}) {
        copy.set_byte("model-00001-of-000005.safetensors", 532768, 255);
        Running server(with(n_slots), model);
        for (int i = 0; i < 2; ++i) {
            server.channel().post(msg::Prefetch{1, {5}, {0}});
            const auto broken = server.call(1, some_rows(1), {{0, 5, 0.5F, 0}, {0, 6, 0.5F, 1}});
            REQUIRE(!broken.has_value());
            CHECK(broken.error().code == ErrorCode::corrupt);
            CHECK(test::contains(broken.error().sentence(), "layer 1 expert 5"));
            CHECK(test::contains(broken.error().sentence(), "w1.weight_scale row 0 group 0"));
            CHECK(test::contains(broken.error().sentence(),
                                 "model-00001-of-000005.safetensors at byte 532768"));
            CHECK(server.call(1, some_rows(1), {{0, 6, 0.5F, 0}}).has_value());
            CHECK(server.call(2, some_rows(1), {{0, 5, 0.5F, 0}}).has_value());
        }
        copy.set_byte("model-00001-of-000005.safetensors", 532768, 122);
        Running healthy;
        const std::vector<msg::Pick> picks{{0, 5, 0.5F, 0}, {0, 6, 0.5F, 1}};
        CHECK(*server.call(1, some_rows(1), picks) == *healthy.call(1, some_rows(1), picks));
    }
}

TEST_CASE("an error of the fixed point travels with its names") {
    Running server;
    const auto sums = server.call(4, some_rows(2), {{0, 3, 0.5F, 0}, {1, 3, 1e12F, 0}});
    REQUIRE(!sums.has_value());
    CHECK(sums.error().code == ErrorCode::corrupt);
    CHECK(test::contains(sums.error().sentence(), "layer 4 expert 3 row 1"));
}

TEST_CASE("damaged messages neither stop the server nor change its answers") {
    Service::Options options = with(5, "experts 0-20");
    options.max_call_rows = 8;
    Running server(options);
    const std::vector<float> rows = some_rows(2);
    const std::vector<msg::Pick> picks{{0, 3, 0.5F, 0}, {0, 20, 0.3F, 1}, {1, 3, 0.7F, 0}};
    const auto before = server.call(9, rows, picks);
    REQUIRE(before.has_value());

    msg::Bytes bytes(rows.size() * sizeof(float));
    std::memcpy(bytes.data(), rows.data(), bytes.size());
    const msg::Tensor tensor{msg::DType::f32, {2, kLatent}, msg::InlinePayload{1}};
    const msg::Tensor elsewhere{
        msg::DType::f32, {2, kLatent}, msg::ShmPayload{"/k3-nobody", 4096, 512, 2}};
    test::FuzzOptions fuzz;
    fuzz.endpoint = server.endpoint();
    fuzz.requests = {{msg::ExpertCall{9, tensor, picks, false}, {bytes}},
                     {msg::ExpertCall{9, tensor, picks, true}, {bytes}},
                     {msg::ExpertCall{9, elsewhere, picks, true}, {}},
                     {msg::Prefetch{9, {3, 20, 7}, {0, 1, 2}}, {}}};
    fuzz.n_messages = 2500;
    SUBCASE("through its socket") {
        const test::FuzzReport report = test::fuzz_service(fuzz);
        CHECK_MESSAGE(report.alive, report.problem);
        CHECK(report.n_sent >= 2500);
        CHECK(report.n_malformed > 500);
        CHECK(report.n_failures > 0);
    }
    SUBCASE("through a fast lane") {
        fuzz.by_lane = true;
        const test::FuzzReport report = test::fuzz_service(fuzz);
        CHECK_MESSAGE(report.alive, report.problem);
        CHECK(report.n_sent == 2500);
        CHECK(report.n_lane_answers > 1000);
    }
    const auto after = server.call(9, rows, picks);
    REQUIRE_MESSAGE(after.has_value(), (after.has_value() ? "" : after.error().sentence()));
    CHECK(*after == *before);
}

TEST_CASE("settings that cannot be had are refused with the numbers") {
    auto refused = [](const Service::Options& options, ErrorCode code, const char* words) {
        auto service = Service::create(options, tiny());
        REQUIRE(!service.has_value());
        CHECK(service.error().code == code);
        CHECK(test::contains(service.error().sentence(), words));
    };
    refused(with(300, "500/501"), ErrorCode::invalid_argument, "500/501");
    refused(with(300, "nonsense"), ErrorCode::invalid_argument, "nonsense");
    refused(with(1), ErrorCode::resource_exhausted, "32768");
    Service::Options policy = with(300);
    policy.policy = "fifo";
    refused(policy, ErrorCode::invalid_argument, "fifo");
    model::Model many = tiny();
    many.config.moe.top_k = 32;
    auto service = Service::create(with(300), many);
    REQUIRE(!service.has_value());
    CHECK(service.error().code == ErrorCode::unsupported);
}

TEST_CASE("no more is taken than the share needs, and the default is the share") {
    auto slots = [](const Service::Options& options) {
        auto service = Service::create(options, tiny());
        REQUIRE(service.has_value());
        return (*service)->cache().slots();
    };
    CHECK(slots(with(100'000'000)).n_slots == 288);
    CHECK(slots(with(0)).n_slots == 288);
    CHECK(slots(with(0, "0/2")).n_slots == 144);
    CHECK(slots(with(0, "layers 3 experts 4")).n_slots == 1);
    CHECK(slots(with(2)).n_kept == 0);
}

TEST_CASE("tiers and recordings change no bit, and what was kept is there after a restart") {
    test::TempDir dir;
    const auto rows = some_rows(6);
    const auto picks = some_picks(6);
    const auto layers = {1U, 5U, 9U, 12U};
    std::vector<std::vector<std::int64_t>> expected;
    {
        Running plain(with(288));
        for (const std::uint32_t layer : layers)
            expected.push_back(*plain.call(layer, rows, picks));
    }
    Service::Options options = with(290);  // two of them are the disk cache's buffers
    options.disk_cache = (dir.path() / "cache").string();
    options.disk_cache_bytes = std::uint64_t{16} << 20U;
    options.trace = (dir.path() / "trace.csv").string();
    for (int run = 0; run < 3; ++run) {
        CAPTURE(run);
        if (run == 2) {  // the list of what was in memory is lost
            const auto warm = dir.path() / "cache" / "warm";
            REQUIRE(std::filesystem::file_size(warm) > 100);
            std::filesystem::resize_file(warm, 100);
        }
        Running server(options);
        if (run == 1)
            while (server.counter("expert_cache_warmed") < 24 * 4) std::this_thread::yield();
        std::size_t i = 0;
        for (const std::uint32_t layer : layers)
            CHECK(*server.call(layer, rows, picks) == expected[i++]);
        CHECK(server.counter("expert_cache_hits") == (run == 1 ? 24 * 4 : 0));
        CHECK(server.counter("disk_cache_damaged") == 0);
        if (run == 0) CHECK(server.counter("disk_cache_misses") == 24 * 4);
        // Records that found no free buffer are not on the disk; the others come from there.
        if (run == 1) CHECK(server.counter("disk_cache_hits") > 0);
    }
    options.disk_cache_bytes = 1000;
    auto refused = Service::create(options, tiny());
    REQUIRE(!refused.has_value());
    CHECK(refused.error().code == ErrorCode::invalid_argument);
    CHECK(test::contains(refused.error().sentence(), "--disk-cache-bytes"));
    // Where no cache can be made the server does without.
    test::write_file(dir.path() / "file", "");
    options.disk_cache = (dir.path() / "file" / "cache").string();
    options.disk_cache_bytes = std::uint64_t{16} << 20U;
    Running without(options);
    CHECK(*without.call(5, rows, picks) == expected[1]);
    CHECK(without.counter("disk_cache_capacity") == 0);
}

TEST_CASE("a recorded trace replays to the hits that the server counted") {
    test::TempDir dir;
    for (const char* policy : {"rank-weighted", "lru"}) {
        for (const char* share : {"all", "1/3"}) {
            CAPTURE(policy);
            CAPTURE(share);
            Service::Options options = with(40, share);
            options.policy = policy;
            options.trace = (dir.path() / "trace.csv").string();
            std::uint64_t counted[3] = {};
            std::size_t capacity = 0;
            {
                Running server(options);
                const model::Placement held = model::parse_share(share, tiny().config).value();
                for (std::uint32_t pass = 0; pass < 12; ++pass) {
                    const std::uint32_t n_rows = pass % 4 == 0 ? 5 : 1;
                    for (std::uint32_t layer = 1; layer < tiny().config.n_layers; ++layer) {
                        std::vector<msg::Pick> picks;
                        for (msg::Pick pick : some_picks(n_rows)) {
                            pick.expert = (pick.expert + pass / 2 * 5 + layer) % 24;
                            if (held.holds(layer, pick.expert)) picks.push_back(pick);
                        }
                        if (picks.empty()) continue;
                        REQUIRE(server.call(layer, some_rows(n_rows, pass), picks).has_value());
                    }
                }
                counted[0] = server.counter("expert_cache_hits");
                counted[1] = server.counter("expert_cache_refused_admissions");
                counted[2] = server.counter("expert_cache_evictions");
                capacity = server.counter("expert_cache_kept_slots");
            }
            const auto trace = read_trace(options.trace);
            REQUIRE_MESSAGE(trace.has_value(), (trace.has_value() ? "" : trace.error().sentence()));
            auto replayed = make_policy(policy, trace->shape(capacity));
            REQUIRE(replayed.has_value());
            const ReplayCounts counts = replay(*trace, **replayed);
            CHECK(counts.hits == counted[0]);
            CHECK(counts.refused == counted[1]);
            CHECK(counts.evictions == counted[2]);
            // 40 experts are less than a pass uses, which is where LRU keeps nothing.
            CHECK((counted[0] > 0 || policy == std::string("lru")));
            CHECK(counted[2] > 0);
        }
    }
}
