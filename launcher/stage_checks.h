#pragma once
// Why a stage cannot be worked with: what it announces, or what it did not do in time.

#include <optional>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/result.h"
#include "common/transport/messages/control.h"
#include "launcher/supervised_stage.h"
#include "launcher/supervisor_options.h"

namespace k3::launcher {

/// Another kind of service than the file says, or another checkpoint than that of `all` the others.
std::optional<Error> check_announcement(const SupervisedStage& stage,
                                        const msg::Announcement& announcement,
                                        const std::vector<SupervisedStage>& all);

/// A stage that is coming has used up its time: an attached one without any answer, one of ours
/// without any progress. A debugger in front has no limit.
std::optional<Error> check_start(const SupervisedStage& stage, const SupervisorOptions& options,
                                 Clock::time_point now);

}  // namespace k3::launcher
