#pragma once
// Plain forms of proto/trunk.capnp, which documents every field.

#include <cstdint>
#include <string>
#include <vector>

#include "common/transport/messages/types.h"

namespace k3::msg {

struct OpenSession {
    std::uint64_t session = 0;
    std::uint64_t max_positions = 0;
    std::string save_as = {};  // empty: it will not be saved
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

struct SaveSession {
    std::uint64_t session = 0;
    std::string name;
    std::vector<std::uint32_t> ids;
    bool operator==(const SaveSession&) const = default;
};

struct SavedSession {
    std::uint64_t bytes = 0;
    bool operator==(const SavedSession&) const = default;
};

struct LoadSession {
    std::uint64_t session = 0;
    std::uint64_t max_positions = 0;
    std::string name;
    std::vector<std::uint32_t> ids;
    std::string save_as;  // empty: it will not be saved
    bool operator==(const LoadSession&) const = default;
};

struct LoadedSession {
    std::uint64_t n_ids = 0;
    std::uint64_t n_agreed = 0;
    std::uint64_t position = 0;  // n_ids or 0
    bool operator==(const LoadedSession&) const = default;
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
