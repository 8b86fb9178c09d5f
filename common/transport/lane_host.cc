#include "common/transport/lane_host.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "common/transport/arena.h"

namespace k3::transport {

namespace {

constexpr std::uint32_t kMostSpinUs = 10'000;  // whatever a caller says
/// Whoever writes nonsense into the bell makes this server late by so much, not deaf.
constexpr std::int64_t kBellSleepMs = 200;

}  // namespace

Result<std::unique_ptr<LaneHost>> LaneHost::create(const Options& options) {
    ASSIGN_OR_RETURN(LaneSegment segment, LaneSegment::create(options.sizes));
    return std::unique_ptr<LaneHost>(new LaneHost(options, std::move(segment)));
}

LaneHost::LaneHost(const Options& options, LaneSegment segment)
    : options_(options), segment_(std::move(segment)), lanes_(options.sizes.n_lanes) {}

LaneHost::Lane* LaneHost::find_lane(std::uint64_t key) {
    for (Lane& lane : lanes_)
        if (lane.key == key) return &lane;
    for (Lane& lane : lanes_)
        if (lane.key == 0) return &lane;
    for (Lane& lane : lanes_)
        if (!segment_in_use(lane.caller)) return &lane;
    return nullptr;
}

msg::LaneOffer LaneHost::assign(std::uint64_t key, const msg::SegmentProbe& caller,
                                std::shared_ptr<ServerClient> client) {
    std::lock_guard lock(mutex_);
    Lane* lane = find_lane(key);
    if (lane == nullptr) return {};
    std::random_device random;
    lane->key = key;
    lane->token = (std::uint64_t{random()} << 32U) | random();
    lane->caller = caller;
    lane->client = std::move(client);
    lane->last_number = lane->open_number = 0;
    msg::LaneOffer offer = segment_.offer();
    offer.index = static_cast<std::uint32_t>(lane - lanes_.data());
    offer.token = lane->token;
    offer.compute_threads = static_cast<std::uint32_t>(options_.cores.n_threads);
    offer.cores = format_cores(options_.cores.cores);
    segment_.request(offer.index).head().number.value.store(0);
    segment_.reply(offer.index).head().number.value.store(0);
    return offer;
}

void LaneHost::listen() noexcept { segment_.bell().value.store(0); }

std::optional<LaneHost::Call> LaneHost::next() {
    std::lock_guard lock(mutex_);
    const auto n = static_cast<std::uint32_t>(lanes_.size());
    for (std::uint32_t i = 0; i < n; ++i) {
        const std::uint32_t index = (next_ + i) % n;
        if (lanes_[index].key == 0) continue;
        std::optional<Call> call = look(index);
        if (!call) continue;
        next_ = index + 1;
        return call;
    }
    return std::nullopt;
}

std::optional<LaneHost::Call> LaneHost::look(std::uint32_t index) {
    Lane& lane = lanes_[index];
    const LaneSlot slot = segment_.request(index);
    const std::uint32_t number = slot.head().number.value.load(std::memory_order_acquire);
    if (number == 0 || number == lane.last_number) return std::nullopt;
    lane.last_number = number;
    if (slot.head().token != lane.token) return std::nullopt;  // of a former user
    lane.open_number = number;
    caller_spin_us_ = std::min(slot.head().spin_us, kMostSpinUs);
    Call call{{index, number, lane.token}, lane.client, {}, {}};
    call.status = slot.take(number, envelope_, call.message);
    return call;
}

void LaneHost::wait(Deadline deadline) noexcept {
    LaneWord& bell = segment_.bell();
    const std::int64_t spin_us = options_.spin_us < 0 ? caller_spin_us_ : options_.spin_us;
    if (spin_us > 0) {
        const auto until = Clock::now() + std::chrono::microseconds(spin_us);
        spin_on(bell, 0, std::min(until, deadline.at()));
    }
    if (bell.value.load() == 0) sleep_on(bell, 0, deadline.min(Deadline::after_ms(kBellSleepMs)));
}

bool LaneHost::answer(const LaneTag& tag, std::span<const std::byte> envelope,
                      const std::vector<msg::Bytes>& frames) {
    std::lock_guard lock(mutex_);
    if (tag.number == 0 || tag.index >= lanes_.size()) return false;
    Lane& lane = lanes_[tag.index];
    const LaneSlot slot = segment_.reply(tag.index);
    const bool is_open = lane.token == tag.token && lane.open_number == tag.number;
    if (!is_open || frames.size() > kMaxLaneFrames ||
        !slot.fits(LaneSlot::size_of(envelope, frames)))
        return false;
    lane.open_number = 0;
    slot.put(tag.number, tag.token, envelope, frames);
    return true;
}

}  // namespace k3::transport
