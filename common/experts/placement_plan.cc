#include "common/experts/placement_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "common/experts/replica_choice.h"

namespace k3::experts {

namespace {

Error bad_request(std::string what, std::string remedy) {
    return Error{ErrorCode::invalid_argument, std::move(what), std::move(remedy)};
}

Status check(const PlacementRequest& request, const model::ModelConfig& config) {
    const std::size_t n = request.weights.size();
    if (n == 0 || n > kMaxServers)
        return bad_request(fmt::format("a placement over {} servers", n),
                           fmt::format("name 1 to {} expert servers", kMaxServers));
    if (request.replicas == 0 || request.replicas > n)
        return bad_request(
            fmt::format("{} replicas of every expert on {} servers", request.replicas, n),
            fmt::format("choose replicas from 1 to {}", n));
    if (!(request.replicated >= 0 && request.replicated <= 1))
        return bad_request(fmt::format("replicas of a part of {}", request.replicated),
                           "choose a part from 0 to 1");
    if (request.trace == nullptr) {
        if (request.replicated < 1)
            return bad_request("replicas of the experts used most, and no trace says which are",
                               "give a recorded routing, or replicate all");
        return Status::ok();
    }
    for (const RoutingTrace::Visit& visit : request.trace->visits) {
        const auto last = std::max_element(
            visit.uses.begin(), visit.uses.end(),
            [](const ExpertUse& a, const ExpertUse& b) { return a.expert < b.expert; });
        const std::uint32_t expert = last == visit.uses.end() ? 0 : last->expert;
        if (visit.layer >= config.n_layers || !config.is_moe(visit.layer) ||
            expert >= config.moe.n_experts)
            return bad_request(
                fmt::format("the trace uses expert {} of layer {}, and {} has layers {} to {} of "
                            "{} experts",
                            expert, visit.layer, config.name, config.first_k_dense,
                            config.n_layers - 1, config.moe.n_experts),
                "give a trace of this model");
    }
    return Status::ok();
}

/// Deals out one layer after the other.
class Dealer {
  public:
    Dealer(const PlacementRequest& request, const model::ModelConfig& config)
        : request_(request),
          n_servers_(request.weights.size()),
          n_experts_(config.moe.n_experts),
          n_replicated_(
              static_cast<std::uint32_t>(std::lround(request.replicated * config.moe.n_experts))),
          is_striped_(request.trace == nullptr &&
                      std::equal(request.weights.begin() + 1, request.weights.end(),
                                 request.weights.begin())),
          owed_(n_servers_),
          placements_(n_servers_, model::Placement(config.n_layers, config.moe.n_experts)) {
        if (request.trace == nullptr) return;
        visits_of_layer_.resize(config.n_layers);
        for (const RoutingTrace::Visit& visit : request.trace->visits)
            visits_of_layer_[visit.layer].push_back(&visit);
    }

    void deal(std::uint32_t layer) {
        layer_ = layer;
        read_trace_of_layer();
        raise_quotas();
        picked_together_.assign(visits_.size() * n_servers_, 0);
        together_with_.assign(n_servers_ * n_servers_, 0);
        home_.assign(n_experts_, 0);
        for (std::uint32_t expert : by_use_)
            home_[expert] = is_striped_ ? stripe(expert) : give(expert, 0);
        for (std::uint32_t copy = 1; copy < request_.replicas; ++copy)
            for (std::uint32_t i = 0; i < n_replicated_; ++i) give(by_use_[i], copy);
    }

    std::vector<model::Placement> take() { return std::move(placements_); }

  private:
    /// by_use_: all experts, most used first; visits_of_: which visits use each.
    void read_trace_of_layer() {
        by_use_.resize(n_experts_);
        std::iota(by_use_.begin(), by_use_.end(), 0U);
        visits_of_.assign(n_experts_, {});
        visits_ = visits_of_layer_.empty() ? std::vector<const RoutingTrace::Visit*>()
                                           : visits_of_layer_[layer_];
        for (std::uint32_t v = 0; v < visits_.size(); ++v)
            for (const ExpertUse& use : visits_[v]->uses) visits_of_[use.expert].push_back(v);
        std::stable_sort(by_use_.begin(), by_use_.end(), [&](std::uint32_t a, std::uint32_t b) {
            return visits_of_[a].size() > visits_of_[b].size();
        });
    }

