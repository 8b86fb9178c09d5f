#include "common/experts/replica_choice.h"

#include <algorithm>
#include <bit>

#include "common/base/check.h"

namespace k3::experts {

namespace {

std::uint64_t bit(std::size_t server) noexcept { return std::uint64_t{1} << server; }

}  // namespace

std::size_t preferred_holder(std::uint32_t layer, std::uint32_t expert, std::uint64_t holders,
                             std::span<const std::uint32_t> weights) noexcept {
    std::uint64_t total = 0;
    for (std::uint64_t left = holders; left != 0; left &= left - 1)
        total += weights[static_cast<std::size_t>(std::countr_zero(left))];
    // Multiples of the golden ratio, as fractions: consecutive experts fall evenly on [0, total),
    // and not in step with any stripes of the placement.
    std::uint64_t place = ((layer + expert) * 0x9E3779B9U * total) >> 32U;
    std::uint64_t left = holders;
    for (; (left & (left - 1)) != 0; left &= left - 1) {
        const std::uint32_t weight = weights[static_cast<std::size_t>(std::countr_zero(left))];
        if (place < weight) break;
        place -= weight;
    }
    return static_cast<std::size_t>(std::countr_zero(left));
}

ReplicaChoice::ReplicaChoice(std::size_t max_items) : next_(max_items), previous_(max_items) {}

void ReplicaChoice::put(std::span<Item> items, std::uint32_t item, std::size_t server) noexcept {
    items[item].server = static_cast<std::uint8_t>(server);
    next_[item] = head_[server];
    previous_[item] = kNone;
    if (head_[server] != kNone) previous_[head_[server]] = item;
    head_[server] = item;
    ++n_items_[server];
}

void ReplicaChoice::take(std::span<const Item> items, std::uint32_t item) noexcept {
    const std::size_t server = items[item].server;
    if (next_[item] != kNone) previous_[next_[item]] = previous_[item];
    (previous_[item] == kNone ? head_[server] : next_[previous_[item]]) = next_[item];
    --n_items_[server];
}

std::size_t ReplicaChoice::busiest(std::span<const std::uint32_t> weights) const noexcept {
    std::size_t top = 0;
    for (std::size_t s = 1; s < weights.size(); ++s)
        if (n_items_[s] * weights[top] > n_items_[top] * weights[s]) top = s;
    return top;
}

/// Takes one item from `top`, the busiest server, if the others can take one more without becoming
/// as busy: perhaps by handing on one of theirs. Where they cannot, all items of the servers that
/// were reached can only be there, and top's load is the least possible.
bool ReplicaChoice::relieve(std::size_t top, std::span<Item> items,
                            std::span<const std::uint32_t> weights) noexcept {
    std::array<std::uint8_t, kMaxServers> queue;
    std::array<std::uint32_t, kMaxServers> received;  // by a reached server: the item on the way
    std::uint64_t reached = bit(top);
    std::size_t n_queued = 0;
    queue[n_queued++] = static_cast<std::uint8_t>(top);
    for (std::size_t at = 0; at < n_queued; ++at)
        for (std::uint32_t i = head_[queue[at]]; i != kNone; i = next_[i])
            for (std::uint64_t more = items[i].holders & ~reached; more != 0; more &= more - 1) {
                auto server = static_cast<std::size_t>(std::countr_zero(more));
                reached |= bit(server);
                received[server] = i;
                queue[n_queued++] = static_cast<std::uint8_t>(server);
                if ((n_items_[server] + 1) * weights[top] >= n_items_[top] * weights[server])
                    continue;
                while (server != top) {
                    const std::uint32_t item = received[server];
                    const std::size_t giver = items[item].server;
                    take(items, item);
                    put(items, item, server);
                    server = giver;
                }
                return true;
            }
    return false;
}

void ReplicaChoice::spread(std::span<Item> items, std::span<const std::uint32_t> weights) noexcept {
    K3_CHECK(items.size() <= next_.size() && weights.size() <= kMaxServers,
             "more items or servers than there is room for");
    n_items_.fill(0);
    head_.fill(kNone);
    bool has_choice = false;
    for (std::uint32_t i = 0; i < items.size(); ++i) {
        put(items, i, items[i].server);
        has_choice = has_choice || std::popcount(items[i].holders) > 1;
    }
    while (has_choice && relieve(busiest(weights), items, weights)) {
    }
}

}  // namespace k3::experts
