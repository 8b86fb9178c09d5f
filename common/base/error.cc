#include "common/base/error.h"

namespace k3 {

std::string_view to_string(ErrorCode code) noexcept {
    switch (code) {
        case ErrorCode::invalid_argument:
            return "invalid_argument";
        case ErrorCode::not_found:
            return "not_found";
        case ErrorCode::corrupt:
            return "corrupt";
        case ErrorCode::io:
            return "io";
        case ErrorCode::unavailable:
            return "unavailable";
        case ErrorCode::deadline_exceeded:
            return "deadline_exceeded";
        case ErrorCode::resource_exhausted:
            return "resource_exhausted";
        case ErrorCode::stale:
            return "stale";
        case ErrorCode::incompatible:
            return "incompatible";
        case ErrorCode::unsupported:
            return "unsupported";
        case ErrorCode::cancelled:
            return "cancelled";
        case ErrorCode::internal:
            return "internal";
    }
    return "unknown";
}

Error Error::with_context(std::string_view context) && {
    message.insert(0, std::string(context) + ": ");
    return std::move(*this);
}

std::string Error::sentence() const {
    if (remedy.empty()) return message;
    return message + "; " + remedy;
}

int exit_code(ErrorCode code) noexcept {
    switch (code) {
        case ErrorCode::invalid_argument:
        case ErrorCode::unsupported:
            return kExitUsage;
        case ErrorCode::not_found:
        case ErrorCode::corrupt:
        case ErrorCode::incompatible:
            return kExitModel;
        case ErrorCode::io:
        case ErrorCode::resource_exhausted:
            return kExitResources;
        case ErrorCode::unavailable:
        case ErrorCode::deadline_exceeded:
            return kExitUnavailable;
        case ErrorCode::cancelled:
            return kExitInterrupted;
        case ErrorCode::stale:
        case ErrorCode::internal:
            return kExitFailed;
    }
    return kExitFailed;
}

}  // namespace k3
