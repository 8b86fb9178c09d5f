#include "services/trunk/streamed_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/deadline.h"

namespace k3::trunk {

namespace {

std::size_t n_streamed(const model::WeightPlan& plan) {
    return static_cast<std::size_t>(
        std::count_if(plan.pieces.begin(), plan.pieces.end(),
                      [](const model::WeightPiece& piece) { return !piece.is_kept; }));
}

/// Gives matrices the numbers of the plan and reads vectors.
class StreamBinder final : public TensorFinder {
  public:
    StreamBinder(WeightFiles& files, const model::WeightPlan& plan) : files_(files), plan_(plan) {}

    /// They are bound layer by layer: the search goes on where it found the last one.
    Result<Matrix> matrix(const storage::TensorSpec& spec) override {
        const std::size_t n = plan_.matrices.size();
        for (std::size_t i = 0; i < n; ++i) {
            const std::size_t at = (near_ + i) % n;
            if (plan_.matrices[at].spec.name != spec.name) continue;
            near_ = at > kMostOfLayer ? at - kMostOfLayer : 0;
            return Matrix{
                {kernels::WeightType::bf16, nullptr, nullptr, spec.shape[0], spec.shape[1]},
                static_cast<std::uint32_t>(at)};
        }
        return Error{ErrorCode::internal, "the plan has no matrix " + spec.name, ""};
    }

    Result<std::span<const std::byte>> vector(const storage::TensorSpec& spec) override {
        ASSIGN_OR_RETURN(const storage::ReadRange range, files_.find(spec));
        if (units_.span().size() < range.units_bytes()) {
            ASSIGN_OR_RETURN(units_, MemoryBlock::create(range.units_bytes(), spec.name.c_str()));
        }
        const std::span<std::byte> units = units_.span().first(range.units_bytes());
        Status read = range.source->read(range.first_unit(), units);
        if (!read.has_value()) return std::move(read).error().with_context(spec.name);
        return std::span<const std::byte>(units.subspan(range.skipped(), range.bytes));
    }

  private:
    static constexpr std::size_t kMostOfLayer = 32;  // matrices

    WeightFiles& files_;
    const model::WeightPlan& plan_;
    std::size_t near_ = 0;
    MemoryBlock units_;  // around the last vector
};

}  // namespace

StreamedWeights::StreamedWeights(std::unique_ptr<WeightFiles> files,
                                 const model::ModelConfig& config, LayerRange range,
                                 Options options, telemetry::Counters& counters)
    : config_(config),
      range_(range),
      options_(std::move(options)),
      files_(std::move(files)),
      read_bytes_(counters.add("trunk_read_bytes")),
      wait_ns_(counters.add("trunk_read_wait_ns")),
      device_bytes_(counters.add("trunk_read_device_bytes")),
      busy_ns_(counters.add("trunk_read_busy_ns")),
      cpu_ns_(counters.add("trunk_read_cpu_ns")),
      request_bytes_(counters.add("trunk_read_request_bytes")),
      n_threads_(counters.add("trunk_read_threads")),
      token_bytes_(counters.add("trunk_streamed_token_bytes")) {}

Result<std::unique_ptr<StreamedWeights>> StreamedWeights::load(std::unique_ptr<WeightFiles> files,
                                                               const model::ModelConfig& config,
                                                               LayerRange range, Options options,
                                                               telemetry::Counters& counters,
                                                               const LoadProgress& progress) {
    std::unique_ptr<StreamedWeights> weights(
        new StreamedWeights(std::move(files), config, range, std::move(options), counters));
    StreamedWeights& self = *weights;
    LoadReport report(progress, self.plan().memory_bytes());
    RETURN_IF_ERROR(report.begin("probing the disk"));
    RETURN_IF_ERROR(self.find_matrices());
    storage::ReadShape shape = self.options_.shape.value_or(storage::ReadShape{});
    if (!self.options_.shape.has_value()) {
        ASSIGN_OR_RETURN(const storage::ReadProbe probe, self.files_->probe());
        shape = probe.shape;
    }
    RETURN_IF_ERROR(self.take_memory());
    self.pool_ = std::make_unique<storage::ReadPool>(
        storage::ReadPool::Options{shape, self.options_.before_request, self.files_->n_lanes()});
    self.request_bytes_ = shape.request_bytes;
    self.n_threads_ = std::uint64_t{shape.n_threads} * self.files_->n_lanes();
    self.token_bytes_ = self.plan().token_bytes(config);

    StreamBinder binder(*self.files_, self.plan());
    RETURN_IF_ERROR(report.begin("vectors"));
    self.layers_.reserve(range.count);
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer) {
        ASSIGN_OR_RETURN(LayerWeights bound, bind_layer(config, layer, binder, self.vectors_));
        self.layers_.push_back(bound);
    }
    if (range.is_last(config)) {
        ASSIGN_OR_RETURN(self.head_, bind_head(config, binder, self.vectors_));
    }
    report.add(self.plan().vector_bytes);
    RETURN_IF_ERROR(self.read_kept(report));
    self.ring_ = std::make_unique<WeightRing>(*self.pool_, self.ring_memory_.span(),
                                              n_streamed(self.plan()));
    self.fill();
    return weights;
}

