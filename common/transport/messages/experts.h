#pragma once
// Plain forms of proto/experts.capnp, which documents every field.

#include <cstdint>
#include <vector>

#include "common/transport/messages/types.h"

namespace k3::msg {

struct Pick {
    std::uint32_t row = 0;
    std::uint32_t expert = 0;
    float weight = 0;
    std::uint32_t rank = 0;
    bool operator==(const Pick&) const = default;
};

struct ExpertCall {
    std::uint32_t layer = 0;
    Tensor rows;
    std::vector<Pick> picks;
    bool reply_shm = false;
    std::uint64_t hint = 0;
    bool operator==(const ExpertCall&) const = default;
};

struct PartialSums {
    Tensor sums;
    std::uint64_t compute_ns = 0;
    std::uint64_t read_ns = 0;
    bool operator==(const PartialSums&) const = default;
};

struct Prefetch {
    std::uint32_t layer = 0;
    std::vector<std::uint32_t> experts;
    std::vector<std::uint32_t> ranks;
    std::uint64_t number = 0;
    bool operator==(const Prefetch&) const = default;
};

}  // namespace k3::msg
