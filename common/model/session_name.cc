#include "common/model/session_name.h"

#include <algorithm>

namespace k3::model {

namespace {

bool is_legal_in_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
}

}  // namespace

Status check_session_name(const std::string& name) {
    if (!name.empty() && name.size() <= kMaxSessionNameBytes && name.front() != '.' &&
        std::all_of(name.begin(), name.end(), is_legal_in_name))
        return Status::ok();
    return Error{ErrorCode::invalid_argument, "'" + name + "' cannot be the name of a session",
                 "use 1 to " + std::to_string(kMaxSessionNameBytes) +
                     " letters, digits, - _ and ., the first one not a dot"};
}

}  // namespace k3::model
