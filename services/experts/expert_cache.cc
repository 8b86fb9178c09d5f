#include "services/experts/expert_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/settings.h"
#include "common/model/memory_plan.h"

namespace k3::experts {

namespace {

constexpr std::size_t kFewestPassing = 2;  // one expert is read while another computes

std::uint64_t ns_since(Clock::time_point start) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

/// Slots for experts that pass through: as many as the readers can fill while as many compute.
std::size_t passing_slots(const ExpertCache::Options& options) {
    return std::max<std::size_t>(
        kFewestPassing, std::min<std::size_t>(options.top_k, std::size_t{2} * options.n_readers));
}

}  // namespace

// --- leases ---

ExpertLease::ExpertLease(ExpertLease&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)), slot_(other.slot_), bytes_(other.bytes_) {}

ExpertLease& ExpertLease::operator=(ExpertLease&& other) noexcept {
    if (this == &other) return *this;
    release();
    cache_ = std::exchange(other.cache_, nullptr);
    slot_ = other.slot_;
    bytes_ = other.bytes_;
    return *this;
}

ExpertLease::~ExpertLease() { release(); }

void ExpertLease::release() noexcept {
    if (ExpertCache* cache = std::exchange(cache_, nullptr)) cache->release(slot_);
}

// --- start and end ---

Result<ExpertCache::Slots> ExpertCache::slots_for(const Options& options,
                                                  std::uint64_t slot_bytes) {
    model::ExpertMemoryOptions memory;
    memory.cache_bytes = options.budget_bytes;
    memory.slot_bytes = slot_bytes;
    memory.n_held = options.n_held;
    ASSIGN_OR_RETURN(const model::ExpertMemory taken, model::expert_memory(memory));
    Slots slots;
    slots.n_slots = taken.n_slots;
    slots.n_kept = slots.n_slots;
    if (slots.n_slots < options.n_held)
        slots.n_kept -= std::min(slots.n_slots, passing_slots(options));
    return slots;
}

Result<std::unique_ptr<ExpertCache>> ExpertCache::create(const Options& options,
                                                         ExpertStore& store) {
    K3_CHECK(options.n_held > 0 && options.n_readers > 0,
             fmt::format("{} experts, {} readers", options.n_held, options.n_readers));
    ASSIGN_OR_RETURN(Slots sizes, slots_for(options, store.slot_bytes()));
    ASSIGN_OR_RETURN(
        std::unique_ptr<EvictionPolicy> policy,
        make_policy(options.policy, {options.n_layers, options.n_experts, sizes.n_kept}));
    ASSIGN_OR_RETURN(SlotMemory memory, SlotMemory::map(sizes.n_slots, store.slot_bytes()));
    return std::unique_ptr<ExpertCache>(
        new ExpertCache(options, store, sizes, std::move(memory), std::move(policy)));
}

ExpertCache::ExpertCache(const Options& options, ExpertStore& store, Slots sizes, SlotMemory memory,
                         std::unique_ptr<EvictionPolicy> policy)
    : options_(options),
      sizes_(sizes),
      store_(store),
      memory_(std::move(memory)),
      policy_(std::move(policy)),
      slots_(sizes.n_slots),
      slot_of_(std::size_t{options.n_layers} * options.n_experts, kNone) {
    free_.reserve(sizes.n_slots);
    for (std::size_t slot = sizes.n_slots; slot > 0; --slot)
        free_.push_back(static_cast<std::uint32_t>(slot - 1));
    read_queue_.reserve(sizes.n_slots);
    speculative_.reserve(sizes.n_slots);
    wanted_.reserve(std::size_t{2} * options.n_experts);
    waiting_.reserve(options.n_experts);
    missed_.reserve(options.n_experts);
    for (std::uint32_t i = 0; i < options.n_readers; ++i)
        readers_.emplace_back([this] { read_until_stopped(); });
}

ExpertCache::~ExpertCache() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    reads_wanted_.notify_all();
    readers_.clear();
    for (const Slot& slot : slots_)
        K3_CHECK(slot.leases == 0, fmt::format("layer {} expert {} is still leased", slot.key.layer,
                                               slot.key.expert));
}

// --- a call's visit ---

