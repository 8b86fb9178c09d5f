// Calls to expert servers over real sockets: the same bytes for any split and payload, and what
// happens when a server dies, lies or serves another checkpoint.

#include "services/trunk/expert_client.h"

#include <doctest/doctest.h>

#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/transport/lane_segment.h"
#include "tests/support/fake_peer.h"
#include "tests/support/socket_proxy.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/fake_expert_server.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

using Fault = FakeExpertServer::Fault;
using trunk::ExpertClient;

const std::vector<std::uint32_t> kPrompt = {387, 486, 344, 495, 13, 7, 8, 9, 10, 11, 12};

/// Servers, a client that met them, and a trunk on top.
struct Rig {
    SocketDirectory sockets;
    telemetry::Counters counters;
    std::vector<std::string> endpoints;
    std::vector<std::unique_ptr<FakeExpertServer>> servers;
    std::unique_ptr<ExpertClient> client;
    bool use_shm = false;
    bool fast_lane = true;
    std::int64_t spin_us = -1;
    std::atomic<bool> stop{false};
    std::int64_t wait_ms = 20000;
    std::int64_t stuck_ms = 10000;
    double hedge_quantile = 0;
    std::vector<std::string> waits;  // as told

    FakeExpertServer& add(FakeExpertServer::Options options) {
        options.name = "experts-" + std::to_string(endpoints.size());
        options.endpoint = sockets.endpoint(options.name);
        endpoints.push_back(options.endpoint);
        servers.push_back(std::make_unique<FakeExpertServer>(tiny_model(), std::move(options)));
        return *servers.back();
    }
    Status connect() {
        const auto& config = tiny_model().config;
        ExpertClient::Options options;
        options.needs = {"trunk-0", tiny_model().fingerprint, 1,
                         12,        config.moe.n_experts,     config.moe.latent_size};
        options.endpoints = endpoints;
        options.run_id = static_cast<std::uint64_t>(std::rand());
        options.top_k = config.moe.top_k;
        options.max_rows = 256;
        options.wait_ms = wait_ms;
        options.use_shm = use_shm;
        options.fast_lane = fast_lane;
        options.spin_us = spin_us;
        options.stuck_ms = stuck_ms;
        options.hedge_quantile = hedge_quantile;
        options.on_waiting = [this](const std::string& names) { waits.push_back(names); };
        options.stopping = [this] { return stop.load(); };
        ASSIGN_OR_RETURN(client, ExpertClient::create(std::move(options), counters));
        return client->connect();
    }
    /// Looks after the servers as an idle trunk does; false if that changed nothing for 10 s.
    template <typename Done>
    bool look_until(Done&& done) const {
        const Deadline deadline = Deadline::after_ms(10000);
        while (!done() && !deadline.expired()) {
            client->look_after_servers();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        return done();
    }
    std::uint64_t count(const std::string& name) const {
        for (const msg::Counter& counter : counters.snapshot())
            if (counter.name == name) return counter.value;
        FAIL("no counter " << name);
        return 0;
    }
};

Result<std::vector<float>> try_run(trunk::ExpertBackend* experts) {
    Harness::Options options;
    options.experts = experts;
    Harness trunk(tiny_model(), options);
    trunk.open(1);
    std::vector<TokenRow> rows;
    for (std::uint32_t id : kPrompt) rows.push_back({1, id});
    return trunk.step(rows, {0, static_cast<std::uint32_t>(rows.size() - 1)});
}

const std::vector<float>& reference() {
    static const std::vector<float> logits = try_run(nullptr).value();
    return logits;
}

void check_same_bytes(const Result<std::vector<float>>& logits) {
    if (!logits.has_value()) FAIL(logits.error().sentence());
    REQUIRE(logits->size() == reference().size());
    CHECK(std::memcmp(logits->data(), reference().data(), logits->size() * sizeof(float)) == 0);
}

/// Puts bytes that are no message into the reply slot of a lane; finds it as no peer would.
void overwrite_reply(std::uint32_t lane) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone;
        const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
        if (gone || !target.starts_with("/memfd:k3-lanes")) continue;
        transport::LaneHeader header;
        std::ifstream(entry.path(), std::ios::binary)
            .read(reinterpret_cast<char*>(&header), sizeof(header));
        const auto segment =
            std::move(transport::LaneSegment::open(
                          {static_cast<std::uint32_t>(::getpid()),
                           static_cast<std::uint32_t>(std::stoul(entry.path().filename().string())),
                           header.nonce, lane, 0, 0, ""}))
                .value();
        const std::uint32_t number = segment.request(lane).head().number.value;
        segment.reply(lane).put(number, 12345, msg::Bytes(100, std::byte{0xAB}), {});
        return;
    }
    std::fprintf(stderr, "there is no lane\n");
    std::exit(99);
}

}  // namespace

