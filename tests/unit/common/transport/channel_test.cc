#include "common/transport/channel.h"

#include <doctest/doctest.h>

#include <utility>

#include "tests/unit/common/transport/fixtures.h"

using namespace k3;
using namespace k3::transport;
using namespace k3::transport::test;

namespace {

const std::vector<std::uint32_t> kAbc = {97, 98, 99};

msg::Encode text(const std::string& text) { return {text, false, false}; }

}  // namespace

TEST_CASE("a call is answered, and its frames come back as they were") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    Worker worker(*server, echo);
    auto channel = make_channel(sockets.endpoint("s"));
    greet(*channel);
    for (std::size_t bytes : {0, 1, 7, 100, 8191, 8192, 300000}) {
        msg::Bytes frame(bytes);
        for (std::size_t i = 0; i < bytes; ++i) frame[i] = static_cast<std::byte>(i * 7);
        Result<Reply> reply = channel->call(text("abc"), {frame}, Deadline::after_ms(10000));
        REQUIRE(reply.has_value());
        CHECK(std::get<msg::Encoded>(reply->body).ids == kAbc);
        REQUIRE(reply->frames.size() == 1);
        CHECK(reply->frames[0] == frame);
    }
}

TEST_CASE("a request before hello is refused") {
    Sockets sockets;
    auto server = make_server(sockets.endpoint("s"));
    auto channel = make_channel(sockets.endpoint("s"));
    Result<Reply> reply = channel->call(text("abc"), {}, Deadline::after_ms(10000));
    REQUIRE_FALSE(reply.has_value());
    CHECK(reply.error().code == ErrorCode::unavailable);
    CHECK(reply.error().message.find("greeted") != std::string::npos);
}