std::size_t ExpertCache::at(ExpertKey key) const noexcept {
    K3_CHECK(key.layer < options_.n_layers && key.expert < options_.n_experts,
             fmt::format("layer {} expert {}", key.layer, key.expert));
    return std::size_t{key.layer} * options_.n_experts + key.expert;
}

void ExpertCache::visit(std::uint32_t layer, std::span<const ExpertUse> uses,
                        std::span<std::uint32_t> order) {
    K3_CHECK(order.size() == uses.size(), fmt::format("{} and {}", order.size(), uses.size()));
    store_.visit(layer, uses);
    std::lock_guard lock(mutex_);
    give_up_last_visit();
    ++n_visits_;
    policy_->visit(layer, uses);

    std::size_t n_ordered = 0;
    auto append = [&](auto belongs) {
        for (std::uint32_t i = 0; i < uses.size(); ++i) {
            const std::uint32_t slot = find({layer, uses[i].expert});
            if (belongs(slot)) order[n_ordered++] = i;
        }
    };
    append([&](std::uint32_t slot) { return slot != kNone && slots_[slot].state == State::ready; });
    append([&](std::uint32_t slot) { return slot != kNone && slots_[slot].state != State::ready; });
    append([&](std::uint32_t slot) { return slot == kNone; });

    missed_.clear();
    for (const ExpertUse& use : uses) {
        const ExpertKey key{layer, use.expert};
        if (policy_->keeps(key))
            ++counts_.hits;
        else
            missed_.push_back(key);
        const std::uint32_t slot = find(key);
        if (slot == kNone)
            waiting_.push_back(key);
        else
            want(slot);
    }
    counts_.misses += missed_.size();
    // Not "whatever is not kept": a miss may evict an expert that this call hit.
    for (ExpertKey key : missed_) admit(key);
    pump();
}

/// A call that failed half-way leaves experts that it wanted. Their reads stop unless a reader is
/// at it, and the policy forgets those that have no bytes.
void ExpertCache::give_up_last_visit() {
    for (ExpertKey key : waiting_)
        if (policy_->keeps(key)) policy_->drop(key);
    waiting_.clear();
    for (std::uint32_t index : wanted_) {
        Slot& slot = slots_[index];
        if (!std::exchange(slot.wanted, false)) continue;
        if (slot.state == State::queued) {
            std::erase(read_queue_, index);
            if (policy_->keeps(slot.key)) policy_->drop(slot.key);
            make_free(index);
        } else if (slot.state == State::failed) {
            make_free(index);
        } else {
            free_if_unused(index);
        }
    }
    wanted_.clear();
}

void ExpertCache::admit(ExpertKey key) {
    const EvictionPolicy::Admission admission = policy_->admit(key);
    if (!admission.admitted) ++counts_.refused_admissions;
    if (!admission.evicts) return;
    ++counts_.evictions;
    const std::uint32_t slot = find(admission.evicted);
    if (slot != kNone) free_if_unused(slot);
}

void ExpertCache::prefetch(std::uint32_t layer, std::span<const std::uint32_t> experts) noexcept {
    std::lock_guard lock(mutex_);
    const std::size_t most = std::max<std::size_t>(options_.top_k, sizes_.n_slots - sizes_.n_kept);
    for (std::uint32_t expert : experts) {
        const ExpertKey key{layer, expert};
        if (find(key) != kNone ||
            std::find(waiting_.begin(), waiting_.end(), key) != waiting_.end())
            continue;
        // What a call waits for goes first, and so do the hints that the next call may be about.
        const bool full = free_.empty() || speculative_.size() >= most;
        if (!waiting_.empty() || (full && !reclaim_speculative(false))) {
            ++counts_.prefetch_dropped;
            continue;
        }
        const std::uint32_t slot = start_read(key);
        slots_[slot].speculative = true;
        slots_[slot].visit = n_visits_;
        speculative_.push_back(slot);
        ++counts_.prefetch_reads;
    }
}

// --- slots ---

/// Gives free slots to the experts that wait for one, in their order.
void ExpertCache::pump() {
    std::size_t n_started = 0;
    while (n_started < waiting_.size() && (!free_.empty() || reclaim_speculative(true)))
        want(start_read(waiting_[n_started++]));
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(n_started));
}

