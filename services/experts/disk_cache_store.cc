#include "services/experts/disk_cache_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/settings.h"
#include "common/model/memory_plan.h"
#include "common/storage/direct_file.h"
#include "services/experts/kept_experts.h"

namespace k3::experts {

namespace {

constexpr std::chrono::seconds kSaveEvery{60};
constexpr std::chrono::seconds kPauseAfterFailure{60};

}  // namespace

// --- start and end ---

std::uint64_t DiskCacheStore::disk_bytes(const Options& options, std::uint64_t record_bytes,
                                         std::uint64_t n_entries) noexcept {
    const std::uint64_t list = storage::block_ceiling(
        kept_file_bytes(std::uint64_t{options.n_layers} * options.n_experts));
    return DiskCacheFiles::kFixedBytes + 4 * list +
           n_entries *
               (DiskCacheFiles::entry_bytes(record_bytes) + DiskCacheFiles::kEntryOverheadBytes);
}

Result<std::unique_ptr<DiskCacheStore>> DiskCacheStore::create(const Options& options,
                                                               ExpertStore& origin) {
    const std::uint64_t each = DiskCacheFiles::entry_bytes(origin.record_bytes());
    const std::uint64_t smallest = disk_bytes(options, origin.record_bytes(), 1);
    if (options.budget_bytes < smallest)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("a disk cache of {} bytes has no room for one expert ({} bytes "
                                 "with what is kept about it)",
                                 options.budget_bytes, smallest),
                     fmt::format("give --disk-cache-bytes {} or more", smallest)};
    const std::uint64_t capacity =
        1 + (options.budget_bytes - smallest) / (each + DiskCacheFiles::kEntryOverheadBytes);
    ASSIGN_OR_RETURN(std::unique_ptr<EvictionPolicy> policy,
                     make_policy(options.policy, {options.n_layers, options.n_experts, capacity}));
    ASSIGN_OR_RETURN(
        DiskCacheFiles files,
        DiskCacheFiles::open(options.directory, {options.fingerprint, origin.record_bytes()}));
    if (!files.repaired().empty()) log::warn("disk cache: " + files.repaired());
    ASSIGN_OR_RETURN(SlotMemory buffers, SlotMemory::map(model::kDiskCacheBuffers, each));
    std::unique_ptr<DiskCacheStore> store(new DiskCacheStore(
        options, origin, std::move(files), std::move(buffers), std::move(policy)));
    store->counts_.capacity = capacity;
    RETURN_IF_ERROR(store->take_stock());
    store->writer_ = std::jthread([&self = *store] { self.write_until_stopped(); });
    return store;
}

DiskCacheStore::DiskCacheStore(const Options& options, ExpertStore& origin, DiskCacheFiles files,
                               SlotMemory buffers, std::unique_ptr<EvictionPolicy> policy)
    : options_(options),
      origin_(origin),
      files_(std::move(files)),
      buffers_(std::move(buffers)),
      policy_(std::move(policy)),
      states_(std::size_t{options.n_layers} * options.n_experts, State::absent) {
    for (std::uint32_t buffer = 0; buffer < model::kDiskCacheBuffers; ++buffer)
        free_.push_back(buffer);
}

