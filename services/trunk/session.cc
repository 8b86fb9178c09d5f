#include "services/trunk/session.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/settings.h"

namespace k3::trunk {

SessionLayout::SessionLayout(const model::ModelConfig& config, LayerRange range, int n_threads)
    : range_(range),
      kda_(config.kda),
      mla_(config.mla),
      size_(model::session_size(config, range, static_cast<std::uint64_t>(n_threads))),
      n_threads_(static_cast<std::size_t>(n_threads)) {
    const std::size_t dim = kda_.head_dim;
    head_floats_ = dim * dim + std::size_t{3} * (kda_.conv_kernel - 1) * dim;
    std::size_t n_kda = 0;
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer) {
        is_kda_.push_back(config.layer_kinds[layer] == model::LayerKind::kda);
        index_.push_back(is_kda_.back() ? n_kda++ : n_mla_++);
    }
    kda_bytes_ = n_kda * kda_.n_heads * head_floats_ * sizeof(float);
}

std::uint64_t SessionLayout::bytes(std::uint64_t max_positions) const noexcept {
    return size_.bytes(max_positions);
}

std::uint64_t SessionLayout::layer_bytes(std::uint32_t layer,
                                         std::uint64_t n_positions) const noexcept {
    if (is_kda(layer)) return sizeof(float) * kda_.n_heads * head_floats_;
    return n_positions * mla_.cache_bytes();
}

Result<std::unique_ptr<Session>> Session::create(const SessionLayout& layout, std::uint64_t id,
                                                 std::uint64_t max_positions) {
    std::unique_ptr<Session> session(new Session(layout));
    session->id_ = id;
    session->max_positions_ = max_positions;
    const std::size_t n_scores = layout.n_mla_ > 0 ? layout.n_threads_ * max_positions : 0;
    ASSIGN_OR_RETURN(session->memory_, Buffer<std::byte>::create(
                                           layout.bytes(max_positions) - n_scores * sizeof(float),
                                           "the state of a session"));
    ASSIGN_OR_RETURN(session->scores_, Buffer<float>::create(n_scores, "the scores of a session"));
    return session;
}

KdaHeadState Session::kda(std::uint32_t layer, std::size_t head) noexcept {
    const std::size_t dim = layout_.kda_.head_dim;
    const std::size_t history = (layout_.kda_.conv_kernel - 1) * dim;
    const std::size_t place =
        layout_.index_[layer - layout_.range_.first] * layout_.kda_.n_heads + head;
    float* at = reinterpret_cast<float*>(memory_.data()) + place * layout_.head_floats_;
    float* histories = at + dim * dim;
    return {at, histories, histories + history, histories + 2 * history};
}

MlaState Session::mla(std::uint32_t layer) noexcept {
    const std::size_t place = layout_.index_[layer - layout_.range_.first];
    std::byte* at =
        memory_.data() + layout_.kda_bytes_ + place * max_positions_ * layout_.mla_.cache_bytes();
    return {at, at + max_positions_ * layout_.latent_bytes()};
}

LayerState Session::layer_state(std::uint32_t layer, std::uint64_t n_positions) noexcept {
    if (layout_.is_kda(layer)) {
        const std::span heads(kda(layer, 0).matrix, layout_.kda_.n_heads * layout_.head_floats_);
        return {std::as_writable_bytes(heads), {}};
    }
    const MlaState state = mla(layer);
    return {std::span(state.latent, n_positions * layout_.latent_bytes()),
            std::span(state.rope, n_positions * layout_.rope_bytes())};
}

void Session::copy_from(Session& source) noexcept {
    position_ = source.position_;
    std::memcpy(memory_.data(), source.memory_.data(), layout_.kda_bytes_);
    for (std::size_t i = 0; i < layout_.is_kda_.size(); ++i) {
        if (layout_.is_kda_[i]) continue;
        const std::uint32_t layer = layout_.range_.first + static_cast<std::uint32_t>(i);
        const LayerState from = source.layer_state(layer, position_);
        const LayerState to = layer_state(layer, position_);
        std::memcpy(to.first.data(), from.first.data(), from.first.size());
        std::memcpy(to.second.data(), from.second.data(), from.second.size());
    }
}

SessionTable::SessionTable(const model::ModelConfig& config, LayerRange range, int n_threads,
                           Options options)
    : layout_(config, range, n_threads), options_(options) {}

