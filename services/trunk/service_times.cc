#include "services/trunk/service_times.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace k3::trunk {

namespace {

constexpr std::uint32_t kFadeAt = 1000;
constexpr float kWeight = 1.0F / 32;  // of the newest value in a running mean
constexpr double kSlowest = 0.99;
// Four buckets for each power of two: exponent and the two highest bits of the fraction.
constexpr std::uint32_t kFractionBits = 23 - 2;
constexpr std::uint32_t kFirstBucket = std::uint32_t{127 - 16} << 2U;

std::size_t bucket_of(float value, std::size_t n) {
    const std::uint32_t place = std::bit_cast<std::uint32_t>(value) >> kFractionBits;
    return std::clamp<std::size_t>(place, kFirstBucket, kFirstBucket + n - 1) - kFirstBucket;
}

float upper_end(std::size_t bucket) {
    return std::bit_cast<float>((static_cast<std::uint32_t>(bucket) + kFirstBucket + 1)
                                << kFractionBits);
}

void follow(float& mean, float value, bool is_first) {
    mean = is_first ? value : mean + kWeight * (value - mean);
}

}  // namespace

void FadingQuantiles::add(float value) noexcept {
    ++n_[bucket_of(value, kBuckets)];
    if (++n_all_ < kFadeAt) return;
    n_all_ = 0;
    for (std::uint32_t& n : n_) {
        n /= 2;
        n_all_ += n;
    }
}

float FadingQuantiles::quantile(double q) const noexcept {
    if (n_all_ == 0) return 0;
    const auto rank = static_cast<std::uint32_t>(std::ceil(q * n_all_));
    std::uint32_t n_below = 0;
    for (std::size_t i = 0; i < kBuckets; ++i) {
        n_below += n_[i];
        if (n_below >= rank && n_[i] > 0) return upper_end(i);
    }
    return upper_end(kBuckets - 1);
}

float ServiceTimes::expected_ns(std::size_t n_picks) const noexcept {
    return way_ns_ + static_cast<float>(n_picks) * pick_ns_;
}

void ServiceTimes::add(const Sample& sample) noexcept {
    if (sample.n_picks == 0) return;
    const auto n_picks = static_cast<float>(sample.n_picks);
    const auto compute_ns = static_cast<float>(sample.compute_ns);
    follow(pick_ns_, compute_ns / n_picks, n_calls_ == 0);
    float way_ns = way_ns_;
    if (sample.total_ns > 0) {
        const std::uint64_t reported_ns = sample.compute_ns + sample.read_ns;
        way_ns = static_cast<float>(sample.total_ns - std::min(sample.total_ns, reported_ns));
        follow(way_ns_, way_ns, n_ways_++ == 0);
    }
    // A clock that did not move is no reason to divide by nothing.
    ratios_.add((way_ns + compute_ns) / std::max(1.0F, expected_ns(sample.n_picks)));
    reads_ns_.add(static_cast<float>(sample.read_ns) / n_picks);
    ++n_calls_;
}

void ServiceTimes::add_unfinished(std::size_t n_picks, std::uint64_t total_ns) noexcept {
    if (n_picks == 0 || !is_measured()) return;
    ratios_.add(static_cast<float>(total_ns) / std::max(1.0F, expected_ns(n_picks)));
}

std::uint64_t ServiceTimes::quantile_ns(std::size_t n_picks, double q) const noexcept {
    if (!is_measured() || n_ways_ < kFewestCalls) return 0;
    return time_ns(n_picks, q);
}

std::uint64_t ServiceTimes::time_ns(std::size_t n_picks, double q) const noexcept {
    const float warm_ns = ratios_.quantile(q) * expected_ns(n_picks);
    const float read_ns = reads_ns_.quantile(q) * static_cast<float>(n_picks);
    return static_cast<std::uint64_t>(warm_ns + read_ns);
}

std::int64_t ServiceTimes::deadline_ms(std::size_t n_picks) const noexcept {
    if (!is_measured()) return kUnmeasuredMs;
    const double slow_ms = static_cast<double>(time_ns(n_picks, kSlowest)) / 1e6;
    return kFloorMs + static_cast<std::int64_t>(kMultiple * slow_ms);
}

}  // namespace k3::trunk