/// There is a free slot.
std::uint32_t ExpertCache::start_read(ExpertKey key) {
    const std::uint32_t index = free_.back();
    free_.pop_back();
    Slot& slot = slots_[index];
    slot.key = key;
    slot.state = State::queued;
    slot_of_[at(key)] = index;
    read_queue_.push_back(index);
    reads_wanted_.notify_one();
    return index;
}

/// Frees the slot of the oldest hint that nobody followed. A fresh one is from the current visit:
/// the call that it announces may still come.
bool ExpertCache::reclaim_speculative(bool fresh_ones_too) {
    for (std::uint32_t index : speculative_) {
        const Slot& slot = slots_[index];
        if (slot.state != State::ready || (slot.visit == n_visits_ && !fresh_ones_too)) continue;
        end_speculation(index, counts_.prefetch_unused);
        free_if_unused(index);
        return true;
    }
    return false;
}

void ExpertCache::end_speculation(std::uint32_t slot, std::uint64_t& counter) {
    if (!std::exchange(slots_[slot].speculative, false)) return;
    std::erase(speculative_, slot);
    ++counter;
}

void ExpertCache::want(std::uint32_t slot) {
    end_speculation(
        slot, slots_[slot].state == State::ready ? counts_.prefetch_useful : counts_.prefetch_late);
    if (std::exchange(slots_[slot].wanted, true)) return;
    wanted_.push_back(slot);
}

/// Puts an expert that has no slot at the head of those that wait for one.
void ExpertCache::want_first(ExpertKey key) {
    std::erase(waiting_, key);
    waiting_.insert(waiting_.begin(), key);
}

/// For a caller that does not follow the order of visit(): lets an expert that is there and only
/// passes wait once more, so that another one can be read. Returns whether there was one.
bool ExpertCache::set_back_a_wanted_one() {
    for (std::uint32_t index : wanted_) {
        Slot& slot = slots_[index];
        if (!slot.wanted || slot.state != State::ready || slot.leases > 0 ||
            policy_->keeps(slot.key))
            continue;
        waiting_.push_back(slot.key);
        slot.wanted = false;
        make_free(index);
        return true;
    }
    return false;
}

void ExpertCache::make_free(std::uint32_t index) {
    Slot& slot = slots_[index];
    slot_of_[at(slot.key)] = kNone;
    slot.state = State::free;
    slot.wanted = false;
    free_.push_back(index);
}

void ExpertCache::free_if_unused(std::uint32_t index) {
    const Slot& slot = slots_[index];
    if (slot.state == State::ready && slot.leases == 0 && !slot.wanted && !slot.speculative &&
        !policy_->keeps(slot.key))
        make_free(index);
}

// --- leases again ---

Result<ExpertLease> ExpertCache::acquire(ExpertKey key, Deadline deadline) {
    std::unique_lock lock(mutex_);
    const Clock::time_point start = Clock::now();
    bool waited = false;
    while (true) {
        std::uint32_t slot = find(key);
        if (slot == kNone) {
            want_first(key);
            pump();
            if (find(key) == kNone && set_back_a_wanted_one()) pump();
            slot = find(key);
        } else {
            want(slot);
        }
        if (slot != kNone && slots_[slot].state == State::ready) {
            if (waited) counts_.read_wait_ns += ns_since(start);
            return lease(slot);
        }
        if (slot != kNone && slots_[slot].state == State::failed) return take_error(slot);
        waited = true;
        if (slots_changed_.wait_until(lock, deadline.at()) == std::cv_status::timeout &&
            deadline.expired()) {
            counts_.read_wait_ns += ns_since(start);
            return too_late(key);
        }
    }
}

Error ExpertCache::too_late(ExpertKey key) const {
    const auto leased = std::count_if(slots_.begin(), slots_.end(),
                                      [](const Slot& slot) { return slot.leases > 0; });
    if (static_cast<std::size_t>(leased) == slots_.size())
        return Error{ErrorCode::resource_exhausted,
                     fmt::format("no slot for layer {} expert {}: all {} are in use", key.layer,
                                 key.expert, slots_.size()),
                     "give more --cache-bytes"};
    return Error{ErrorCode::deadline_exceeded,
                 fmt::format("layer {} expert {} was not read in time", key.layer, key.expert),
                 "check the disk that holds the checkpoint, or grant more time"};
}

