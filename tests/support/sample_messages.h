#pragma once
// One message of every kind, with every field set to a value of its own: the material of the golden
// messages and of everything that mutates messages.

#include <string>
#include <vector>

#include "common/transport/messages/envelope.h"

namespace k3::test {

struct SampleMessage {
    std::string name;  // of its file in tests/golden/messages, without ".bin"
    msg::Envelope envelope;
};

/// In the order of the schemas. Every alternative of every union occurs at least once.
std::vector<SampleMessage> sample_messages();

}  // namespace k3::test