DiskCacheStore::~DiskCacheStore() {
    if (!writer_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_.notify_all();
    writer_.join();
    save_values();
}

/// Entries without a value have been written after the values were saved last, by a server that did
/// not end well: they come after those with one.
Status DiskCacheStore::take_stock() {
    ASSIGN_OR_RETURN(const std::vector<ExpertKey> there, files_.list());
    for (const ExpertKey key : there)
        if (key.layer < options_.n_layers && key.expert < options_.n_experts)
            states_[at(key)] = State::present;
        else
            files_.remove(key);
    std::vector<KeptExpert> wanted = load_values();
    for (const ExpertKey key : there) wanted.push_back({key, 0});
    for (const KeptExpert& expert : wanted)
        if (expert.key.layer < options_.n_layers && expert.key.expert < options_.n_experts &&
            states_[at(expert.key)] == State::present)
            policy_->restore(expert);
    std::size_t n_too_many = 0;
    for (const ExpertKey key : there) {
        if (key.layer >= options_.n_layers || key.expert >= options_.n_experts ||
            policy_->keeps(key))
            continue;
        states_[at(key)] = State::absent;
        files_.remove(key);
        ++n_too_many;
    }
    log::info(fmt::format("disk cache {}: {} of {} experts are there{}",
                          options_.directory.string(), policy_->size(), counts_.capacity,
                          n_too_many == 0
                              ? std::string()
                              : fmt::format(", {} more were removed to keep to {}", n_too_many,
                                            format_bytes(options_.budget_bytes))));
    return Status::ok();
}

std::vector<KeptExpert> DiskCacheStore::load_values() const {
    Result<KeptExperts> kept =
        load_kept(files_.values_path(), options_.fingerprint, options_.policy);
    if (kept.has_value()) {
        sort_by_value(kept->experts);
        return std::move(kept->experts);
    }
    if (kept.error().code != ErrorCode::not_found)
        log::warn("disk cache: its values start from nothing: " + kept.error().sentence());
    return {};
}

void DiskCacheStore::save_values() {
    KeptExperts kept{options_.fingerprint, options_.policy, {}};
    bool trouble = false;
    {
        const std::lock_guard lock(mutex_);
        kept.experts = policy_->kept();
        trouble = trouble_;
    }
    const Status saved = save_kept(files_.values_path(), kept);
    if (!saved.has_value() && !trouble)
        log::warn("disk cache: its values are not saved: " + saved.error().sentence());
}

// --- reading ---

void DiskCacheStore::visit(std::uint32_t layer, std::span<const ExpertUse> uses) noexcept {
    const std::lock_guard lock(mutex_);
    policy_->visit(layer, uses);
}

bool DiskCacheStore::is_present(ExpertKey key) const {
    const std::lock_guard lock(mutex_);
    return key.layer < options_.n_layers && key.expert < options_.n_experts &&
           states_[at(key)] == State::present;
}

Result<std::span<const std::byte>> DiskCacheStore::read(ExpertKey key, std::span<std::byte> slot) {
    if (is_present(key)) {
        const auto record = files_.read(key, slot);
        if (record.has_value()) {
            const std::lock_guard lock(mutex_);
            ++counts_.hits;
            ++read_.runs;
            read_.read_bytes += record->size();
            read_.rounding_bytes += DiskCacheFiles::entry_bytes(record->size()) - record->size();
            return *record;
        }
        forget_damaged(key, record.error());
    }
    ASSIGN_OR_RETURN(const std::span<const std::byte> record, origin_.read(key, slot));
    offer(key, record);
    return record;
}

/// An entry that has been evicted since it was looked up is no longer present, and not damaged.
void DiskCacheStore::forget_damaged(ExpertKey key, const Error& error) {
    {
        const std::lock_guard lock(mutex_);
        if (states_[at(key)] != State::present) return;
        states_[at(key)] = State::absent;
        policy_->drop(key);
        ++counts_.damaged;
        files_.remove(key);  // before anybody can write it again
    }
    log::warn("disk cache: read from the origin instead: " + error.sentence());
}

// --- writing ---

/// `record` has just been read from the origin, where every weight of it was checked.
void DiskCacheStore::offer(ExpertKey key, std::span<const std::byte> record) {
    Job job{key, 0, {}};
    {
        const std::lock_guard lock(mutex_);
        ++counts_.misses;
        if (states_[at(key)] != State::absent) return;  // two readers at the same time
        if (free_.empty() || (trouble_ && Clock::now() < try_again_)) {
            ++counts_.unwritten;
            return;
        }
        const EvictionPolicy::Admission admission = policy_->admit(key);
        if (!admission.admitted) {
            ++counts_.refused;
            return;
        }
        if (admission.evicts) {
            ++counts_.evictions;
            states_[at(admission.evicted)] = State::absent;
            job.evicted = admission.evicted;
        }
        states_[at(key)] = State::waiting;
        job.buffer = free_.back();
        free_.pop_back();
    }
    std::memcpy(files_.record_of(buffers_.slot(job.buffer)).data(), record.data(), record.size());
    {
        const std::lock_guard lock(mutex_);
        jobs_.push_back(job);
    }
    work_.notify_one();
}

void DiskCacheStore::write_until_stopped() {
    Clock::time_point save_at = Clock::now() + kSaveEvery;
    std::unique_lock lock(mutex_);
    while (true) {
        work_.wait_until(lock, save_at, [&] { return stopping_ || !jobs_.empty(); });
        if (!jobs_.empty()) {
            const Job job = jobs_.front();
            jobs_.pop_front();
            lock.unlock();
            write_entry(job);
            lock.lock();
            free_.push_back(job.buffer);
            idle_.notify_all();
        } else if (stopping_) {
            return;
        }
        if (Clock::now() < save_at) continue;
        lock.unlock();
        save_values();
        lock.lock();
        save_at = Clock::now() + kSaveEvery;
    }
}

/// The evicted entry goes before the new one comes, so that the budget holds at every moment. One
/// that has been admitted again since is counted, and replaced by its own job if not yet.
void DiskCacheStore::write_entry(const Job& job) {
    {
        const std::lock_guard lock(mutex_);
        if (job.evicted.has_value() && states_[at(*job.evicted)] == State::absent)
            files_.remove(*job.evicted);
        if (states_[at(job.key)] != State::waiting) return;  // evicted in the meantime
    }
    Status written = files_.write(job.key, buffers_.slot(job.buffer));
    finish_write(job, written);
}

void DiskCacheStore::finish_write(const Job& job, const Status& written) {
    bool told = false;
    Status done = written;
    {
        const std::lock_guard lock(mutex_);
        State& state = states_[at(job.key)];
        if (state != State::waiting) {  // evicted in the meantime
            if (done.has_value()) files_.discard();
            return;
        }
        if (done.has_value()) done = files_.commit(job.key);
        if (done.has_value()) {
            state = State::present;
            ++counts_.writes;
            trouble_ = false;
            return;
        }
        state = State::absent;
        policy_->drop(job.key);
        files_.remove(job.key);  // of an earlier admission, if nobody has removed it yet
        ++counts_.failed_writes;
        told = std::exchange(trouble_, true);
        try_again_ = Clock::now() + kPauseAfterFailure;
    }
    if (!told)
        log::warn("disk cache: nothing is added to it for now, experts come from the origin: " +
                  done.error().sentence());
}

void DiskCacheStore::wait_until_written() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return free_.size() == model::kDiskCacheBuffers; });
}

// --- counts ---

StoreCounts DiskCacheStore::counts() const noexcept {
    StoreCounts all = origin_.counts();
    const std::lock_guard lock(mutex_);
    all.read_bytes += read_.read_bytes;
    all.rounding_bytes += read_.rounding_bytes;
    all.runs += read_.runs;
    return all;
}

DiskCacheCounts DiskCacheStore::disk_counts() const {
    const std::lock_guard lock(mutex_);
    DiskCacheCounts counts = counts_;
    counts.entries = policy_->size();
    return counts;
}

}  // namespace k3::experts