    /// What each server is owed grows by its part of this layer: in proportion to its weight, but
    /// nobody can hold an expert twice.
    void raise_quotas() {
        quotas_.assign(n_servers_, 0);
        double left = n_experts_ + static_cast<double>(request_.replicas - 1) * n_replicated_;
        std::vector<bool> is_full(n_servers_);
        for (bool again = true; again;) {
            again = false;
            double weight = 0;
            for (std::size_t s = 0; s < n_servers_; ++s)
                if (!is_full[s]) weight += request_.weights[s];
            for (std::size_t s = 0; s < n_servers_ && !again; ++s) {
                if (is_full[s] || request_.weights[s] * left <= weight * n_experts_) continue;
                is_full[s] = again = true;
                quotas_[s] = n_experts_;
                left -= n_experts_;
            }
            if (again) continue;
            for (std::size_t s = 0; s < n_servers_; ++s)
                if (!is_full[s]) quotas_[s] = left * request_.weights[s] / weight;
        }
        for (std::size_t s = 0; s < n_servers_; ++s) owed_[s] += quotas_[s];
    }

    /// How much the calls that use the expert find on the server already, for its weight.
    double crowd(std::uint32_t expert, std::size_t server) const {
        double n = 0;
        for (std::uint32_t v : visits_of_[expert]) n += picked_together_[v * n_servers_ + server];
        return n / request_.weights[server];
    }

    std::size_t stripe(std::uint32_t expert) {
        const std::size_t server = (expert + layer_) % n_servers_;
        placements_[server].add(layer_, expert);
        owed_[server] -= 1;
        return server;
    }

    std::size_t give(std::uint32_t expert, std::uint32_t copy) {
        struct Candidate {
            std::size_t server;
            bool is_owed;
            double crowd;
            double owed;
            std::uint32_t together;
            std::size_t turn;
        };
        const auto is_better = [](const Candidate& a, const Candidate& b) {
            if (a.is_owed != b.is_owed) return a.is_owed;
            if (a.crowd != b.crowd) return a.crowd < b.crowd;
            if (a.owed != b.owed) return a.owed > b.owed;
            if (a.together != b.together) return a.together < b.together;
            return a.turn < b.turn;
        };
        Candidate best{n_servers_, false, 0, 0, 0, 0};
        for (std::size_t s = 0; s < n_servers_; ++s) {
            if (placements_[s].holds(layer_, expert)) continue;
            // Rounded: sums of thirds must not decide which of two servers is owed more.
            const double owed = std::round(owed_[s] / quotas_[s] * 1e9) / 1e9;
            const std::uint32_t together =
                copy == 0 ? 0 : together_with_[home_[expert] * n_servers_ + s];
            const std::size_t turn =
                (s + n_servers_ - (expert + layer_ + copy) % n_servers_) % n_servers_;
            const Candidate candidate{s, owed > 0, crowd(expert, s), owed, together, turn};
            if (best.server == n_servers_ || is_better(candidate, best)) best = candidate;
        }
        placements_[best.server].add(layer_, expert);
        owed_[best.server] -= 1;
        if (copy > 0) ++together_with_[home_[expert] * n_servers_ + best.server];
        if (copy == 0)
            for (std::uint32_t v : visits_of_[expert])
                ++picked_together_[v * n_servers_ + best.server];
        return best.server;
    }

    const PlacementRequest& request_;
    const std::size_t n_servers_;
    const std::uint32_t n_experts_;
    const std::uint32_t n_replicated_;  // experts of a layer
    bool is_striped_;                   // all alike, and nothing else to go by
    std::vector<double> quotas_;        // parts of the layer, [servers]
    std::vector<double> owed_;          // experts that each server should hold by now and does not
    std::vector<model::Placement> placements_;
    std::vector<std::vector<const RoutingTrace::Visit*>> visits_of_layer_;

    // Of the layer that is dealt out.
    std::uint32_t layer_ = 0;
    std::vector<const RoutingTrace::Visit*> visits_;
    std::vector<std::uint32_t> by_use_;
    std::vector<std::vector<std::uint32_t>> visits_of_;
    std::vector<std::uint32_t> picked_together_;  // [visits, servers]: first holders
    std::vector<std::uint32_t> together_with_;    // [servers, servers]: first holder, replica
    std::vector<std::size_t> home_;               // [experts]: first holder
};

}  // namespace

Result<std::vector<model::Placement>> place_experts(const PlacementRequest& request,
                                                    const model::ModelConfig& config) {
    RETURN_IF_ERROR(check(request, config));
    Dealer dealer(request, config);
    for (std::uint32_t layer = config.first_k_dense; layer < config.n_layers; ++layer)
        dealer.deal(layer);
    return dealer.take();
}

}  // namespace k3::experts
