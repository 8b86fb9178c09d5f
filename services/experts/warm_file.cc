#include "services/experts/warm_file.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "common/base/log.h"
#include "services/experts/kept_experts.h"

namespace k3::experts {

namespace {

constexpr std::chrono::seconds kWarmSaveEvery{60};

}  // namespace

WarmFile::WarmFile(const Options& options, ExpertCache& cache) : options_(options), cache_(cache) {
    load();
    saver_ = std::jthread([this] { save_until_stopped(); });
}

WarmFile::~WarmFile() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    stop_wanted_.notify_all();
    saver_.join();
    save();
}

void WarmFile::load() {
    Result<KeptExperts> kept = load_kept(options_.path, options_.fingerprint, options_.policy);
    if (kept.has_value()) {
        sort_by_value(kept->experts);
        log::info(fmt::format("reading the {} experts of {} in the background",
                              kept->experts.size(), options_.path.string()));
        cache_.warm(std::move(kept->experts));
    } else if (kept.error().code != ErrorCode::not_found) {
        log::warn("the cache starts empty: " + kept.error().sentence());
    }
}

void WarmFile::save() {
    const Status saved =
        save_kept(options_.path, {options_.fingerprint, options_.policy, cache_.kept()});
    if (!saved.has_value() && !trouble_)
        log::warn("what the cache keeps is not saved: " + saved.error().sentence());
    trouble_ = !saved.has_value();
}

void WarmFile::save_until_stopped() {
    std::unique_lock lock(mutex_);
    while (!stop_wanted_.wait_for(lock, kWarmSaveEvery, [&] { return stopping_; })) save();
}

}  // namespace k3::experts
