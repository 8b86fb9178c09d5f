#pragma once
// Who holds which expert, from what the expert servers announced.
//
// Pure bookkeeping, without sockets: whether a server fits this trunk at all, whether every expert
// is held by somebody, and which of several holders is asked. That depends only on the picks of the
// call, on who is there, and on the weights that servers announce
// (common/experts/replica_choice.h).

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/experts/replica_choice.h"
#include "common/transport/messages/control.h"
#include "services/trunk/expert_backend.h"

namespace k3::trunk {

class ExpertDirectory {
  public:
    static constexpr std::size_t kMaxServers = experts::kMaxServers;
    static constexpr std::size_t kNobody = kMaxServers;

    /// What this trunk needs from its servers together.
    struct Needs {
        std::string self;         // how errors call this trunk
        std::string fingerprint;  // of its checkpoint
        std::uint32_t first_layer = 0;
        std::uint32_t n_layers = 0;  // MoE layers [first_layer, first_layer + n_layers)
        std::uint32_t n_experts = 0;
        std::uint32_t latent_size = 0;
    };
    ExpertDirectory(Needs needs, std::vector<std::string> endpoints);

    /// Takes down what a server holds now, replacing what it held before.
    /// Errors: incompatible (not an expert server; another checkpoint, both fingerprints named;
    /// other sizes; another build than the first time), and then the server counts as holding
    /// nothing.
    Status admit(std::size_t server, const msg::Announcement& announcement);
    /// It counts as holding nothing until it is admitted again.
    void withdraw(std::size_t server) noexcept;

    /// Error: incompatible if an expert is held by nobody: how many, the first three, and who was
    /// asked.
    Status check_coverage() const;
    /// "4 of 288 experts are held by nobody (the first three)"; empty if that is not so.
    std::string unheld() const;

    /// True if every expert is held by somebody among `available`.
    bool is_covered_by(std::uint64_t available) const noexcept;

    /// Whether any of `available` (bit s: server s) holds the expert.
    bool is_held(std::uint32_t layer, std::uint32_t expert, std::uint64_t available) const noexcept;

    /// Gives every wanted pick to a holder among `available`, so that the busiest of them has as
    /// little to read as possible: servers[i] for pick i. kNobody: no holder is there, or the pick
    /// is not wanted. All picks of an expert go to the same server, to one of `avoided` only if no
    /// other that is available holds it. Takes no memory.
    void choose(const Routing& routing, const std::vector<bool>& wanted, std::uint64_t available,
                std::uint64_t avoided, std::span<std::uint8_t> servers) noexcept;

    std::size_t n_servers() const noexcept { return servers_.size(); }
    /// "experts-1 (ipc:///run/e1.sock)", or "expert server (...)" before its first announcement.
    std::string name(std::size_t server) const;
    std::uint32_t max_call_rows(std::size_t server) const noexcept {
        return servers_[server].max_call_rows;
    }

  private:
    struct Server {
        std::string endpoint;
        std::string name = "expert server";
        std::string build;  // at its first announcement; empty: none yet, or it does not say
        std::uint32_t max_call_rows = 0;
    };
    std::size_t index(std::uint32_t layer, std::uint32_t expert) const noexcept {
        return std::size_t{layer - needs_.first_layer} * needs_.n_experts + expert;
    }

    Needs needs_;
    std::vector<Server> servers_;
    std::vector<std::uint64_t> holders_;  // [n_layers, n_experts], bit s: server s holds it
    std::vector<std::uint32_t> weights_;  // [n_servers]

    // Of the call whose servers are chosen.
    experts::ReplicaChoice choice_;
    std::vector<experts::ReplicaChoice::Item> items_;  // [n_experts], its experts by rank
    std::vector<std::uint32_t> item_of_;               // [n_experts], or kNoItem
};

}  // namespace k3::trunk
