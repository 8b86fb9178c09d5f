#include "services/trunk/stage.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <string>

#include "common/base/check.h"
#include "common/kernels/parallel.h"

namespace k3::trunk {

namespace {

bool all_finite(std::span<const float> values) noexcept {
    constexpr std::uint32_t kExponent = 0x7F800000U;
    std::uint32_t bad = 0;
    for (float value : values)
        bad |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(value) & kExponent) ==
                                          kExponent);
    return bad == 0;
}

}  // namespace

Result<std::unique_ptr<Stage>> Stage::create(const model::ModelConfig& config,
                                             WeightSource& weights, ExpertBackend& experts,
                                             const kernels::KernelTable& table,
                                             const Options& options) {
    std::unique_ptr<Stage> stage(new Stage(config, weights, experts, table, options));
    RETURN_IF_ERROR(stage->take_scratch());
    return stage;
}

Status Stage::take_scratch() {
    const std::size_t n = options_.max_step_rows;
    const LayerRange range = options_.range;
    bool has_kda = false;
    bool has_mla = false;
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer)
        (config_.layer_kinds[layer] == model::LayerKind::kda ? has_kda : has_mla) = true;
    ASSIGN_OR_RETURN(stream_, ResidualStream::create(config_, range, n));
    if (has_kda) {
        ASSIGN_OR_RETURN(kda_, Kda::create(config_, n));
    }
    if (has_mla) {
        ASSIGN_OR_RETURN(mla_, Mla::create(config_, n, options_.n_threads));
    }
    ASSIGN_OR_RETURN(ffn_, FeedForward::create(config_, range, n));
    ASSIGN_OR_RETURN(x_, Buffer<float>::create(n * config_.hidden_size, "step rows"));
    ASSIGN_OR_RETURN(y_, Buffer<float>::create(n * config_.hidden_size, "step rows"));
    if (range.is_last(config_)) {
        ASSIGN_OR_RETURN(logits_, Buffer<float>::create(n * config_.vocab_size, "logits"));
    }
    all_rows_.resize(n);
    std::iota(all_rows_.begin(), all_rows_.end(), 0U);
    by_session_.reserve(n);
    runs_.reserve(n);
    tokens_.reserve(n);
    return Status::ok();
}

std::uint32_t Stage::in_vectors() const noexcept {
    return options_.range.is_first() ? 0 : config_.vectors_before(options_.range.first);
}

std::uint32_t Stage::out_vectors() const noexcept {
    return options_.range.is_last(config_) ? 0 : config_.vectors_before(options_.range.end());
}

Result<std::span<const float>> Stage::step(const StepInput& input) {
    expert_wait_ns_ = 0;
    group_by_session(input.rows);
    Result<std::span<const float>> output = run(input);
    for (const SessionRun& run : runs_) {
        if (output.has_value())
            run.session->advance(run.rows.size());
        else
            run.session->set_poison(output.error().message);
    }
    return output;
}

Result<std::span<const float>> Stage::run(const StepInput& input) {
    RETURN_IF_ERROR(begin(input));
    for (std::uint32_t layer = options_.range.first; layer < options_.range.end(); ++layer)
        RETURN_IF_ERROR(run_layer(weights_.layer(layer)));
    if (!options_.range.is_last(config_)) return stream_.contents();
    RETURN_IF_ERROR(run_head(input.wanted));
    return std::span<const float>(logits_.span().first(input.wanted.size() * config_.vocab_size));
}

/// Rows of a session keep their order, which is the order of position.
void Stage::group_by_session(std::span<const StepRow> rows) {
    K3_CHECK(!rows.empty() && rows.size() <= options_.max_step_rows, std::to_string(rows.size()));
    by_session_.assign(all_rows_.begin(),
                       all_rows_.begin() + static_cast<std::ptrdiff_t>(rows.size()));
    std::sort(by_session_.begin(), by_session_.end(), [&](std::uint32_t a, std::uint32_t b) {
        const std::uint64_t id_a = rows[a].session->id();
        const std::uint64_t id_b = rows[b].session->id();
        return id_a != id_b ? id_a < id_b : a < b;
    });
    runs_.clear();
    for (std::size_t first = 0; first < by_session_.size();) {
        Session* session = rows[by_session_[first]].session;
        std::size_t last = first;
        while (last < by_session_.size() && rows[by_session_[last]].session == session) ++last;
        runs_.push_back({session, std::span(by_session_).subspan(first, last - first)});
        first = last;
    }
    batch_ = {rows, runs_};
}

