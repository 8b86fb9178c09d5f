#pragma once
// The names of saved sessions, in one place: the launcher and the gateway refuse before anything is
// computed, and the trunk refuses whoever speaks to it directly.

#include <cstddef>
#include <string>
#include <string_view>

#include "common/base/result.h"

namespace k3::model {

inline constexpr std::size_t kMaxSessionNameBytes = 100;

/// In a file's name between the session's and the layers of a stage that has not all of them:
/// "chat-1.layers-0-45".
inline constexpr std::string_view kSessionLayersMark = ".layers-";

/// A name is not a path: 1 to 100 letters, digits, '-', '_' and '.', the first one not a dot.
/// Error: invalid_argument naming it and the rule.
Status check_session_name(const std::string& name);

}  // namespace k3::model