TEST_CASE("1, 2, 3 and 5 servers, inline and through shared memory, give the same bytes") {
    const std::vector<std::vector<std::string>> splits = {
        {"all"},
        {"0/2", "1/2"},
        {"experts 0-2", "layers 1-6 experts 3-23", "layers 7-12 experts 3-23"},
        {"0/5", "1/5", "2/5", "3/5", "4/5"}};
    for (bool use_shm : {false, true}) {
        for (const auto& split : splits) {
            CAPTURE(use_shm);
            CAPTURE(split.size());
            Rig rig;
            rig.use_shm = use_shm;
            for (const std::string& share : split) rig.add({.share = share, .use_shm = use_shm});
            REQUIRE(rig.connect().has_value());
            check_same_bytes(try_run(rig.client.get()));
            int n_prefetches = 0;
            for (const auto& server : rig.servers) {
                CHECK(server->n_calls > 0);
                CHECK(server->n_shm_calls == (use_shm ? server->n_calls.load() : 0));
                CHECK(server->n_shm_replies == (use_shm ? server->n_calls.load() : 0));
                n_prefetches += server->n_prefetches;
            }
            CHECK(n_prefetches >= 12);
            CHECK(rig.count("expert_calls_repeated") == 0);
        }
    }
}

TEST_CASE("fast lanes give the same bytes, with tensors inside or in arenas, spinning or not") {
    constexpr std::uint32_t kSmall = 4096;  // the sums of all rows do not fit
    constexpr std::uint32_t kLarge = 65536;
    const std::vector<std::vector<std::string>> splits = {{"all"}, {"0/3", "1/3", "2/3"}};
    for (std::uint32_t lane_bytes : {kSmall, kLarge}) {
        for (const auto& split : splits) {
            CAPTURE(lane_bytes);
            CAPTURE(split.size());
            Rig rig;
            rig.use_shm = true;
            rig.spin_us = lane_bytes == kLarge ? 20 : 0;
            for (const std::string& share : split)
                rig.add({.share = share, .use_shm = true, .lane_bytes = lane_bytes});
            REQUIRE(rig.connect().has_value());
            check_same_bytes(try_run(rig.client.get()));
            CHECK(rig.count("expert_calls_fast_lane") == rig.count("expert_calls"));
            CHECK(rig.count("expert_calls_repeated") == 0);
            if (split.size() > 1) continue;
            const int n_calls = rig.servers[0]->n_calls;
            CHECK(rig.servers[0]->n_shm_calls == (lane_bytes == kSmall ? n_calls : 0));
        }
    }
}

TEST_CASE("a fast lane is not asked for where it is off, nor without shared memory") {
    Rig off;
    off.use_shm = true;
    off.fast_lane = false;
    off.add({.use_shm = true, .lane_bytes = 65536});
    Rig inline_only;
    inline_only.add({.lane_bytes = 65536});
    for (Rig* rig : {&off, &inline_only}) {
        REQUIRE(rig->connect().has_value());
        check_same_bytes(try_run(rig->client.get()));
        CHECK(rig->count("expert_calls_fast_lane") == 0);
    }
}

TEST_CASE("a damaged fast lane is given up, its call repeated, and the bytes are the same") {
    Rig rig;
    rig.use_shm = true;
    rig.add({.use_shm = true, .lane_bytes = 65536}).fault = [](int call) {
        if (call != 4) return Fault::none;
        overwrite_reply(0);
        return Fault::drop;
    };
    REQUIRE(rig.connect().has_value());
    check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.count("expert_calls_stale") == 1);
    CHECK(rig.count("expert_calls_repeated") == 1);
    CHECK(rig.count("expert_calls_fast_lane") == 5);
    CHECK(rig.count("expert_server_losses") == 0);
}

TEST_CASE("a server that dies during a call in a fast lane is met again, and so is its lane") {
    Rig rig;
    rig.use_shm = true;
    FakeExpertServer::Options options{.use_shm = true, .lane_bytes = 65536};
    std::atomic<bool> is_called{false};
    rig.add(options).fault = [&](int call) {
        if (call < 5) return Fault::none;
        is_called = true;
        return Fault::drop;
    };
    REQUIRE(rig.connect().has_value());
    std::thread restarter([&] {
        while (!is_called) std::this_thread::yield();
        rig.servers[0].reset();
        options.endpoint = rig.endpoints[0];
        rig.servers[0] = std::make_unique<FakeExpertServer>(tiny_model(), options);
    });
    const auto logits = try_run(rig.client.get());
    restarter.join();
    check_same_bytes(logits);
    CHECK(rig.count("expert_server_losses") == 1);
    CHECK(rig.count("expert_calls_fast_lane") == rig.count("expert_calls"));
}

