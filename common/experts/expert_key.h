#pragma once
// Which expert, how a call wants it, what it is worth.

#include <cstdint>

namespace k3::experts {

struct ExpertKey {
    std::uint32_t layer = 0;  // zero-based, of the whole model
    std::uint32_t expert = 0;
    bool operator==(const ExpertKey&) const = default;
};

/// One expert that a call uses, with its place in the router's order: the best one over the call's
/// rows, 0 = highest score.
struct ExpertUse {
    std::uint32_t expert = 0;
    std::uint32_t rank = 0;
};

/// Larger values stay longer; what a value means is known to the policy that gave it.
struct KeptExpert {
    ExpertKey key;
    double value = 0;
};

}  // namespace k3::experts