Status StreamedWeights::find_matrices() {
    for (const model::PlannedMatrix& matrix : plan().matrices) {
        ASSIGN_OR_RETURN(const storage::ReadRange range, files_->find(matrix.spec));
        matrices_.push_back(range);
    }
    if (range_.is_first()) {
        ASSIGN_OR_RETURN(embedding_, files_->find(embedding_spec(config_)));
    }
    return Status::ok();
}

Status StreamedWeights::take_memory() {
    ASSIGN_OR_RETURN(kept_memory_, MemoryBlock::create(plan().kept_bytes, "kept weights"));
    ASSIGN_OR_RETURN(ring_memory_, MemoryBlock::create(plan().ring_bytes, "streamed weights"));
    ASSIGN_OR_RETURN(embedding_memory_,
                     MemoryBlock::create(plan().embedding_bytes, "the embedding"));
    row_reads_ = std::make_unique<storage::PoolRead[]>(model::kEmbeddingRows);
    return Status::ok();
}

storage::ReadRange StreamedWeights::range_of(const model::WeightPiece& piece) const noexcept {
    const storage::ReadRange& matrix = matrices_[piece.matrix];
    const std::uint64_t row_bytes = plan().matrices[piece.matrix].row_bytes();
    return {matrix.source, matrix.offset + piece.first_row * row_bytes, piece.bytes};
}

/// All reads are queued at once; the pool begins them in this order.
Status StreamedWeights::read_kept(LoadReport& report) {
    struct Kept {
        std::string what;
        storage::ReadRange range;
        std::span<std::byte> units;
    };
    std::vector<Kept> kept;
    std::span<std::byte> left = kept_memory_.span();
    kept_.assign(plan().pieces.size(), nullptr);
    for (std::size_t i = 0; i < plan().pieces.size(); ++i) {
        const model::WeightPiece& piece = plan().pieces[i];
        if (!piece.is_kept) continue;
        const storage::ReadRange range = range_of(piece);
        const model::PlannedMatrix& matrix = plan().matrices[piece.matrix];
        kept.push_back({matrix.is_head ? "output head" : fmt::format("layer {}", matrix.layer),
                        range, left.first(range.units_bytes())});
        kept_[i] = left.data() + range.skipped();
        left = left.subspan(model::read_memory_bytes(piece.bytes, plan().units.matrices));
    }
    if (plan().keeps_embedding)
        kept.push_back(
            {"embedding", embedding_, embedding_memory_.span().first(embedding_.units_bytes())});

    const auto reads = std::make_unique<storage::PoolRead[]>(kept.size());
    for (std::size_t i = 0; i < kept.size(); ++i)
        pool_->start(reads[i], *kept[i].range.source, kept[i].range.first_unit(), kept[i].units);
    Status status;
    for (std::size_t i = 0; i < kept.size() && status.has_value(); ++i) {
        status = report.begin(kept[i].what);
        if (status.has_value()) status = pool_->wait(reads[i], options_.stopping);
        report.add(kept[i].units.size());
    }
    // After an error: the newest first, so that the threads begin nothing more.
    for (std::size_t i = kept.size(); i-- > 0;) pool_->cancel(reads[i]);
    return status;
}

void StreamedWeights::begin_step(bool wants_head) {
    K3_CHECK(!is_lent_, "a step gives back what it was lent, however it ends");
    if (is_in_step_) {  // the one before did not come to its end
        ring_->clear();
        used_ = 0;
        started_ = 0;
    }
    is_in_step_ = true;
    is_step_ahead_ = false;
    wants_head_ = wants_head;
    fill();
}

const LayerWeights& StreamedWeights::layer(std::uint32_t layer) const {
    K3_CHECK(layer >= range_.first && layer - range_.first < layers_.size(), std::to_string(layer));
    return layers_[layer - range_.first];
}