TEST_CASE("calls name the hint that told of their picks, and no two hints have the same number") {
    Rig rig;
    rig.use_shm = true;
    std::mutex mutex;
    std::map<std::uint64_t, std::uint32_t> layers;                     // of hints, by number
    std::vector<std::pair<std::uint64_t, std::uint32_t>> calls;        // number and layer
    std::set<std::tuple<int, std::uint64_t, std::uint32_t>> hinted;    // server, number, expert
    std::vector<std::tuple<int, std::uint64_t, std::uint32_t>> asked;  // likewise
    for (int server : {0, 1}) {
        FakeExpertServer& fake =
            rig.add({.share = std::to_string(server) + "/2", .max_call_rows = 3});
        fake.on_hint = [&, server](const msg::Prefetch& hint) {
            std::lock_guard lock(mutex);
            const auto [at, is_new] = layers.emplace(hint.number, hint.layer);
            if (!is_new && at->second != hint.layer) at->second = 1000;
            for (std::uint32_t expert : hint.experts) hinted.emplace(server, hint.number, expert);
        };
        fake.on_call = [&, server](const msg::ExpertCall& call) {
            std::lock_guard lock(mutex);
            calls.emplace_back(call.hint, call.layer);
            for (const msg::Pick& pick : call.picks)
                asked.emplace_back(server, call.hint, pick.expert);
        };
    }
    REQUIRE(rig.connect().has_value());
    for (int i = 0; i < 2; ++i) check_same_bytes(try_run(rig.client.get()));
    std::lock_guard lock(mutex);
    CHECK(layers.size() == 2 * 12);  // one for each layer of each step
    CHECK(layers.count(0) == 0);
    CHECK(calls.size() > 2 * 12 * 2);
    for (const auto& call : calls) {
        CAPTURE(call.first);
        REQUIRE(layers.count(call.first) == 1);
        CHECK(layers[call.first] == call.second);
    }
    // Through the socket all hints come before their calls, so none is missing.
    for (const auto& pick : asked) CHECK(hinted.count(pick) == 1);
}

TEST_CASE("a server gets only the rows it needs, with picks counted within them and ranks kept") {
    Rig rig;
    FakeExpertServer& only = rig.add({.share = "experts 0-3"});
    rig.add({.share = "experts 4-23"});
    std::size_t n_rows = 0;
    std::set<std::uint32_t> ranks;
    only.on_call = [&](const msg::ExpertCall& call) {
        std::set<std::uint32_t> used;
        for (const msg::Pick& pick : call.picks) {
            if (pick.expert > 3 || pick.row >= call.rows.shape[0] || pick.rank > 3) n_rows += 1000;
            used.insert(pick.row);
            ranks.insert(pick.rank);
        }
        n_rows += call.rows.shape[0];
        if (used.size() != call.rows.shape[0]) n_rows += 1000;
    };
    REQUIRE(rig.connect().has_value());
    check_same_bytes(try_run(rig.client.get()));
    CHECK(n_rows > 0);
    CHECK(n_rows < 12 * kPrompt.size());
    CHECK(ranks.size() > 1);
}

TEST_CASE("a server that takes few rows at a time gets several calls") {
    Rig rig;
    rig.add({.max_call_rows = 3});
    REQUIRE(rig.connect().has_value());
    check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.servers[0]->n_calls == 12 * 4);
}

TEST_CASE(
    "a server that dies during a call is met again when it is back, and the bytes are the same") {
    Rig rig;
    FakeExpertServer& mortal = rig.add({.share = "0/2"});
    rig.add({.share = "1/2"});
    std::atomic<bool> is_called{false};
    mortal.fault = [&](int call) {
        if (call < 5) return Fault::none;
        is_called = true;
        return Fault::drop;
    };
    REQUIRE(rig.connect().has_value());
    std::thread restarter([&] {
        while (!is_called) std::this_thread::yield();
        rig.servers[0].reset();
        rig.servers[0] = std::make_unique<FakeExpertServer>(
            tiny_model(), FakeExpertServer::Options{
                              .endpoint = rig.endpoints[0], .name = "experts-0", .share = "0/2"});
    });
    const auto logits = try_run(rig.client.get());
    restarter.join();
    check_same_bytes(logits);
    CHECK(rig.count("expert_server_losses") == 1);
    CHECK(rig.count("expert_calls_repeated") >= 1);
}