Status Stage::begin(const StepInput& input) {
    const std::size_t n = input.rows.size();
    weights_.begin_step(options_.range.is_last(config_) && !input.wanted.empty());
    if (options_.range.is_first()) {
        tokens_.clear();
        for (const StepRow& row : input.rows) tokens_.push_back(row.token);
        stream_.begin(n, 1);
        RETURN_IF_ERROR(weights_.embed(tokens_, stream_.prefix(0), stream_.stride()));
        observe(Site::embedding, 0, stream_.prefix_view());
        return check_finite(stream_.prefix_view(), all_rows_, 0, "embedding");
    }
    const std::size_t floats = std::size_t{in_vectors()} * config_.hidden_size;
    K3_CHECK(input.hidden.size() == n * floats, std::to_string(input.hidden.size()));
    stream_.begin(n, in_vectors());
    for (std::size_t r = 0; r < n; ++r)
        std::memcpy(stream_.vector(r, 0), input.hidden.data() + r * floats, floats * sizeof(float));
    return Status::ok();
}

/// One layer of the loop in spec section 3.2. Attention and FFN read the mix, their results go to
/// the prefix; at a block boundary the mix sees the finished prefix before it becomes a snapshot.
Status Stage::run_layer(const LayerWeights& weights) {
    const std::uint32_t layer = weights.layer;
    const std::size_t n = batch_.n_rows();
    const std::span<const std::uint32_t> rows = std::span(all_rows_).first(n);

    mix_and_norm(rows, weights.attn_query, weights.input_norm, MixSite::attention, layer);
    observe(Site::attention_in, layer, view(x_, n));
    if (config_.takes_snapshot(layer)) stream_.take_snapshot();
    if (weights.kind == model::LayerKind::kda)
        RETURN_IF_ERROR(kda_.run(products_, layer, weights.kda, batch_, x_.data(), y_.data()));
    else
        RETURN_IF_ERROR(mla_.run(products_, layer, weights.mla, batch_, x_.data(), y_.data()));
    observe(Site::attention_out, layer, view(y_, n));
    RETURN_IF_ERROR(check_finite(view(y_, n), rows, layer, "attention output"));
    stream_.add(table_, y_.data());

    mix_and_norm(rows, weights.mlp_query, weights.post_norm, MixSite::mlp, layer);
    observe(Site::mlp_in, layer, view(x_, n));
    if (weights.is_moe) {
        RETURN_IF_ERROR(ffn_.moe(products_, layer, weights.moe, x_.data(), n, experts_, observer_,
                                 expert_wait_ns_, y_.data()));
    } else {
        RETURN_IF_ERROR(ffn_.dense(products_, weights.dense, x_.data(), n, y_.data()));
    }
    observe(Site::mlp_out, layer, view(y_, n));
    stream_.add(table_, y_.data());
    observe(Site::layer_out, layer, stream_.prefix_view());
    return check_finite(stream_.prefix_view(), rows, layer, "output");
}

/// Spec section 3.10, for the wanted rows only: a row of logits reads all of lm_head.
Status Stage::run_head(std::span<const std::uint32_t> wanted) {
    if (wanted.empty()) return Status::ok();
    const std::uint32_t last = options_.range.end() - 1;
    const HeadWeights& head = weights_.head();
    mix_and_norm(wanted, head.query, head.norm, MixSite::output, last);
    observe(Site::final_norm, last, view(x_, wanted.size()));
    RETURN_IF_ERROR(products_.matmul(head.lm_head, x_.data(), config_.hidden_size, wanted.size(),
                                     logits_.data(), config_.vocab_size));
    return check_finite({logits_.data(), wanted.size(), config_.vocab_size, config_.vocab_size},
                        wanted, last, "logits");
}

void Stage::mix_and_norm(std::span<const std::uint32_t> rows, Vector query, Vector norm,
                         MixSite site, std::uint32_t layer) {
    const std::size_t hidden = config_.hidden_size;
    stream_.mix(table_, rows, query, x_.data());
    if (observer_ != nullptr && stream_.n_snapshots() > 0)
        observer_->on_mix(site, layer, stream_.mix_weights());
    if (site == MixSite::output) observe(Site::output_mix, layer, view(x_, rows.size()));
    kernels::parallel_for(rows.size(), 2 * hidden, [&](std::size_t i) {
        float* row = x_.data() + i * hidden;
        table_.rms_norm(row, norm.data(), hidden, config_.rms_norm_eps, row);
    });
}

void Stage::observe(Site site, std::uint32_t layer, const RowsView& rows) const {
    if (observer_ != nullptr) observer_->on_rows(site, layer, rows);
}

RowsView Stage::view(const Buffer<float>& buffer, std::size_t n_rows) const noexcept {
    return {buffer.data(), n_rows, config_.hidden_size, config_.hidden_size};
}

Status Stage::check_finite(const RowsView& view, std::span<const std::uint32_t> rows,
                           std::uint32_t layer, const char* what) const {
    for (std::size_t i = 0; i < view.n_rows; ++i) {
        if (all_finite(view.row(i))) continue;
        const StepRow& row = batch_.rows[rows[i]];
        return Error{ErrorCode::corrupt,
                     "layer " + std::to_string(layer) + ": the " + what + " of session " +
                         std::to_string(row.session->id()) + ", position " +
                         std::to_string(row.position) + ", is not finite",
                     "check the checkpoint's files: a damaged weight is the likely cause"};
    }
    return Status::ok();
}

}  // namespace k3::trunk