Result<MatrixRows> StreamedWeights::next_rows(const Matrix& matrix) {
    const model::WeightPiece& piece = plan().pieces[used_];
    K3_CHECK(!is_lent_ && piece.matrix == matrix.number,
             fmt::format("asked for matrix {}, next is {}", matrix.number, piece.matrix));
    const std::byte* data = kept_[used_];
    if (data == nullptr) {
        K3_CHECK(!ring_->is_empty() && ring_->front() == used_,
                 fmt::format("piece {} is not in the ring", used_));
        const Clock::time_point begin = Clock::now();
        Result<std::span<const std::byte>> bytes = ring_->wait_front(options_.stopping);
        wait_ns_ += static_cast<std::uint64_t>(
            std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
        if (!bytes.has_value())
            return std::move(bytes).error().with_context(
                fmt::format("{}, rows {}-{}", plan().matrices[piece.matrix].spec.name,
                            piece.first_row, piece.first_row + piece.n_rows - 1));
        data = bytes->data();
        read_bytes_ += piece.bytes;
    }
    is_lent_ = true;
    return MatrixRows({kernels::WeightType::bf16, data, nullptr, piece.n_rows, matrix.stored.n_in},
                      piece.first_row, this);
}

void StreamedWeights::give_back() noexcept {
    is_lent_ = false;
    if (kept_[used_] == nullptr) ring_->pop_front();
    ++used_;
    if (used_ == (wants_head_ ? plan().pieces.size() : plan().n_layer_pieces)) {
        used_ = 0;
        is_in_step_ = false;
    }
    fill();
}

void StreamedWeights::fill() {
    while (true) {
        const bool reads_head = wants_head_ && !is_step_ahead_;
        if (started_ == (reads_head ? plan().pieces.size() : plan().n_layer_pieces)) {
            if (is_step_ahead_) return;
            is_step_ahead_ = true;
            started_ = 0;
            continue;
        }
        const model::WeightPiece& piece = plan().pieces[started_];
        if (!piece.is_kept &&
            !ring_->try_push(static_cast<std::uint32_t>(started_), range_of(piece)))
            return;
        ++started_;
    }
}

Status StreamedWeights::embed(std::span<const std::uint32_t> tokens, float* out,
                              std::size_t stride) {
    if (plan().keeps_embedding) {
        const std::size_t row_bytes = std::size_t{config_.hidden_size} * sizeof(std::uint16_t);
        const std::byte* rows = embedding_memory_.span().data() + embedding_.skipped();
        for (std::size_t i = 0; i < tokens.size(); ++i)
            widen_bf16({rows + tokens[i] * row_bytes, row_bytes},
                       {out + i * stride, config_.hidden_size});
        return Status::ok();
    }
    for (std::size_t first = 0; first < tokens.size(); first += model::kEmbeddingRows) {
        const std::size_t n = std::min<std::size_t>(tokens.size() - first, model::kEmbeddingRows);
        RETURN_IF_ERROR(embed_some(tokens.subspan(first, n), out + first * stride, stride));
    }
    return Status::ok();
}

/// They go before what the ring has asked for: the step cannot begin without them.
Status StreamedWeights::embed_some(std::span<const std::uint32_t> tokens, float* out,
                                   std::size_t stride) {
    const std::size_t row_bytes = std::size_t{config_.hidden_size} * sizeof(std::uint16_t);
    const std::size_t slot_bytes = model::read_memory_bytes(row_bytes, plan().units.embedding);
    const auto range = [&](std::size_t i) {
        return storage::ReadRange{embedding_.source, embedding_.offset + tokens[i] * row_bytes,
                                  row_bytes};
    };
    const auto slot = [&](std::size_t i) {
        return embedding_memory_.span().subspan(i * slot_bytes, slot_bytes);
    };
    const Clock::time_point begin = Clock::now();
    for (std::size_t i = tokens.size(); i-- > 0;)
        pool_->start(row_reads_[i], *embedding_.source, range(i).first_unit(),
                     slot(i).first(range(i).units_bytes()), storage::ReadPool::Place::first);
    Status status;
    for (std::size_t i = 0; i < tokens.size() && status.has_value(); ++i) {
        status = pool_->wait(row_reads_[i], options_.stopping);
        if (!status.has_value())
            status = std::move(status).error().with_context(
                fmt::format("embedding of token {}", tokens[i]));
        else
            widen_bf16(slot(i).subspan(range(i).skipped(), row_bytes),
                       {out + i * stride, config_.hidden_size});
    }
    for (std::size_t i = 0; i < tokens.size(); ++i) pool_->cancel(row_reads_[i]);
    wait_ns_ += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
    if (status.has_value()) read_bytes_ += tokens.size() * row_bytes;
    return status;
}

void StreamedWeights::publish_counters() noexcept {
    const storage::ReadPool::Totals totals = pool_->totals();
    device_bytes_ = totals.bytes;
    busy_ns_ = totals.busy_ns;
    cpu_ns_ = totals.cpu_ns;
}

}  // namespace k3::trunk