TEST_CASE("replicas of any weight give the same bytes, and no expert is asked of two servers") {
    const std::vector<std::string> shares = {"all", "0/2", "1/2", "experts 0-5", "all"};
    for (const std::vector<std::uint32_t>& weights :
         {std::vector<std::uint32_t>{1, 1, 1, 1, 1}, {1, 2, 3, 4, 5}, {9, 1, 1, 7, 1}}) {
        Rig rig;
        std::mutex mutex;
        std::map<std::pair<std::uint32_t, std::uint32_t>, std::set<std::size_t>> asked;
        for (std::size_t s = 0; s < shares.size(); ++s)
            rig.add({.share = shares[s], .weight = weights[s]}).on_call =
                [&, s](const msg::ExpertCall& call) {
                    const std::lock_guard lock(mutex);
                    for (const msg::Pick& pick : call.picks)
                        asked[{call.layer, pick.expert}].insert(s);
                };
        REQUIRE(rig.connect().has_value());
        check_same_bytes(try_run(rig.client.get()));
        std::set<std::size_t> used;
        for (const auto& [key, servers] : asked) {
            CHECK(servers.size() == 1);
            used.insert(servers.begin(), servers.end());
        }
        CHECK(used.size() >= 3);
    }
}

TEST_CASE("a replica takes over at once when a server dies for good") {
    Rig rig;
    rig.add({});
    rig.add({});
    REQUIRE(rig.connect().has_value());
    check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.servers[0]->n_calls > 0);
    CHECK(rig.servers[1]->n_calls > 0);
    rig.servers[0].reset();
    check_same_bytes(try_run(rig.client.get()));
}

TEST_CASE("a server that stays away ends the step with a sentence, after the time granted") {
    Rig rig;
    rig.wait_ms = 300;
    rig.add({.share = "0/2"});
    rig.add({.share = "1/2"});
    REQUIRE(rig.connect().has_value());
    rig.servers[1].reset();
    const auto begin = Clock::now();
    const auto failed = try_run(rig.client.get());
    REQUIRE(!failed.has_value());
    CHECK(failed.error().code == ErrorCode::unavailable);
    CHECK(contains(failed.error().message, "experts-1"));
    CHECK(contains(failed.error().message, "has waited 300 ms"));
    CHECK(contains(failed.error().message, "has closed the connection"));
    CHECK(contains(failed.error().message, "layer 1"));
    CHECK(Clock::now() - begin > std::chrono::milliseconds(300));
}

TEST_CASE("what a server reports as corrupt is passed on and names it") {
    Rig rig;
    rig.add({}).fault = [](int call) { return call == 2 ? Fault::corrupt : Fault::none; };
    REQUIRE(rig.connect().has_value());
    const auto failed = try_run(rig.client.get());
    REQUIRE(!failed.has_value());
    CHECK(failed.error().code == ErrorCode::corrupt);
    CHECK(contains(failed.error().message, "layer 3 expert 5 in shard x: scale byte 255"));
    CHECK(failed.error().remedy == "restore it");
    CHECK(rig.client->failed_service() == "experts-0");
    // Nothing is left over: the next step is right.
    check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.client->failed_service().empty());
}

TEST_CASE("sums of a wrong shape and replies of a wrong kind are refused") {
    for (Fault kind : {Fault::bad_shape, Fault::wrong_body}) {
        Rig rig;
        rig.add({}).fault = [&](int call) { return call == 1 ? kind : Fault::none; };
        REQUIRE(rig.connect().has_value());
        const auto failed = try_run(rig.client.get());
        REQUIRE(!failed.has_value());
        CHECK(contains(failed.error().message, "experts-0"));
        CHECK(failed.error().code !=
              ErrorCode::invalid_argument);  // not the fault of who asked the trunk
        check_same_bytes(try_run(rig.client.get()));
    }
}

TEST_CASE("a slot that was overwritten is asked for again inside the message, once") {
    for (Fault kind : {Fault::stale_slot, Fault::stale_error}) {
        Rig rig;
        rig.use_shm = true;
        rig.add({.use_shm = true}).fault = [&](int call) { return call == 4 ? kind : Fault::none; };
        REQUIRE(rig.connect().has_value());
        check_same_bytes(try_run(rig.client.get()));
        CHECK(rig.count("expert_calls_stale") == 1);
        CHECK(rig.servers[0]->n_calls == 13);
        CHECK(rig.servers[0]->n_shm_calls == 12);
    }
    Rig rig;
    rig.use_shm = true;
    rig.add({.use_shm = true}).fault = [](int call) {
        return call >= 4 ? Fault::stale_error : Fault::none;
    };
    REQUIRE(rig.connect().has_value());
    CHECK(try_run(rig.client.get()).error().code == ErrorCode::stale);
    CHECK(rig.servers[0]->n_calls == 6);
}

TEST_CASE("another checkpoint and missing experts are found while connecting") {
    Rig other;
    other.add({.share = "0/2"});
    other.add({.share = "1/2", .fingerprint = std::string(32, 'b')});
    const Status refused = other.connect();
    REQUIRE(!refused.has_value());
    CHECK(refused.error().code == ErrorCode::incompatible);
    CHECK(contains(refused.error().message, "experts-1"));
    CHECK(contains(refused.error().message, std::string(32, 'b')));
    CHECK(contains(refused.error().message, tiny_model().fingerprint));

    Rig hole;
    hole.add({.share = "experts 0-22"});
    const Status uncovered = hole.connect();
    REQUIRE(!uncovered.has_value());
    CHECK(contains(uncovered.error().message, "12 of 288 experts are held by nobody"));
    CHECK(contains(uncovered.error().message, "layer 1 expert 23"));
}

