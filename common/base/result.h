#pragma once
// Result<T>: a value or an Error, shaped like C++23's std::expected (which g++ 12 lacks).

#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "common/base/check.h"
#include "common/base/error.h"

namespace k3 {

template <typename T>
class [[nodiscard]] Result {
  public:
    using value_type = T;

    // Not explicit, so that `return value;` and `return Error{...};` read like std::expected.
    Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
    Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

    bool has_value() const noexcept { return state_.index() == 0; }
    explicit operator bool() const noexcept { return has_value(); }

    T& value() & {
        K3_CHECK(has_value(), error().message);
        return std::get<0>(state_);
    }
    const T& value() const& {
        K3_CHECK(has_value(), error().message);
        return std::get<0>(state_);
    }
    T&& value() && {
        K3_CHECK(has_value(), error().message);
        return std::get<0>(std::move(state_));
    }
    T& operator*() & { return value(); }
    const T& operator*() const& { return value(); }
    T&& operator*() && { return std::move(*this).value(); }
    T* operator->() { return &value(); }
    const T* operator->() const { return &value(); }

    const Error& error() const& {
        K3_CHECK(!has_value(), "a value, no error");
        return std::get<1>(state_);
    }
    Error&& error() && {
        K3_CHECK(!has_value(), "a value, no error");
        return std::get<1>(std::move(state_));
    }

  private:
    std::variant<T, Error> state_;
};

/// A Result without a value.
class [[nodiscard]] Status {
  public:
    Status() = default;
    Status(Error error) : error_(std::move(error)) {}

    static Status ok() { return {}; }
    bool has_value() const noexcept { return !error_.has_value(); }
    explicit operator bool() const noexcept { return has_value(); }
    const Error& error() const& {
        K3_CHECK(!has_value(), "ok, no error");
        return *error_;
    }
    Error&& error() && {
        K3_CHECK(!has_value(), "ok, no error");
        return *std::move(error_);
    }

  private:
    std::optional<Error> error_;
};

}  // namespace k3

#define K3_CONCAT_INNER(a, b) a##b
#define K3_CONCAT(a, b) K3_CONCAT_INNER(a, b)

/// Returns the error of `expression` (a Status or Result) to the caller, if it is one.
#define RETURN_IF_ERROR(expression)                                        \
    do {                                                                   \
        auto k3_status_ = (expression);                                    \
        if (!k3_status_.has_value()) return std::move(k3_status_).error(); \
    } while (false)

// NOLINTBEGIN(bugprone-macro-parentheses): a declaration cannot stand in parentheses
/// `ASSIGN_OR_RETURN(auto x, make_x());` declares x from the value, or returns the error.
#define ASSIGN_OR_RETURN(declaration, expression) \
    ASSIGN_OR_RETURN_INNER(K3_CONCAT(k3_result_, __LINE__), declaration, expression)
#define ASSIGN_OR_RETURN_INNER(temporary, declaration, expression)   \
    auto temporary = (expression);                                   \
    if (!temporary.has_value()) return std::move(temporary).error(); \
    declaration = std::move(temporary).value()
// NOLINTEND(bugprone-macro-parentheses)
