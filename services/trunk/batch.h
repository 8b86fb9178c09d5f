#pragma once
// The rows of one step, as the layers see them.

#include <cstddef>
#include <cstdint>
#include <span>

#include "services/trunk/session.h"

namespace k3::trunk {

/// One row: the next position of a session.
struct StepRow {
    Session* session = nullptr;
    std::uint64_t position = 0;
    std::uint32_t token = 0;  // first stage only
};

/// The rows of one session in order of position, as indices into the step's rows.
struct SessionRun {
    Session* session = nullptr;
    std::span<const std::uint32_t> rows;
};

/// Row-wise operations take all rows at once; what carries state goes through `runs`.
struct Batch {
    std::span<const StepRow> rows;
    std::span<const SessionRun> runs;
    std::size_t n_rows() const noexcept { return rows.size(); }
};

}  // namespace k3::trunk