TEST_CASE("a server that loads is waited for longer than one that is silent") {
    Rig rig;
    rig.wait_ms = 250;
    FakeExpertServer& late = rig.add({.starts_loading = true});
    std::thread loader([&] {
        const Deadline loaded = Deadline::after_ms(700);
        while (!loaded.expired()) std::this_thread::yield();
        late.set_ready();
    });
    CHECK(rig.connect().has_value());
    loader.join();

    Rig nobody;
    nobody.wait_ms = 250;
    nobody.endpoints.push_back(nobody.sockets.endpoint("nobody"));
    const Status silent = nobody.connect();
    REQUIRE(!silent.has_value());
    CHECK(silent.error().code == ErrorCode::unavailable);
    CHECK(contains(silent.error().message, "nobody.sock"));
}

TEST_CASE("a server that comes back with another checkpoint is not used") {
    Rig rig;
    rig.add({});
    REQUIRE(rig.connect().has_value());
    rig.servers[0].reset();
    rig.servers[0] = std::make_unique<FakeExpertServer>(
        tiny_model(), FakeExpertServer::Options{.endpoint = rig.endpoints[0],
                                                .fingerprint = std::string(32, 'c')});
    const auto failed = try_run(rig.client.get());
    REQUIRE(!failed.has_value());
    CHECK(failed.error().code == ErrorCode::incompatible);
    CHECK(contains(failed.error().message, std::string(32, 'c')));
    CHECK(rig.servers[0]->n_calls == 0);
}

TEST_CASE("a server that comes back with another protocol version is refused and named") {
    for (bool has_replica : {false, true}) {
        CAPTURE(has_replica);
        Rig rig;
        rig.add({});
        if (has_replica) rig.add({});
        REQUIRE(rig.connect().has_value());
        check_same_bytes(try_run(rig.client.get()));
        rig.servers[0].reset();
        auto foreign = std::make_unique<FakePeer>(rig.endpoints[0], [](const msg::Envelope& e) {
            return of_another_version({0, e.call_id, msg::Pong{}});
        });
        const auto logits = try_run(rig.client.get());
        if (has_replica) {
            check_same_bytes(logits);
            continue;
        }
        REQUIRE(!logits.has_value());
        CHECK(logits.error().code == ErrorCode::incompatible);
        CHECK(contains(logits.error().message, "experts-0.sock"));
        CHECK(contains(logits.error().message, "speaks protocol version 2"));
        CHECK(contains(logits.error().message, "speaks version 1"));
        REQUIRE(!rig.waits.empty());
        CHECK(contains(rig.waits.back(), "which is back and not used: the peer speaks protocol"));
        // The right one comes back: used again.
        foreign.reset();
        rig.servers[0] = std::make_unique<FakeExpertServer>(
            tiny_model(), FakeExpertServer::Options{.endpoint = rig.endpoints[0]});
        const Deadline deadline = Deadline::after_ms(20'000);
        while (!rig.waits.back().empty() && !deadline.expired()) rig.client->look_after_servers();
        check_same_bytes(try_run(rig.client.get()));
    }
}

TEST_CASE("a server that comes back as another build is refused and named, and a replica goes on") {
    for (bool has_replica : {false, true}) {
        CAPTURE(has_replica);
        Rig rig;
        rig.add({.build = "1234"});
        if (has_replica) rig.add({});
        REQUIRE(rig.connect().has_value());
        rig.servers[0].reset();
        rig.servers[0] = std::make_unique<FakeExpertServer>(
            tiny_model(), FakeExpertServer::Options{
                              .endpoint = rig.endpoints[0], .name = "experts-0", .build = "5678"});
        const auto result = try_run(rig.client.get());
        if (has_replica) {
            check_same_bytes(result);
        } else {
            REQUIRE(!result.has_value());
            CHECK(result.error().code == ErrorCode::incompatible);
            CHECK(contains(result.error().message, "experts-0"));
            CHECK(contains(result.error().message, "another build (5678) than it had been (1234)"));
        }
        CHECK(rig.servers[0]->n_calls == 0);
    }
}

TEST_CASE("a server that comes back with another share is named, and so is what nobody holds") {
    Rig rig;
    rig.add({.share = "0/2"});
    rig.add({.share = "1/2"});
    rig.wait_ms = 300;
    REQUIRE(rig.connect().has_value());
    const auto come_back = [&](const char* share) {
        rig.servers[1].reset();
        rig.servers[1] = std::make_unique<FakeExpertServer>(
            tiny_model(), FakeExpertServer::Options{
                              .endpoint = rig.endpoints[1], .name = "experts-1", .share = share});
    };
    come_back("0/2");
    REQUIRE(rig.look_until(
        [&] { return !rig.waits.empty() && contains(rig.waits.back(), "are held by nobody"); }));
    const auto failed = try_run(rig.client.get());
    REQUIRE(!failed.has_value());
    CHECK(failed.error().code == ErrorCode::unavailable);
    CHECK(contains(failed.error().message, "experts-1"));
    CHECK(contains(failed.error().message, "came back with another share or placement"));
    CHECK(contains(failed.error().message, "experts are held by nobody (layer"));
    come_back("1/2");
    REQUIRE(rig.look_until([&] { return rig.waits.back().empty(); }));
    check_same_bytes(try_run(rig.client.get()));
}

TEST_CASE("what is missing is told while it is missing, before anybody asks for something") {
    Rig rig;
    rig.add({.share = "0/2"});
    rig.add({.share = "1/2"});
    REQUIRE(rig.connect().has_value());
    CHECK(rig.waits.empty());
    REQUIRE(rig.look_until([&] { return rig.count("expert_servers_up") == 2; }));
    rig.servers[1].reset();
    REQUIRE(rig.look_until([&] { return !rig.waits.empty(); }));
    CHECK(contains(rig.waits.back(), "experts-1"));
    CHECK(rig.count("expert_servers_up") == 1);
    rig.servers[1] = std::make_unique<FakeExpertServer>(
        tiny_model(), FakeExpertServer::Options{
                          .endpoint = rig.endpoints[1], .name = "experts-1", .share = "1/2"});
    REQUIRE(rig.look_until([&] { return rig.waits.back().empty(); }));
    check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.count("expert_server_losses") == 1);
}

