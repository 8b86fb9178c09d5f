#pragma once
// Checks for what only a bug can break. Input from messages, files or flags becomes an Error
// before any check can see it.

#include <string_view>

namespace k3 {

/// Prints the failed condition with its place and values to stderr and aborts; the launcher
/// restarts the process, and pure calls are repeated.
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               std::string_view detail) noexcept;

}  // namespace k3

/// Stays on in release. The second argument is a string with the values, built only on failure.
#define K3_CHECK(condition, detail)                                       \
    do {                                                                  \
        if (!(condition)) [[unlikely]]                                    \
            ::k3::check_failed(__FILE__, __LINE__, #condition, (detail)); \
    } while (false)

/// For inner loops: gone when NDEBUG is set.
#ifdef NDEBUG
#define K3_DCHECK(condition, detail) \
    do {                             \
    } while (false)
#else
#define K3_DCHECK(condition, detail) K3_CHECK(condition, detail)
#endif
