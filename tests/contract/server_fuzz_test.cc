// A server under thousands of bad messages. The services' own tests do the same with real handlers.

#include <doctest/doctest.h>

#include <thread>

#include "common/transport/server.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/message_fuzzer.h"

using namespace k3;

TEST_CASE("a server survives thousands of bad messages and answers the next good one") {
    test::TempDir folder;
    transport::Server::Options options;
    options.endpoint = "ipc://" + (folder.path() / "s").string();
    options.announcement.name = "echo";
    auto server = transport::Server::create(options);
    REQUIRE(server.has_value());
    (*server)->set_ready({});
    std::thread worker([&] {
        while (!(*server)->stopping()) {
            auto request = (*server)->next(Deadline::after_ms(1000));
            if (request) request->responder.send(msg::Done{});
        }
    });
    test::FuzzOptions fuzz;
    fuzz.endpoint = options.endpoint;
    fuzz.requests = {
        {msg::ExpertCall{1, {msg::DType::f32, {2, 8}, msg::InlinePayload{1}}, {}, true},
         {msg::Bytes(64)}}};
    fuzz.n_messages = 4000;
    test::FuzzReport report = test::fuzz_service(fuzz);
    MESSAGE("sent " << report.n_sent << ", malformed " << report.n_malformed << ", failures "
                    << report.n_failures << ", answers " << report.n_answers);
    CHECK_MESSAGE(report.alive, report.problem);
    CHECK(report.n_sent == 4000);
    CHECK(report.n_malformed > 1000);
    CHECK(report.n_failures > 0);
    CHECK(report.n_answers > 500);
    (*server)->request_stop();
    worker.join();
}
