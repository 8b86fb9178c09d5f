#pragma once
// How long the calls of one expert server take, and from that how long the next one may take.
//
// A call of n picks is expected to take the way there and back, and n times the computing of a
// pick; how calls have compared with that, as a distribution, gives quantiles. What the server
// reports as waiting for its disk is kept apart (per pick, mostly nothing): a call that finds cold
// experts must not make warm ones look slow, nor the other way round. Old calls fade out.

#include <array>
#include <cstddef>
#include <cstdint>

namespace k3::trunk {

/// Quantiles of values that are not negative, within a quarter, in fixed memory; the last 500 to
/// 1000 count.
class FadingQuantiles {
  public:
    void add(float value) noexcept;
    /// The upper end of the bucket in which the quantile lies; 0 without values.
    float quantile(double q) const noexcept;

  private:
    static constexpr std::size_t kBuckets = 256;  // four for each power of two, 2^-16 to 2^48
    std::array<std::uint32_t, kBuckets> n_{};
    std::uint32_t n_all_ = 0;
};

class ServiceTimes {
  public:
    /// deadline = kFloorMs + kMultiple * (time of the slowest of 100 such calls).
    static constexpr std::int64_t kFloorMs = 250;
    static constexpr double kMultiple = 4;
    static constexpr std::int64_t kUnmeasuredMs = 2000;  // before so many calls were measured:
    static constexpr std::uint64_t kFewestCalls = 16;

    struct Sample {
        std::size_t n_picks = 0;
        std::uint64_t compute_ns = 0;  // as the server reports
        std::uint64_t read_ns = 0;     // likewise: waiting for experts
        std::uint64_t total_ns = 0;    // from sending to receiving; 0: unknown, nobody looked
    };
    void add(const Sample& sample) noexcept;

    /// A call that was given up after so long: without those the slow ones would not count.
    void add_unfinished(std::size_t n_picks, std::uint64_t total_ns) noexcept;

    bool is_measured() const noexcept { return n_calls_ >= kFewestCalls; }
    /// What a share `q` of calls with so many picks does not exceed; 0 until measured, of enough
    /// calls the way as well.
    std::uint64_t quantile_ns(std::size_t n_picks, double q) const noexcept;
    /// After which a call is late.
    std::int64_t deadline_ms(std::size_t n_picks) const noexcept;

  private:
    float expected_ns(std::size_t n_picks) const noexcept;
    std::uint64_t time_ns(std::size_t n_picks, double q) const noexcept;

    std::uint64_t n_calls_ = 0;
    std::uint64_t n_ways_ = 0;  // calls of which the total was known
    float pick_ns_ = 0;         // computing, running means
    float way_ns_ = 0;          // there and back, queueing included
    FadingQuantiles ratios_;    // of calls without reading, to what was expected
    FadingQuantiles reads_ns_;  // of a pick
};

}  // namespace k3::trunk