TEST_CASE("a server that ends before the heartbeat has met it is missed all the same") {
    for (int i = 0; i < 10; ++i) {
        Rig rig;
        rig.add({.share = "0/2"});
        rig.add({.share = "1/2"});
        REQUIRE(rig.connect().has_value());
        rig.servers[1].reset();
        REQUIRE(rig.look_until([&] { return !rig.waits.empty(); }));
        CHECK(contains(rig.waits.back(), "experts-1"));
        CHECK(rig.count("expert_servers_up") == 1);
    }
}

TEST_CASE("a server that answers pings and computes nothing is told apart, and a replica goes on") {
    Rig rig;
    rig.stuck_ms = 300;
    std::atomic<int> n_from = 1 << 30;
    rig.add({}).fault = [&](int call) { return call >= n_from ? Fault::stuck : Fault::none; };
    rig.add({});
    REQUIRE(rig.connect().has_value());
    for (int i = 0; i < 2; ++i) check_same_bytes(try_run(rig.client.get()));
    n_from = rig.servers[0]->n_calls.load() + 3;
    check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.count("expert_server_stalls") == 1);
    CHECK(rig.count("expert_server_silences") == 0);
    CHECK(rig.count("expert_server_losses") == 1);
    // It answers pings all the time, and is not asked again before it gets on.
    check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.count("expert_server_losses") == 1);
}

TEST_CASE("a server that is only slow is waited for, however late it is") {
    Rig rig;
    rig.stuck_ms = 100;
    std::atomic<int> late = -1;
    rig.add({}).fault = [&](int call) { return call == late ? Fault::late : Fault::none; };
    REQUIRE(rig.connect().has_value());
    for (int i = 0; i < 2; ++i) check_same_bytes(try_run(rig.client.get()));
    late = rig.servers[0]->n_calls.load() + 1;
    check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.count("expert_server_losses") == 0);
}

TEST_CASE(
    "a call that takes long goes to a replica as well: the first answer counts, the same bytes") {
    for (bool use_lanes : {false, true}) {
        CAPTURE(use_lanes);
        Rig rig;
        rig.hedge_quantile = 0.9;
        rig.use_shm = use_lanes;
        const FakeExpertServer::Options options{.use_shm = use_lanes,
                                                .lane_bytes = use_lanes ? 65536U : 0U};
        std::atomic<int> late = -1;
        rig.add(options).fault = [&](int call) { return call == late ? Fault::late : Fault::none; };
        rig.add(options);
        rig.add(options);
        REQUIRE(rig.connect().has_value());
        // On a busy machine the trunk itself may be the late one: then it measures nothing.
        for (int i = 0; i < 2; ++i) check_same_bytes(try_run(rig.client.get()));
        for (int i = 0; i < 8 && rig.count("expert_calls_hedges_won") == 0; ++i) {
            late = rig.servers[0]->n_calls.load() + 2;
            check_same_bytes(try_run(rig.client.get()));
        }
        CHECK(rig.count("expert_calls_hedged") > 0);
        CHECK(rig.count("expert_calls_hedges_won") > 0);
        CHECK(rig.count("expert_server_losses") == 0);
        check_same_bytes(try_run(rig.client.get()));
    }
}

