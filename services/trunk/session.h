#pragma once
// What a stage remembers of each session: the only state in the whole trunk.
//
// Per KDA layer the recurrent matrix of every head and the last projections that the convolution
// still needs; per MLA layer the latent and the shared key of every position (spec section 3.5),
// in fp32 or rounded to bf16.
// All of it is reserved when the session is opened, so a step can neither run out of memory nor
// find the budget used up. Everything of one KDA head lies together, because one thread takes one
// head through all rows of a step.
//
// One thread uses everything here, except that a session may be lent to another one, which then has
// its state to itself.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/model/memory_plan.h"
#include "services/trunk/buffer.h"
#include "services/trunk/layer_range.h"

namespace k3::trunk {

/// Where the parts of a session lie in its memory.
class SessionLayout {
  public:
    SessionLayout(const model::ModelConfig& config, LayerRange range, int n_threads);

    /// Memory of one session opened for `max_positions`. Saturates instead of overflowing.
    std::uint64_t bytes(std::uint64_t max_positions) const noexcept;
    /// Of that, the state of one layer after `n_positions`, which are within the context.
    std::uint64_t layer_bytes(std::uint32_t layer, std::uint64_t n_positions) const noexcept;

    LayerRange range() const noexcept { return range_; }

  private:
    friend class Session;
    bool is_kda(std::uint32_t layer) const noexcept { return is_kda_[layer - range_.first]; }
    /// Of one position in one MLA layer.
    std::size_t latent_bytes() const noexcept {
        return std::size_t{mla_.kv_lora_rank} * model::value_bytes(mla_.cache);
    }
    std::size_t rope_bytes() const noexcept {
        return std::size_t{mla_.qk_rope_head_dim} * model::value_bytes(mla_.cache);
    }

    LayerRange range_;
    model::KdaConfig kda_;
    model::MlaConfig mla_;
    model::SessionSize size_;
    std::size_t head_floats_ = 0;  // of one KDA head: matrix and three histories
    std::size_t kda_bytes_ = 0;    // of all KDA layers together
    std::size_t n_mla_ = 0;
    std::size_t n_threads_ = 0;
    std::vector<bool> is_kda_;        // [count]
    std::vector<std::size_t> index_;  // [count], place among the layers of the same kind
};

struct KdaHeadState {
    float* matrix;     // [head_dim (key), head_dim (value)]
    float* q_history;  // [conv_kernel - 1, head_dim], oldest first, before convolution
    float* k_history;  // same
    float* v_history;  // same
};

/// Values of config.mla.cache: float, or bf16 as std::uint16_t.
struct MlaState {
    std::byte* latent;  // [max_positions, kv_lora_rank], after its norm
    std::byte* rope;    // [max_positions, qk_rope_head_dim], raw projection
};

/// The state of one layer as it is saved: two ranges of memory, the second one may be empty.
struct LayerState {
    std::span<std::byte> first;   // KDA: all heads, [n_heads, head]; MLA: latents of the positions
    std::span<std::byte> second;  // MLA: keys of the positions
};

class Session {
  public:
    static Result<std::unique_ptr<Session>> create(const SessionLayout& layout, std::uint64_t id,
                                                   std::uint64_t max_positions);

    std::uint64_t id() const noexcept { return id_; }
    std::uint64_t max_positions() const noexcept { return max_positions_; }
    /// The position of the next row.
    std::uint64_t position() const noexcept { return position_; }
    void advance(std::uint64_t n_rows) noexcept { position_ += n_rows; }

    /// Why the session cannot be used any more; empty while it can.
    const std::string& poison() const noexcept { return poison_; }
    void set_poison(std::string reason) { poison_ = std::move(reason); }
    /// Any thread: nobody will ask for the session again.
    bool is_dropped() const noexcept { return is_dropped_; }

    KdaHeadState kda(std::uint32_t layer, std::size_t head) noexcept;
    MlaState mla(std::uint32_t layer) noexcept;
    /// Scratch of one thread, [max_positions]; here because its size is the session's.
    float* scores(int thread) noexcept {
        return scores_.data() + static_cast<std::size_t>(thread) * max_positions_;
    }

    /// What `layer` remembers of the first `n_positions`, which must be all that it has seen: a
    /// KDA state cannot be taken back.
    LayerState layer_state(std::uint32_t layer, std::uint64_t n_positions) noexcept;
    /// After every layer's state has been written into layer_state(): goes on behind it.
    void set_position(std::uint64_t position) noexcept { position_ = position; }

    /// Takes over state and position of `source`, whose positions must fit.
    void copy_from(Session& source) noexcept;

  private:
    friend class SessionTable;
    explicit Session(const SessionLayout& layout) : layout_(layout) {}
    const SessionLayout& layout_;
    std::uint64_t id_ = 0;
    std::uint64_t max_positions_ = 0;
    std::uint64_t position_ = 0;
    std::string poison_;
    std::string lent_for_;  // "is being saved"; empty: it is here
    std::atomic<bool> is_dropped_{false};
    Buffer<std::byte> memory_;  // KDA layers, then per MLA layer latent and rope
    Buffer<float> scores_;      // [n_threads, max_positions] if there are MLA layers
};

/// The open sessions and their budget.
class SessionTable {
  public:
    struct Options {
        std::uint32_t max_sessions = 0;
        std::uint64_t budget_bytes = 0;
        std::uint64_t max_positions = 0;  // context limit of the model
    };
    /// `n_threads`: the most that will compute at the same time.
    SessionTable(const model::ModelConfig& config, LayerRange range, int n_threads,
                 Options options);

    /// Errors: invalid_argument (id 0, already open, no positions), resource_exhausted (more
    /// positions than the model's context, too many sessions, budget: both numbers are named).
    Result<Session*> open(std::uint64_t id, std::uint64_t max_positions);
    /// Errors: those of open and of find, invalid_argument (source is longer than max_positions).
    Status fork(std::uint64_t source, std::uint64_t target, std::uint64_t max_positions);
    /// Dropping an unknown session is fine. A session that is lent keeps its memory until it is
    /// back; its number is free at once.
    void drop(std::uint64_t id);

    /// Errors: not_found; unavailable: what poisoned it, or what it is lent for.
    Result<Session*> find(std::uint64_t id);

    /// Gives an open session away: until take_back() nothing here touches its state. `reason`
    /// completes "session 3 ...".
    Session& lend(std::uint64_t id, std::string reason);
    void take_back(Session& session, bool drop_it);

    const SessionLayout& layout() const noexcept { return layout_; }
    std::size_t size() const noexcept { return sessions_.size(); }
    std::uint64_t used_bytes() const noexcept { return used_bytes_; }

  private:
    Status check_open(std::uint64_t id, std::uint64_t max_positions) const;

    SessionLayout layout_;
    Options options_;
    std::uint64_t used_bytes_ = 0;
    std::unordered_map<std::uint64_t, std::unique_ptr<Session>> sessions_;
    std::vector<std::unique_ptr<Session>> dropped_;  // while they were lent
};

}  // namespace k3::trunk