ExpertLease ExpertCache::lease(std::uint32_t index) {
    Slot& slot = slots_[index];
    slot.wanted = false;
    ++slot.leases;
    return {*this, index, slot.record};
}

Error ExpertCache::take_error(std::uint32_t index) {
    Error error = *std::move(slots_[index].error);
    slots_[index].error.reset();
    make_free(index);
    pump();
    return error;
}

void ExpertCache::release(std::uint32_t index) noexcept {
    {
        std::lock_guard lock(mutex_);
        --slots_[index].leases;
        free_if_unused(index);
        pump();
        if (can_warm()) reads_wanted_.notify_one();
    }
    slots_changed_.notify_all();
}

CacheCounts ExpertCache::counts() const {
    std::lock_guard lock(mutex_);
    return counts_;
}

// --- reader threads ---

/// The first queued slot that a call wants, else the first hint.
std::uint32_t ExpertCache::next_to_read() {
    auto next = std::find_if(read_queue_.begin(), read_queue_.end(),
                             [&](std::uint32_t index) { return slots_[index].wanted; });
    if (next == read_queue_.end()) next = read_queue_.begin();
    const std::uint32_t index = *next;
    read_queue_.erase(next);
    return index;
}

/// Never while a call waits, and never into the slots that are set aside for passing experts.
bool ExpertCache::can_warm() const noexcept {
    return !to_warm_.empty() && !warming_ && read_queue_.empty() && waiting_.empty() &&
           policy_->size() < sizes_.n_kept && free_.size() > sizes_.n_slots - sizes_.n_kept;
}

/// Takes what has been read since off the list. Returns whether there is one left.
bool ExpertCache::next_to_warm(KeptExpert& expert) {
    while (!to_warm_.empty()) {
        expert = to_warm_.back();
        to_warm_.pop_back();
        if (find(expert.key) == kNone && !policy_->keeps(expert.key)) return true;
    }
    return false;
}

void ExpertCache::warm(std::vector<KeptExpert> experts) {
    std::erase_if(experts, [&](const KeptExpert& expert) {
        return expert.key.layer >= options_.n_layers || expert.key.expert >= options_.n_experts;
    });
    std::reverse(experts.begin(), experts.end());
    {
        std::lock_guard lock(mutex_);
        to_warm_ = std::move(experts);
    }
    reads_wanted_.notify_one();
}

std::vector<KeptExpert> ExpertCache::kept() const {
    std::lock_guard lock(mutex_);
    return policy_->kept();
}

void ExpertCache::read_until_stopped() {
    std::unique_lock lock(mutex_);
    while (true) {
        reads_wanted_.wait(lock, [&] { return stopping_ || !read_queue_.empty() || can_warm(); });
        if (stopping_) return;
        KeptExpert old;
        const bool warms = read_queue_.empty();
        if (warms && !next_to_warm(old)) continue;
        if (warms) start_read(old.key);
        warming_ = warming_ || warms;
        const std::uint32_t index = next_to_read();
        slots_[index].state = State::reading;
        const ExpertKey key = slots_[index].key;
        lock.unlock();
        Result<std::span<const std::byte>> read = store_.read(key, memory_.slot(index));
        lock.lock();
        // Before the slot could be freed for want of a use.
        if (warms) warming_ = false;
        if (warms && read.has_value() && policy_->restore(old)) ++counts_.warmed;
        finish_read(index, std::move(read));
        slots_changed_.notify_all();
    }
}

void ExpertCache::finish_read(std::uint32_t index, Result<std::span<const std::byte>> read) {
    Slot& slot = slots_[index];
    if (read.has_value()) {
        ++counts_.reads;
        slot.record = *read;
        slot.state = State::ready;
        free_if_unused(index);
    } else {
        ++counts_.failed_reads;
        if (policy_->keeps(slot.key)) policy_->drop(slot.key);
        if (std::exchange(slot.speculative, false)) std::erase(speculative_, index);
        if (slot.wanted) {
            slot.state = State::failed;
            slot.error = std::move(read).error();
        } else {
            make_free(index);
        }
    }
    pump();
}

}  // namespace k3::experts
