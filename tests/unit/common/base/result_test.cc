// Results and their macros, error sentences, exit codes, deadlines, descriptors.

#include "common/base/result.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <set>
#include <string>

#include "common/base/deadline.h"
#include "common/base/fd.h"

namespace k3 {
namespace {

Error sample_error() { return {ErrorCode::corrupt, "byte 7 is 255", "copy it again"}; }

Result<int> half(int n) {
    if (n % 2 != 0) return sample_error();
    return n / 2;
}

Status only_even(int n) {
    RETURN_IF_ERROR(half(n));
    return Status::ok();
}

Result<std::string> quarter(int n, int& n_reached) {
    ASSIGN_OR_RETURN(int once, half(n));
    ++n_reached;
    ASSIGN_OR_RETURN(const int twice, half(once));
    ++n_reached;
    RETURN_IF_ERROR(only_even(twice));
    return std::to_string(twice);
}

TEST_CASE("a result holds a value or an error") {
    Result<int> good = 4;
    CHECK(good.has_value());
    CHECK(static_cast<bool>(good));
    CHECK(*good == 4);
    Result<int> bad = sample_error();
    CHECK(!bad.has_value());
    CHECK(bad.error().message == "byte 7 is 255");
    Status ok;
    CHECK(ok.has_value());
    Status failed = sample_error();
    CHECK(!failed);
    CHECK(failed.error().code == ErrorCode::corrupt);
}

TEST_CASE("a result of a type that cannot be copied is moved out") {
    auto make = []() -> Result<std::unique_ptr<int>> { return std::make_unique<int>(3); };
    auto use = [&]() -> Result<int> {
        ASSIGN_OR_RETURN(std::unique_ptr<int> owned, make());
        return *owned;
    };
    CHECK(*use() == 3);
    Result<std::string> text = std::string("abc");
    CHECK(text->size() == 3);
    CHECK(std::move(text).value() == "abc");
}

TEST_CASE("the macros stop at the first error and hand it on unchanged") {
    int n_reached = 0;
    CHECK(*quarter(16, n_reached) == "4");
    CHECK(n_reached == 2);
    n_reached = 0;
    auto early = quarter(6, n_reached);
    REQUIRE(!early);
    CHECK(n_reached == 1);
    CHECK(early.error().message == "byte 7 is 255");
    CHECK(early.error().remedy == "copy it again");
    auto late = quarter(4, n_reached);
    CHECK(!late.has_value());
}

TEST_CASE("an error reads as a sentence and takes context in front") {
    CHECK(sample_error().sentence() == "byte 7 is 255; copy it again");
    CHECK(Error{ErrorCode::io, "disk gone", ""}.sentence() == "disk gone");
    Error deeper = sample_error().with_context("layer 41").with_context("shard 2");
    CHECK(deeper.sentence() == "shard 2: layer 41: byte 7 is 255; copy it again");
    CHECK(deeper.code == ErrorCode::corrupt);
}

TEST_CASE("every code has a name of its own and a documented exit code") {
    std::set<std::string> names;
    for (std::uint8_t i = 0; i < kErrorCodeCount; ++i) {
        auto code = static_cast<ErrorCode>(i);
        names.insert(std::string(to_string(code)));
        CHECK(exit_code(code) != kExitOk);
    }
    CHECK(names.size() == kErrorCodeCount);
    CHECK(!names.contains("unknown"));
    CHECK(to_string(static_cast<ErrorCode>(kErrorCodeCount)) == "unknown");
    CHECK(exit_code(ErrorCode::invalid_argument) == 2);
    CHECK(exit_code(ErrorCode::corrupt) == 3);
    CHECK(exit_code(ErrorCode::not_found) == 3);
    CHECK(exit_code(ErrorCode::incompatible) == 3);
    CHECK(exit_code(ErrorCode::io) == 4);
    CHECK(exit_code(ErrorCode::resource_exhausted) == 4);
    CHECK(exit_code(ErrorCode::unavailable) == 5);
    CHECK(exit_code(ErrorCode::deadline_exceeded) == 5);
    CHECK(exit_code(ErrorCode::cancelled) == 130);
    CHECK(exit_code(ErrorCode::internal) == 1);
}

TEST_CASE("a deadline counts down, never below zero") {
    Deadline past = Deadline::after_ms(0);
    CHECK(past.expired());
    CHECK(past.remaining_ms() == 0);
    CHECK(Deadline::after_ms(-5).remaining_ms() == 0);
    Deadline soon = Deadline::after_ms(60'000);
    CHECK(!soon.expired());
    CHECK(soon.remaining_ms() > 0);
    CHECK(soon.remaining_ms() <= 60'000);
    CHECK(soon.min(past).at() == past.at());
    CHECK(past.min(soon).at() == past.at());
}

TEST_CASE("a deadline that means for ever does not wrap into the past") {
    Deadline never = Deadline::after_ms(std::numeric_limits<std::int64_t>::max());
    CHECK(!never.expired());
    CHECK(never.remaining_ms() > std::int64_t{1000} * 3600 * 24 * 30);
}

TEST_CASE("a descriptor is closed once, by its last owner") {
    int raw = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    REQUIRE(raw >= 0);
    auto is_open = [raw] { return ::fcntl(raw, F_GETFD) >= 0; };
    {
        Fd first(raw);
        Fd second(std::move(first));
        CHECK(!first.valid());  // NOLINT(bugprone-use-after-move): that is the promise
        CHECK(second.get() == raw);
        first = std::move(second);
        CHECK(is_open());
        CHECK(first.release() == raw);
        CHECK(!first.valid());
        CHECK(is_open());
        first = Fd(raw);
    }
    CHECK(!is_open());
    CHECK(!Fd().valid());
}

}  // namespace
}  // namespace k3
