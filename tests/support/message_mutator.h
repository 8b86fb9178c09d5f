#pragma once
// Deterministic damage to messages: the same seed gives the same messages on every machine.

#include <cstdint>

#include "common/transport/messages/envelope.h"

namespace k3::test {

class MessageMutator {
  public:
    explicit MessageMutator(std::uint64_t seed) : state_(seed) {}

    /// A frame with one kind of damage: flipped bits, words overwritten with telling values, a cut,
    /// an appendix, exchanged words, another version, or nothing but random bytes.
    msg::Bytes damage(msg::Bytes frame);

    /// The same message with numbers that no service can accept: ids, layers, experts, shapes,
    /// positions, segments and generations far outside, lists that disagree. Well-formed.
    msg::Envelope out_of_range(msg::Envelope envelope);

    std::uint64_t next();                 // splitmix64
    std::uint64_t below(std::uint64_t n)  // n > 0
    {
        return next() % n;
    }

  private:
    std::uint64_t state_;
};

}  // namespace k3::test