TEST_CASE(
    "a server whose call a replica has answered is asked again when it has answered as well") {
    Rig rig;
    rig.hedge_quantile = 0.9;
    std::atomic<int> late = -1;
    std::atomic<bool> is_late = false;
    rig.add({}).fault = [&](int call) {
        is_late = call == late;
        return call == late ? Fault::late : Fault::none;
    };
    std::atomic<int> n_meanwhile = 0;
    rig.add({}).on_call = [&](const msg::ExpertCall&) { n_meanwhile += is_late ? 1 : 0; };
    REQUIRE(rig.connect().has_value());
    for (int i = 0; i < 2; ++i) check_same_bytes(try_run(rig.client.get()));
    for (int i = 0; i < 8 && rig.count("expert_calls_hedges_won") == 0; ++i) {
        late = rig.servers[0]->n_calls.load() + 2;
        check_same_bytes(try_run(rig.client.get()));
    }
    CHECK(rig.count("expert_calls_hedges_won") > 0);
    CHECK(n_meanwhile > 0);
    // It gets calls again, and none of those that it missed.
    const int n_calls = rig.servers[0]->n_calls;
    const Deadline deadline = Deadline::after_ms(20'000);
    while (rig.servers[0]->n_calls < n_calls + 6 && !deadline.expired())
        check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.servers[0]->n_calls >= n_calls + 6);
    CHECK(rig.count("expert_server_losses") == 0);
}

