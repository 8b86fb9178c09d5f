// How long calls take, and when one is late.

#include "services/trunk/service_times.h"

#include <doctest/doctest.h>

namespace k3::test {

namespace {

using trunk::FadingQuantiles;
using trunk::ServiceTimes;

constexpr std::uint64_t kUs = 1000;
constexpr std::uint64_t kMs = 1000 * kUs;

/// Calls of 1 to 16 picks of 100 us each, a way of 50 us, every 100th ten times as slow.
ServiceTimes steady() {
    ServiceTimes times;
    for (std::uint64_t i = 1; i <= 400; ++i) {
        const std::uint64_t n = 1 + i % 16;
        const std::uint64_t slow = i % 100 == 0 ? 10 : 1;
        times.add({n, n * 100 * kUs, 0, slow * (n * 100 + 50) * kUs});
    }
    return times;
}

}  // namespace

TEST_CASE("quantiles lie within a quarter above the value, whatever its size") {
    for (double scale : {1e-3, 1.0, 1e9}) {
        FadingQuantiles quantiles;
        for (int i = 1; i <= 900; ++i) quantiles.add(static_cast<float>(i * scale));
        for (double q : {0.01, 0.5, 0.9, 0.99, 1.0}) {
            CAPTURE(q);
            CHECK(quantiles.quantile(q) >= 900 * q * scale * 0.999);
            CHECK(quantiles.quantile(q) <= 900 * q * scale * 1.26);
        }
    }
    CHECK(FadingQuantiles().quantile(0.5) == 0);
}

TEST_CASE("old values fade out") {
    FadingQuantiles quantiles;
    for (int i = 0; i < 1000; ++i) quantiles.add(1);
    for (int i = 0; i < 3000; ++i) quantiles.add(100);
    CHECK(quantiles.quantile(0.2) >= 100);
}

TEST_CASE("zero and what no clock measures are values like others") {
    FadingQuantiles quantiles;
    quantiles.add(0);
    quantiles.add(1e30F);
    CHECK(quantiles.quantile(0.5) < 1e-4);
    CHECK(quantiles.quantile(1.0) > 1e14);
}

TEST_CASE("before enough calls were measured the deadline is a constant, and nobody hedges") {
    ServiceTimes times;
    for (std::uint64_t i = 0; i + 1 < ServiceTimes::kFewestCalls; ++i) times.add({4, kMs, 0, kMs});
    CHECK(times.deadline_ms(4) == ServiceTimes::kUnmeasuredMs);
    CHECK(times.quantile_ns(4, 0.99) == 0);
    times.add({4, kMs, 0, kMs});
    CHECK(times.deadline_ms(4) < ServiceTimes::kUnmeasuredMs);
    CHECK(times.quantile_ns(4, 0.99) > 0);
}

TEST_CASE("the deadline is the floor and a multiple of the slowest of a hundred") {
    const ServiceTimes times = steady();
    const double typical_ms = static_cast<double>(times.quantile_ns(8, 0.5)) / 1e6;
    CHECK(typical_ms > 0.7);
    CHECK(typical_ms < 1.4);
    const auto slow_ms = static_cast<double>(times.quantile_ns(8, 0.99)) / 1e6;
    CHECK(times.deadline_ms(8) ==
          ServiceTimes::kFloorMs + static_cast<std::int64_t>(ServiceTimes::kMultiple * slow_ms));
    CHECK(times.quantile_ns(16, 0.5) > 3 * times.quantile_ns(4, 0.5) / 2);
}

TEST_CASE("a server that grows ten times slower is given ten times as long") {
    ServiceTimes times = steady();
    for (int i = 0; i < 2000; ++i) times.add({8, 400 * kMs, 0, 401 * kMs});
    CHECK(times.deadline_ms(8) > 1500);
    CHECK(times.deadline_ms(8) < 4000);
}

TEST_CASE(
    "reads are measured apart: cold experts lengthen the deadline, not the time of warm ones") {
    ServiceTimes warm = steady();
    ServiceTimes cold = steady();
    for (int i = 0; i < 400; ++i) {
        warm.add({8, 800 * kUs, 0, 850 * kUs});
        const std::uint64_t read_ns = i % 10 == 0 ? 80 * kMs : 0;
        cold.add({8, 800 * kUs, read_ns, 850 * kUs + read_ns});
    }
    CHECK(cold.quantile_ns(8, 0.5) == warm.quantile_ns(8, 0.5));
    CHECK(cold.deadline_ms(8) > warm.deadline_ms(8) + 4 * 80 - 1);
    CHECK(cold.deadline_ms(8) < warm.deadline_ms(8) + 4 * 80 * 5 / 4 + 2);
}

TEST_CASE(
    "a reply that lay there unread says nothing about the way, one given up says it was slow") {
    ServiceTimes times = steady();
    const std::uint64_t before = times.quantile_ns(8, 0.5);
    for (int i = 0; i < 100; ++i) times.add({8, 800 * kUs, 0, 0});
    CHECK(times.quantile_ns(8, 0.5) == before);
    const std::uint64_t slowest = times.quantile_ns(8, 0.98);
    for (int i = 0; i < 50; ++i) times.add_unfinished(8, 500 * kMs);
    CHECK(times.quantile_ns(8, 0.98) > 10 * slowest);
}

}  // namespace k3::test
