#pragma once
// A Step message checked against what this stage holds, before anything is touched: a refused step
// leaves every session as it was.

#include <cstdint>
#include <vector>

#include "common/base/result.h"
#include "common/transport/arena.h"
#include "common/transport/messages/trunk.h"
#include "services/trunk/session.h"
#include "services/trunk/stage.h"

namespace k3::trunk {

/// Kept and reused, for its memory.
class StepRequest {
  public:
    /// Errors: invalid_argument (number of rows, token, want, hidden), not_found (session),
    /// unavailable (poisoned session), stale (position is not the next one), resource_exhausted
    /// (position beyond the session's), unsupported (image placeholder), those of shared memory.
    Status read(const msg::Step& step, std::vector<msg::Bytes>& frames,
                transport::ArenaReader& reader, const Stage& stage, SessionTable& sessions);

    /// Of the last step that was read; valid until the next.
    StepInput input() const noexcept;

  private:
    Status read_rows(const msg::Step& step, const Stage& stage, SessionTable& sessions);
    Status read_hidden(const msg::Step& step, std::vector<msg::Bytes>& frames,
                       transport::ArenaReader& reader, const Stage& stage);
    Status read_want(const msg::Step& step);

    struct Next {
        Session* session;
        std::uint64_t position;
    };
    std::vector<StepRow> rows_;
    std::vector<Next> next_;
    msg::Bytes hidden_;
    std::vector<std::uint32_t> wanted_;
};

}  // namespace k3::trunk
