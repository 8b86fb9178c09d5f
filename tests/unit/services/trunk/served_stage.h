#pragma once
// A stage of tiny-k3 behind a real server and a channel, experts computed in the test process.

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/transport/channel.h"
#include "common/transport/tensor_io.h"
#include "services/trunk/ram_weights.h"
#include "services/trunk/service.h"
#include "tests/unit/services/trunk/fake_expert_server.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

/// One stage of tiny-k3 served on a thread.
class ServedStage {
  public:
    /// `session_dir`: of saved sessions; empty: it keeps none.
    ServedStage(trunk::LayerRange range, bool use_shm,
                const std::filesystem::path& session_dir = {})
        : experts_(tiny_model(), kernels::kernels()),
          sessions_(tiny_model().config, range, 2,
                    {4, std::uint64_t{1} << 20U, tiny_model().config.max_positions}),
          saved_({session_dir, 0},
                 {tiny_model().fingerprint, range, tiny_model().config.n_layers,
                  tiny_model().config.mla.lora_norm_eps},
                 sessions_.layout(), tiny_model().config.max_positions) {
        kernels::set_threads(2);
        weights_ =
            trunk::RamWeights::load(*tiny_model().checkpoint, tiny_model().config, range, nullptr)
                .value();
        stage_ = trunk::Stage::create(tiny_model().config, *weights_, experts_, kernels::kernels(),
                                      {range, 16, 2})
                     .value();
        if (use_shm)
            arena_ = transport::Arena::create(
                         {transport::segment_name(7, "trunk-" + std::to_string(std::rand())),
                          16 * 768 * 4, 4})
                         .value();
        service_ = std::make_unique<trunk::Service>(*stage_, sessions_, saved_, experts_,
                                                    arena_.get(), 4, counters_);
        transport::Server::Options options;
        options.endpoint = sockets_.endpoint("trunk");
        options.announcement.kind = msg::ServiceKind::trunk;
        options.announcement.name = "trunk-0";
        server_ = transport::Server::create(std::move(options)).value();
        server_->set_statistics([this] { return counters_.snapshot(); });
        msg::Announcement announcement;
        announcement.fingerprint = tiny_model().fingerprint;
        announcement.facts = service_->facts();
        if (arena_) announcement.arena = arena_->probe();
        server_->set_ready(std::move(announcement));
        thread_ = std::thread([this] {
            while (!server_->stopping()) {
                auto request = server_->next(Deadline::after_ms(200));
                if (request.has_value()) service_->handle(std::move(*request));
            }
        });
        channel_ =
            transport::Channel::create({.endpoint = server_->endpoint(), .peer = "trunk"}).value();
        announcement_ = channel_->hello({}, soon()).value();
    }
    ~ServedStage() {
        server_->request_stop();
        thread_.join();
    }

    static Deadline soon() { return Deadline::after_ms(60000); }
    Result<transport::Reply> ask(msg::Body body, std::vector<msg::Bytes> frames = {}) {
        return channel_->call(std::move(body), std::move(frames), soon());
    }
    /// The error of a request that must be refused.
    Error refusal(msg::Body body, std::vector<msg::Bytes> frames = {}) {
        auto reply = ask(std::move(body), std::move(frames));
        if (reply.has_value()) FAIL("not refused: " << std::string(msg::name_of(reply->body)));
        return reply.error();
    }
    void open(std::uint64_t session, std::uint64_t max_positions = 32) {
        REQUIRE(ask(msg::OpenSession{session, max_positions}).has_value());
    }
    Result<std::vector<float>> step(msg::Step body, std::vector<msg::Bytes> frames = {}) {
        ASSIGN_OR_RETURN(transport::Reply reply, ask(std::move(body), std::move(frames)));
        const auto& result = std::get<msg::StepResult>(reply.body);
        is_shm_ = std::holds_alternative<msg::ShmPayload>(result.output.payload);
        ASSIGN_OR_RETURN(msg::Bytes bytes,
                         transport::take_tensor(result.output, "output", msg::DType::f32,
                                                result.output.shape, reply.frames, reader_));
        const auto values = transport::view_as<float>(bytes);
        return std::vector<float>(values.begin(), values.end());
    }
    std::uint64_t count(const std::string& name) const {
        for (const msg::Counter& counter : counters_.snapshot())
            if (counter.name == name) return counter.value;
        return std::numeric_limits<std::uint64_t>::max();
    }

    const std::string& endpoint() const { return server_->endpoint(); }
    const msg::TrunkFacts& facts() const { return std::get<msg::TrunkFacts>(announcement_.facts); }
    LocalExperts& experts() { return experts_; }
    bool is_shm() const { return is_shm_; }  // of the last output

  private:
    SocketDirectory sockets_;
    telemetry::Counters counters_;
    LocalExperts experts_;
    trunk::SessionTable sessions_;
    trunk::SessionDirectory saved_;
    std::unique_ptr<trunk::RamWeights> weights_;
    std::unique_ptr<trunk::Stage> stage_;
    std::unique_ptr<transport::Arena> arena_;
    std::unique_ptr<trunk::Service> service_;
    std::unique_ptr<transport::Server> server_;
    std::thread thread_;
    std::unique_ptr<transport::Channel> channel_;
    transport::ArenaReader reader_;
    msg::Announcement announcement_;
    bool is_shm_ = false;
};

}  // namespace k3::test
