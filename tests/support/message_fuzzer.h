#pragma once
// Throws thousands of bad messages at a service and asks whether it is still there.
//
//     FuzzOptions options;
//     options.endpoint = server.endpoint();
//     options.requests = {...};  // what this service answers, with shapes and ids that fit it
//     FuzzReport report = fuzz_service(options);
//     CHECK_MESSAGE(report.alive, report.problem);
//
// Each message is a request (those given, and one of every kind of the protocol) after one of these
// damages: flipped bits, overwritten words, a cut or appendix, another version, random bytes;
// numbers far out of range in a well-formed message; frames that are missing, of another size, or
// more than belong there. What the damage happens to turn into a valid request is made harmless: a
// Shutdown is not sent, a Submit generates two tokens at most, and sessions are dropped at the end.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/transport/curve_keys.h"
#include "common/transport/messages/envelope.h"

namespace k3::test {

struct FuzzRequest {
    msg::Body body;
    std::vector<msg::Bytes> frames;
};

struct FuzzOptions {
    std::string endpoint;
    std::vector<FuzzRequest> requests;
    int n_messages = 2000;
    std::uint64_t seed = 20261129;
    std::int64_t settle_ms = 60000;  // for the service to work off what it has accepted
    // On tcp: of a client that is let in.
    std::shared_ptr<const transport::CurveKeys> keys = nullptr;
    bool by_lane = false;  // through a fast lane, whose heads are damaged too; not all fit one
};

struct FuzzReport {
    int n_sent = 0;
    int n_lane_answers = 0;  // by_lane: of these, answered in the lane, be it with an error
    int n_malformed = 0;     // messages the service could not decode, by its own counter
    int n_failures =
        0;  // error replies that came back: a server drops those of a client that floods it
    int n_answers = 0;    // other replies
    bool alive = false;   // same instance as before, answers Ping, and its queue has run empty
    std::string problem;  // why not
};

/// Greets nobody and needs no hello. The service must be ready when this is called.
FuzzReport fuzz_service(const FuzzOptions& options);

}  // namespace k3::test
