#pragma once
// Which of several holders computes a picked expert.
//
// A layer's experts are done when the busiest server is done, and a server is busy in proportion to
// the experts that it reads, whatever number of rows wants each of them. So the experts of a call
// are spread until no other choice of holders would leave the busiest server less to do. Spreading
// starts from a holder that is the same in every call, and moves an expert away only where that
// takes load from the busiest server: holders keep what they use in memory, and an expert that
// wandered would take room in the memory of each. Those that the router ranked last move first,
// because they are the least likely to be used, and found in memory, again (docs/performance.md has
// the figures).
//
// The choice depends on nothing but its arguments. It cannot change a bit of a result: sums are
// fixed point (docs/ARCHITECTURE.md).

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace k3::experts {

/// Servers are bits of a mask.
inline constexpr std::size_t kMaxServers = 64;

/// The holder of `holders` (not 0) that an expert stays with as long as load permits, so that each
/// has a part of them in proportion to its weight.
std::size_t preferred_holder(std::uint32_t layer, std::uint32_t expert, std::uint64_t holders,
                             std::span<const std::uint32_t> weights) noexcept;

class ReplicaChoice {
  public:
    /// An expert of a call.
    struct Item {
        std::uint64_t holders = 0;  // bit s: server s can compute it; not 0
        std::uint8_t server = 0;    // one of them: before spread the preferred one
    };

    /// Takes all its memory here.
    explicit ReplicaChoice(std::size_t max_items);

    /// Moves items, which come in order of rank, to other holders until the largest
    /// n_items / weight of a server is as small as it can be. weights[s] of server s is at least 1.
    void spread(std::span<Item> items, std::span<const std::uint32_t> weights) noexcept;

  private:
    static constexpr std::uint32_t kNone = 0xFFFFFFFF;

    void put(std::span<Item> items, std::uint32_t item, std::size_t server) noexcept;
    void take(std::span<const Item> items, std::uint32_t item) noexcept;
    std::size_t busiest(std::span<const std::uint32_t> weights) const noexcept;
    bool relieve(std::size_t server, std::span<Item> items,
                 std::span<const std::uint32_t> weights) noexcept;

    std::array<std::uint64_t, kMaxServers> n_items_{};  // of each server
    std::array<std::uint32_t, kMaxServers> head_{};     // its list of items, latest first
    std::vector<std::uint32_t> next_;                   // [max_items], in that list
    std::vector<std::uint32_t> previous_;
};

}  // namespace k3::experts
