#include "services/trunk/expert_directory.h"

#include <algorithm>
#include <utility>

namespace k3::trunk {

namespace {

constexpr std::uint32_t kNoItem = 0xFFFFFFFF;

}  // namespace

ExpertDirectory::ExpertDirectory(Needs needs, std::vector<std::string> endpoints)
    : needs_(std::move(needs)),
      holders_(std::size_t{needs_.n_layers} * needs_.n_experts),
      weights_(endpoints.size(), 1),
      choice_(needs_.n_experts),
      item_of_(needs_.n_experts, kNoItem) {
    items_.reserve(needs_.n_experts);
    for (std::string& endpoint : endpoints) servers_.emplace_back().endpoint = std::move(endpoint);
}

std::string ExpertDirectory::name(std::size_t server) const {
    return servers_[server].name + " (" + servers_[server].endpoint + ")";
}

Status ExpertDirectory::admit(std::size_t server, const msg::Announcement& announcement) {
    withdraw(server);
    if (!announcement.name.empty()) servers_[server].name = announcement.name;

    const auto* facts = std::get_if<msg::ExpertFacts>(&announcement.facts);
    if (announcement.kind != msg::ServiceKind::experts || facts == nullptr)
        return Error{ErrorCode::incompatible,
                     name(server) + " is a " + std::string(msg::to_string(announcement.kind)) +
                         " service, not an expert server",
                     "check the endpoints given with --experts"};
    if (announcement.fingerprint != needs_.fingerprint)
        return Error{ErrorCode::incompatible,
                     name(server) + " serves the checkpoint with fingerprint " +
                         announcement.fingerprint + ", but " + needs_.self + " the one with " +
                         needs_.fingerprint,
                     "start both on the same checkpoint"};
    if (facts->n_experts != needs_.n_experts || facts->latent_size != needs_.latent_size ||
        facts->max_call_rows == 0)
        return Error{ErrorCode::incompatible,
                     name(server) + " announces " + std::to_string(facts->n_experts) +
                         " experts of latent size " + std::to_string(facts->latent_size) +
                         " and calls of " + std::to_string(facts->max_call_rows) + " rows, but " +
                         needs_.self + " needs " + std::to_string(needs_.n_experts) +
                         " of latent size " + std::to_string(needs_.latent_size),
                     "start both from the same build and checkpoint"};
    // Another build may round differently: in the middle of a text nobody would see that.
    std::string& build = servers_[server].build;
    if (!build.empty() && build != announcement.build)
        return Error{ErrorCode::incompatible,
                     name(server) + " came back as another build (" +
                         (announcement.build.empty() ? "of unknown id" : announcement.build) +
                         ") than it had been (" + build + ")",
                     "start the former binary there, or restart the trunk to go on with this one"};
    build = announcement.build;
    servers_[server].max_call_rows = facts->max_call_rows;
    weights_[server] = facts->weight;
    for (const msg::ExpertHolding& holding : facts->holdings) {
        if (holding.layer < needs_.first_layer ||
            holding.layer - needs_.first_layer >= needs_.n_layers)
            continue;
        for (std::uint32_t expert = 0; expert < needs_.n_experts; ++expert)
            if (holding.holds(expert))
                holders_[index(holding.layer, expert)] |= std::uint64_t{1} << server;
    }
    return Status::ok();
}

void ExpertDirectory::withdraw(std::size_t server) noexcept {
    for (std::uint64_t& mask : holders_) mask &= ~(std::uint64_t{1} << server);
}

std::string ExpertDirectory::unheld() const {
    std::size_t n_missing = 0;
    std::string first;
    for (std::size_t i = 0; i < holders_.size(); ++i) {
        if (holders_[i] != 0) continue;
        if (n_missing < 3)
            first += (n_missing == 0 ? "" : ", ") + std::string("layer ") +
                     std::to_string(needs_.first_layer + i / needs_.n_experts) + " expert " +
                     std::to_string(i % needs_.n_experts);
        ++n_missing;
    }
    if (n_missing == 0) return {};
    return std::to_string(n_missing) + " of " + std::to_string(holders_.size()) +
           " experts are held by nobody (" + first + (n_missing > 3 ? ", ..." : "") + ")";
}

Status ExpertDirectory::check_coverage() const {
    const std::string missing = unheld();
    if (missing.empty()) return Status::ok();
    std::string asked;
    for (std::size_t s = 0; s < servers_.size(); ++s) asked += (s == 0 ? "" : ", ") + name(s);
    return Error{
        ErrorCode::incompatible,
        missing + "; " + (asked.empty() ? "no expert server was named" : "asked: " + asked),
        "start servers for the missing share, or name them with --experts"};
}

bool ExpertDirectory::is_covered_by(std::uint64_t available) const noexcept {
    return std::all_of(holders_.begin(), holders_.end(),
                       [&](std::uint64_t mask) { return (mask & available) != 0; });
}

bool ExpertDirectory::is_held(std::uint32_t layer, std::uint32_t expert,
                              std::uint64_t available) const noexcept {
    return (holders_[index(layer, expert)] & available) != 0;
}

void ExpertDirectory::choose(const Routing& routing, const std::vector<bool>& wanted,
                             std::uint64_t available, std::uint64_t avoided,
                             std::span<std::uint8_t> servers) noexcept {
    const std::size_t n_picks = routing.n_rows * routing.top_k;
    items_.clear();
    for (std::size_t rank = 0; rank < routing.top_k; ++rank)
        for (std::size_t i = rank; i < n_picks; i += routing.top_k) {
            const std::uint32_t expert = routing.ids[i];
            if (!wanted[i] || item_of_[expert] != kNoItem) continue;
            std::uint64_t holders = holders_[index(routing.layer, expert)] & available;
            if (holders == 0) continue;
            if ((holders & ~avoided) != 0) holders &= ~avoided;
            const std::size_t server =
                experts::preferred_holder(routing.layer, expert, holders, weights_);
            item_of_[expert] = static_cast<std::uint32_t>(items_.size());
            items_.push_back({holders, static_cast<std::uint8_t>(server)});
        }
    choice_.spread(items_, weights_);
    for (std::size_t i = 0; i < n_picks; ++i) {
        const std::uint32_t item = item_of_[routing.ids[i]];
        servers[i] = wanted[i] && item != kNoItem ? items_[item].server : kNobody;
    }
    for (std::size_t i = 0; i < n_picks; ++i) item_of_[routing.ids[i]] = kNoItem;
}

}  // namespace k3::trunk
