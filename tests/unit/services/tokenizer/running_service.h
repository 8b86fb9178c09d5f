#pragma once
// A tokenizer service on a socket of its own, served by a thread until this goes away.

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>

#include "common/transport/channel.h"
#include "common/transport/server.h"
#include "services/tokenizer/service.h"
#include "tests/support/checkpoint_copy.h"

namespace k3::test {

class RunningService {
  public:
    explicit RunningService(tokenizer::Service& service) {
        transport::Server::Options options;
        options.endpoint = endpoint();
        options.announcement.kind = msg::ServiceKind::tokenizer;
        options.announcement.name = "tokenizer";
        auto server = transport::Server::create(options);
        if (!server) FAIL(server.error().sentence());
        server_ = std::move(server).value();
        server_->set_statistics([&service] { return service.counters().snapshot(); });
        msg::Announcement announcement = options.announcement;
        announcement.fingerprint = service.fingerprint();
        announcement.facts = service.facts();
        server_->set_ready(std::move(announcement));
        thread_ = std::thread([this, &service] {
            while (!server_->stopping())
                if (auto request = server_->next(Deadline::after_ms(1000)))
                    service.handle(std::move(*request));
        });
    }
    ~RunningService() {
        server_->request_stop();
        thread_.join();
    }
    RunningService(const RunningService&) = delete;
    RunningService& operator=(const RunningService&) = delete;

    std::string endpoint() const { return "ipc://" + (dir_.path() / "t").string(); }

    /// A channel that has said hello.
    std::unique_ptr<transport::Channel> connect() const {
        transport::Channel::Options options;
        options.endpoint = endpoint();
        options.peer = "tokenizer";
        auto channel = transport::Channel::create(std::move(options));
        if (!channel) FAIL(channel.error().sentence());
        auto hello = (*channel)->hello({}, Deadline::after_ms(10'000));
        if (!hello) FAIL(hello.error().sentence());
        return std::move(channel).value();
    }

  private:
    TempDir dir_;
    std::unique_ptr<transport::Server> server_;
    std::thread thread_;
};

}  // namespace k3::test