TEST_CASE("a server that computes nothing is told apart although its replicas answer every call") {
    Rig rig;
    rig.stuck_ms = 300;
    rig.hedge_quantile = 0.9;
    std::atomic<int> from = 1 << 30;
    rig.add({}).fault = [&](int call) { return call >= from ? Fault::stuck : Fault::none; };
    rig.add({});
    REQUIRE(rig.connect().has_value());
    for (int i = 0; i < 2; ++i) check_same_bytes(try_run(rig.client.get()));
    const int n_before = rig.servers[0]->n_calls;
    const std::uint64_t n_won = rig.count("expert_calls_hedges_won");
    from = n_before;
    const Deadline deadline = Deadline::after_ms(30'000);
    while (rig.count("expert_server_losses") == 0 && !deadline.expired())
        check_same_bytes(try_run(rig.client.get()));
    CHECK(rig.count("expert_server_losses") == 1);
    CHECK(rig.count("expert_server_stalls") == 1);
    CHECK(rig.count("expert_calls_hedges_won") <= n_won + 1);
    CHECK(rig.servers[0]->n_calls == n_before + 1);  // it was asked no more
}

TEST_CASE("a connection that breaks off within a message is given up, and the next one works") {
    Rig rig;
    SocketProxy proxy(rig.sockets.endpoint("front"), rig.sockets.endpoint("experts-0"));
    FakeExpertServer& server = rig.add({});
    rig.endpoints[0] = proxy.endpoint();
    server.on_call = [&](const msg::ExpertCall&) {
        // Of an answer that is no sign of life: those take another connection, and go on.
        if (server.n_calls == 20) proxy.stall(1000);
    };
    REQUIRE(rig.connect().has_value());
    for (int i = 0; i < 2; ++i) check_same_bytes(try_run(rig.client.get()));
    CHECK(proxy.n_stalled() == 1);
    CHECK(rig.count("expert_server_losses") == 1);
    CHECK(rig.count("expert_server_silences") == 1);
    CHECK(rig.count("expert_server_stalls") == 0);
    REQUIRE(rig.waits.size() >= 2);
    CHECK(contains(rig.waits.front(), "answers, but nothing has come through the connection"));
    CHECK(rig.waits.back().empty());
}

TEST_CASE("a connection that takes no more for a while is waited for, and the sums are the same") {
    constexpr std::size_t kRows = 2048;
    const auto& config = tiny_model().config;
    SocketDirectory sockets;
    FakeExpertServer server(tiny_model(),
                            {.endpoint = sockets.endpoint("back"), .max_call_rows = 128});
    SocketProxy proxy(sockets.endpoint("front"), sockets.endpoint("back"));
    telemetry::Counters counters;
    ExpertClient::Options options;
    options.needs = {"trunk-0", tiny_model().fingerprint, 1,
                     12,        config.moe.n_experts,     config.moe.latent_size};
    options.endpoints = {proxy.endpoint()};
    options.top_k = config.moe.top_k;
    options.max_rows = kRows;
    options.use_shm = false;
    auto client = ExpertClient::create(std::move(options), counters).value();
    REQUIRE(client->connect().has_value());
    // More than sockets and queues hold on the way.
    std::vector<std::uint32_t> ids(kRows * config.moe.top_k);
    for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = static_cast<std::uint32_t>((i / config.moe.top_k + 5 * i) % config.moe.n_experts);
    const std::vector<float> weights(ids.size(), 0.25F);
    std::vector<float> latent(kRows * config.moe.latent_size);
    for (std::size_t i = 0; i < latent.size(); ++i) latent[i] = static_cast<float>(i % 31) / 64;
    const trunk::Routing routing{3, kRows, config.moe.top_k, ids.data(), weights.data()};
    std::vector<std::int64_t> sums[2];
    for (bool is_held : {true, false}) {
        CAPTURE(is_held);
        sums[is_held].resize(latent.size());
        proxy.hold(is_held);
        // Longer than a send waits for room, and shorter than silence that means an end.
        std::thread release([&] {
            ::poll(nullptr, 0, is_held ? 1400 : 0);
            proxy.hold(false);
        });
        const Status started = client->start(routing, latent);
        release.join();
        REQUIRE_MESSAGE(started.has_value(), started.error().sentence());
        const Status finished = client->finish(sums[is_held]);
        REQUIRE_MESSAGE(finished.has_value(), finished.error().sentence());
    }
    CHECK(sums[0] == sums[1]);
    for (const msg::Counter& counter : counters.snapshot())
        if (counter.name == "expert_server_losses") CHECK(counter.value == 0);
}

TEST_CASE("without a replica there is no hedge, and without the option neither") {
    for (double quantile : {0.5, 0.0}) {
        Rig rig;
        rig.hedge_quantile = quantile;
        rig.add({.share = quantile > 0 ? "0/2" : "all"});
        rig.add({.share = quantile > 0 ? "1/2" : "all"});
        REQUIRE(rig.connect().has_value());
        for (int i = 0; i < 3; ++i) check_same_bytes(try_run(rig.client.get()));
        CHECK(rig.count("expert_calls_hedged") == 0);
    }
}

TEST_CASE(
    "a hedge takes over when the server of its call is lost, and is dropped when its own is") {
    for (std::size_t mortal : {0, 1}) {
        CAPTURE(mortal);
        Rig rig;
        rig.hedge_quantile = 0.9;
        std::atomic<int> from = 1 << 30;
        std::atomic<bool> is_late = false;
        // Both are late; one of them dies meanwhile.
        rig.add({}).fault = [&](int call) {
            if (call < from || is_late.exchange(true)) return Fault::none;
            return Fault::late;
        };
        std::atomic<bool> is_second_late = false;
        rig.add({}).fault = [&](int) {
            return is_late && !is_second_late.exchange(true) ? Fault::late : Fault::none;
        };
        REQUIRE(rig.connect().has_value());
        for (int i = 0; i < 2; ++i) check_same_bytes(try_run(rig.client.get()));
        std::thread killer([&] {
            const Deadline deadline = Deadline::after_ms(10000);
            while (!is_second_late && !deadline.expired()) ::usleep(1000);
            rig.servers[mortal].reset();
        });
        for (int i = 0; i < 8 && !is_second_late; ++i) {
            from = rig.servers[0]->n_calls.load() + 2;
            is_late = false;
            check_same_bytes(try_run(rig.client.get()));
        }
        killer.join();
        check_same_bytes(try_run(rig.client.get()));
        CHECK(rig.count("expert_calls_hedged") > 0);
        CHECK(rig.count("expert_server_losses") == 1);
    }
}

TEST_CASE("waiting for a server takes no CPU") {
    Rig rig;
    rig.wait_ms = 1500;
    rig.add({.share = "0/2"});
    rig.add({.share = "1/2"});
    REQUIRE(rig.connect().has_value());
    rig.servers[1].reset();
    const auto cpu_ms = [] {
        rusage usage{};
        ::getrusage(RUSAGE_SELF, &usage);
        return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
               (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000;
    };
    const auto begin = cpu_ms();
    CHECK_FALSE(try_run(rig.client.get()).has_value());
    // The step itself, up to its first expert, is part of it.
    CHECK(cpu_ms() - begin < 400);
}

TEST_CASE("a stop ends the wait for a server that computes and for one that is gone") {
    Rig rig;
    rig.add({}).fault = [&](int call) {
        if (call == 3) rig.stop = true;
        return call == 3 ? Fault::drop : Fault::none;
    };
    REQUIRE(rig.connect().has_value());
    CHECK(try_run(rig.client.get()).error().code == ErrorCode::cancelled);
    rig.servers[0].reset();
    CHECK(try_run(rig.client.get()).error().code == ErrorCode::cancelled);
}

}  // namespace k3::test
