#include "tests/unit/common/transport/fixtures.h"

#include <doctest/doctest.h>

#include <utility>

namespace k3::transport::test {

Server::Options server_options(const std::string& endpoint, const std::string& name) {
    Server::Options options;
    options.endpoint = endpoint;
    options.announcement.kind = msg::ServiceKind::tokenizer;
    options.announcement.name = name;
    return options;
}

std::unique_ptr<Server> make_server(const std::string& endpoint, bool ready) {
    Result<std::unique_ptr<Server>> server = Server::create(server_options(endpoint));
    REQUIRE_MESSAGE(server.has_value(), (server.has_value() ? "" : server.error().message));
    if (ready) (*server)->set_ready({});
    return std::move(server).value();
}

std::unique_ptr<Channel> make_channel(const std::string& endpoint) {
    Channel::Options options;
    options.endpoint = endpoint;
    options.peer = "echo";
    Result<std::unique_ptr<Channel>> channel = Channel::create(std::move(options));
    REQUIRE_MESSAGE(channel.has_value(), (channel.has_value() ? "" : channel.error().message));
    return std::move(channel).value();
}

msg::Announcement greet(Channel& channel) {
    Result<msg::Announcement> answer = channel.hello({}, Deadline::after_ms(10000));
    REQUIRE_MESSAGE(answer.has_value(), (answer.has_value() ? "" : answer.error().message));
    return std::move(answer).value();
}

Worker::Worker(Server& server, Handler handler)
    : server_(server), thread_([this, handler = std::move(handler)] {
          while (!server_.stopping())
              if (auto request = server_.next(Deadline::after_ms(1000))) handler(*request);
      }) {}

Worker::~Worker() {
    server_.request_stop();
    thread_.join();
}

void echo(Request& request) {
    const auto* encode = std::get_if<msg::Encode>(&request.envelope.body);
    if (encode == nullptr) {
        request.responder.send_error(
            {ErrorCode::unsupported,
             std::string(msg::name_of(request.envelope.body)) + " is not for this service", ""});
        return;
    }
    msg::Encoded reply;
    for (unsigned char c : encode->text) reply.ids.push_back(c);
    request.responder.send(std::move(reply), std::move(request.frames));
}

}  // namespace k3::transport::test
