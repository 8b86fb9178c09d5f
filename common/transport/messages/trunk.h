#pragma once
// Plain forms of proto/trunk.capnp, which documents every field.

#include <cstdint>
#include <vector>

#include "common/transport/messages/types.h"

namespace k3::msg {

struct OpenSession {
    std::uint64_t session = 0;
    std::uint64_t max_positions = 0;
    bool operator==(const OpenSession&) const = default;
};

struct ForkSession {
    std::uint64_t source = 0;
    std::uint64_t target = 0;
    std::uint64_t max_positions = 0;
    bool operator==(const ForkSession&) const = default;
};

struct DropSession {
    std::uint64_t session = 0;
    bool operator==(const DropSession&) const = default;
};

struct StepRow {
    std::uint64_t session = 0;
    std::uint64_t position = 0;
    std::uint32_t token = 0;
    bool operator==(const StepRow&) const = default;
};

struct Step {
    std::vector<StepRow> rows;
    Tensor hidden;
    std::vector<std::uint32_t> want;
    bool reply_shm = false;
    bool operator==(const Step&) const = default;
};

struct StepResult {
    Tensor output;
    std::uint64_t compute_ns = 0;
    std::uint64_t expert_wait_ns = 0;
    bool operator==(const StepResult&) const = default;
};

}  // namespace k3::msg
