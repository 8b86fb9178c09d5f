#pragma once
// A whole gateway in the test process, with fake stages around it.

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "services/gateway/service.h"
#include "tests/support/fake_stages.h"
#include "tests/support/gateway_client.h"

namespace k3::gateway {

class GatewayFixture {
  public:
    /// `cuts`: first layers of the trunk stages after the first; the fake model has 9 layers.
    explicit GatewayFixture(std::vector<std::uint32_t> cuts = {})
        : tokenizer(dir.endpoint("tokenizer")), sampler(dir.endpoint("sampler")) {
        constexpr std::uint32_t kLayers = 9;
        cuts.insert(cuts.begin(), 0);
        cuts.push_back(kLayers);
        for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
            const std::string name = cuts.size() == 2 ? "trunk" : "trunk-" + std::to_string(i);
            trunk.push_back(std::make_unique<test::FakeTrunk>(
                dir.endpoint(name), name,
                test::FakeTrunk::Layers{cuts[i], cuts[i + 1] - cuts[i], kLayers}));
            options.stages.trunk.push_back(trunk.back()->endpoint());
        }
        options.stages.tokenizer = tokenizer.endpoint();
        options.stages.sampler = sampler.endpoint();
        options.wait_ms = 10000;
        options.pipeline.call_wait_ms = 10000;
        options.pipeline.step_wait_ms = 10000;
    }

    ~GatewayFixture() {
        stop_gateway();
        tokenizer.stop();
        for (auto& stage : trunk) stage->stop();
        sampler.stop();
    }

    void start_stages() {
        tokenizer.start();
        for (auto& stage : trunk) stage->start();
        sampler.start();
    }

    void start_gateway() {
        transport::Server::Options server_options;
        server_options.endpoint = endpoint();
        server_options.announcement.kind = msg::ServiceKind::gateway;
        server_options.announcement.name = "gateway";
        server_options.max_queue = 4096;
        auto made = transport::Server::create(server_options);
        REQUIRE(made);
        server = std::move(*made);
        counters = std::make_unique<telemetry::Counters>();
        auto created = Service::create(options, *server, *counters);
        REQUIRE(created);
        service = std::move(*created);
        thread_ = std::thread([this] {
            connected = service->connect();
            if (connected.has_value()) service->run();
        });
    }

    void start() {
        start_stages();
        start_gateway();
    }

    void stop_gateway() {
        if (!thread_.joinable()) return;
        server->request_stop();
        thread_.join();
        service.reset();
        server.reset();
    }

    /// For a gateway that ends by itself.
    void join() {
        if (thread_.joinable()) thread_.join();
    }

    std::string endpoint() const { return dir.endpoint("gateway"); }
    test::GatewayClient client() const { return test::GatewayClient(endpoint()); }

    std::uint64_t counter(const std::string& name) const {
        for (const msg::Counter& c : counters->snapshot())
            if (c.name == name) return c.value;
        FAIL("no counter " << name);
        return 0;
    }

    /// Waits until `condition` holds, for 5 seconds at most.
    template <typename Condition>
    static bool eventually(const Condition& condition) {
        const Deadline deadline = Deadline::after_ms(5000);
        while (!condition()) {
            if (deadline.expired()) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return true;
    }

    test::SocketDir dir;
    test::FakeTokenizer tokenizer;
    std::vector<std::unique_ptr<test::FakeTrunk>> trunk;
    test::FakeSampler sampler;
    Service::Options options;
    std::unique_ptr<telemetry::Counters> counters;
    std::unique_ptr<transport::Server> server;
    std::unique_ptr<Service> service;
    Status connected;

  private:
    std::thread thread_;
};

/// The text the fake trunk writes after `prompt`, computed without a gateway.
inline std::vector<std::uint32_t> expected_ids(const test::FakeTrunk& trunk,
                                               std::vector<std::uint32_t> history, std::size_t n) {
    std::vector<std::uint32_t> out;
    for (std::size_t i = 0; i < n; ++i) {
        const std::vector<float> logits = trunk.logits_after(history);
        out.push_back(static_cast<std::uint32_t>(std::max_element(logits.begin(), logits.end()) -
                                                 logits.begin()));
        history.push_back(out.back());
    }
    return out;
}

inline std::vector<std::uint32_t> ids_of(const std::string& text) {
    std::vector<std::uint32_t> out;
    for (const char c : text) out.push_back(static_cast<unsigned char>(c));
    return out;
}

inline std::string text_of(const std::vector<std::uint32_t>& ids) {
    std::string out;
    for (const std::uint32_t id : ids) out += static_cast<char>(id);
    return out;
}

/// A trunk that says `answer` after the prompt, then the stop id for ever. `n_prompt` ids long.
inline std::function<std::uint32_t(const std::vector<std::uint32_t>&)> says(
    std::size_t n_prompt, std::vector<std::uint32_t> answer) {
    return [n_prompt, answer](const std::vector<std::uint32_t>& history) {
        const std::size_t i = history.size() - n_prompt;
        return history.size() >= n_prompt && i < answer.size() ? answer[i]
                                                               : test::FakeTokenizer::kStop;
    };
}

}  // namespace k3::gateway
