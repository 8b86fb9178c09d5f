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
};

struct ExpertCall {
    std::uint32_t layer = 0;
    Tensor rows;
    std::vector<Pick> picks;
    bool reply_shm = false;
};

struct PartialSums {
    Tensor sums;
    std::uint64_t compute_ns = 0;
    std::uint64_t read_ns = 0;
};

struct Prefetch {
    std::uint32_t layer = 0;
    std::vector<std::uint32_t> experts;
    std::vector<std::uint32_t> ranks;
};

}  // namespace k3::msg