Status SessionTable::check_open(std::uint64_t id, std::uint64_t max_positions) const {
    const std::string name = "session " + std::to_string(id);
    if (id == 0)
        return Error{ErrorCode::invalid_argument, "session 0 cannot be opened: 0 names none",
                     "choose another number"};
    if (sessions_.contains(id))
        return Error{ErrorCode::invalid_argument, name + " is already open",
                     "choose another number, or drop it first"};
    if (max_positions == 0)
        return Error{ErrorCode::invalid_argument, name + " was asked to hold 0 positions",
                     "ask for at least the length of the prompt"};
    if (max_positions > options_.max_positions)
        return Error{ErrorCode::resource_exhausted,
                     name + " was asked to hold " + std::to_string(max_positions) +
                         " positions, but the model's context is " +
                         std::to_string(options_.max_positions),
                     "shorten the prompt or ask for fewer tokens"};
    if (sessions_.size() >= options_.max_sessions)
        return Error{ErrorCode::resource_exhausted,
                     name + " does not fit: " + std::to_string(sessions_.size()) + " of " +
                         std::to_string(options_.max_sessions) + " sessions are open",
                     "drop one, or start k3-trunk with a larger --max-sessions"};
    const std::uint64_t need = layout_.bytes(max_positions);
    const std::uint64_t left = options_.budget_bytes - used_bytes_;
    if (need > left)
        return Error{ErrorCode::resource_exhausted,
                     name + " of " + std::to_string(max_positions) + " positions needs " +
                         format_bytes(need) + ", but " + format_bytes(left) + " of " +
                         format_bytes(options_.budget_bytes) + " for sessions are free",
                     "drop a session, ask for fewer positions, or start k3-trunk with a larger "
                     "--session-bytes"};
    return Status::ok();
}

Result<Session*> SessionTable::open(std::uint64_t id, std::uint64_t max_positions) {
    RETURN_IF_ERROR(check_open(id, max_positions));
    ASSIGN_OR_RETURN(auto session, Session::create(layout_, id, max_positions));
    used_bytes_ += layout_.bytes(max_positions);
    return sessions_.emplace(id, std::move(session)).first->second.get();
}

Status SessionTable::fork(std::uint64_t source, std::uint64_t target, std::uint64_t max_positions) {
    ASSIGN_OR_RETURN(Session * from, find(source));
    if (max_positions < from->position())
        return Error{ErrorCode::invalid_argument,
                     "session " + std::to_string(target) + " was asked to hold " +
                         std::to_string(max_positions) + " positions, but its source, session " +
                         std::to_string(source) + ", has " + std::to_string(from->position()),
                     "ask for more positions"};
    ASSIGN_OR_RETURN(Session * to, open(target, max_positions));
    to->copy_from(*from);
    return Status::ok();
}

void SessionTable::drop(std::uint64_t id) {
    auto found = sessions_.find(id);
    if (found == sessions_.end()) return;
    if (found->second->lent_for_.empty()) {
        used_bytes_ -= layout_.bytes(found->second->max_positions());
    } else {
        found->second->is_dropped_ = true;
        dropped_.push_back(std::move(found->second));
    }
    sessions_.erase(found);
}

Session& SessionTable::lend(std::uint64_t id, std::string reason) {
    const auto found = sessions_.find(id);
    K3_CHECK(found != sessions_.end() && found->second->lent_for_.empty(), std::to_string(id));
    found->second->lent_for_ = std::move(reason);
    return *found->second;
}

void SessionTable::take_back(Session& session, bool drop_it) {
    session.lent_for_.clear();
    const auto dropped = std::find_if(dropped_.begin(), dropped_.end(),
                                      [&](const auto& one) { return one.get() == &session; });
    if (dropped != dropped_.end()) {
        used_bytes_ -= layout_.bytes(session.max_positions());
        dropped_.erase(dropped);
    } else if (drop_it) {
        drop(session.id());
    }
}

Result<Session*> SessionTable::find(std::uint64_t id) {
    auto found = sessions_.find(id);
    if (found == sessions_.end())
        return Error{ErrorCode::not_found, "session " + std::to_string(id) + " is not open",
                     "open it first; a restarted trunk has forgotten every session"};
    if (!found->second->lent_for_.empty())
        return Error{ErrorCode::unavailable,
                     "session " + std::to_string(id) + " " + found->second->lent_for_,
                     "wait for the answer to that request first"};
    if (!found->second->poison().empty())
        return Error{ErrorCode::unavailable,
                     "session " + std::to_string(id) +
                         " cannot go on since an earlier step failed: " + found->second->poison(),
                     "drop the session and send its prompt again"};
    return found->second.get();
}

}  // namespace k3::trunk
