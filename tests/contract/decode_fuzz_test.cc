// Tens of thousands of damaged messages: decoding answers each with a value or an error.

#include <doctest/doctest.h>

#include <cstdlib>
#include <string>

#include "common/transport/messages/envelope.h"
#include "tests/support/message_mutator.h"
#include "tests/support/sample_messages.h"

using namespace k3;

namespace {

constexpr std::uint64_t kSeed = 20261129;
constexpr int kMutations = 40000;

}  // namespace

TEST_CASE("damaged messages decode to a value or an error, and values encode again") {
    MESSAGE("seed " << kSeed << ", mutations " << kMutations);
    test::MessageMutator mutator(kSeed);
    const std::vector<test::SampleMessage> samples = test::sample_messages();
    int n_valid = 0;
    int n_refused = 0;
    for (int i = 0; i < kMutations; ++i) {
        const auto& sample = samples[static_cast<std::size_t>(i) % samples.size()];
        const msg::Bytes damaged = mutator.damage(msg::encode(sample.envelope));
        std::uint64_t hint = 0;
        Result<msg::Envelope> envelope = msg::decode(damaged, hint);
        if (!envelope.has_value()) {
            ++n_refused;
            REQUIRE_FALSE(envelope.error().message.empty());
            continue;
        }
        ++n_valid;
        const msg::Bytes again = msg::encode(*envelope);
        Result<msg::Envelope> back = msg::decode(again, hint);
        REQUIRE_MESSAGE(back.has_value(), sample.name << " " << i);
        REQUIRE(msg::encode(*back) == again);
    }
    MESSAGE("still valid: " << n_valid << ", refused: " << n_refused);
    CHECK(n_valid > kMutations / 20);
    CHECK(n_refused > kMutations / 4);
}
