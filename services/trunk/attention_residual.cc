#include "services/trunk/attention_residual.h"

#include <cstring>
#include <string>

#include "common/base/check.h"
#include "common/kernels/parallel.h"

namespace k3::trunk {

Result<ResidualStream> ResidualStream::create(const model::ModelConfig& config, LayerRange range,
                                              std::size_t max_rows) {
    ResidualStream stream;
    stream.hidden_size_ = config.hidden_size;
    stream.max_vectors_ = config.vectors_before(range.end());
    stream.eps_ = config.rms_norm_eps;
    if (stream.max_vectors_ > kMaxVectors)
        return Error{
            ErrorCode::unsupported,
            "rows of " + config.name + " carry up to " + std::to_string(stream.max_vectors_) +
                " attention-residual vectors, this build handles " + std::to_string(kMaxVectors),
            "check attn_res_block_size in config.json"};
    ASSIGN_OR_RETURN(stream.data_,
                     Buffer<float>::create(max_rows * stream.stride(), "residual rows"));
    ASSIGN_OR_RETURN(stream.weights_,
                     Buffer<float>::create(max_rows * stream.max_vectors_, "residual weights"));
    return stream;
}

void ResidualStream::begin(std::size_t n_rows, std::size_t n_vectors) noexcept {
    n_rows_ = n_rows;
    n_snapshots_ = n_vectors - 1;
    prefix_is_empty_ = false;
}

RowsView ResidualStream::prefix_view() const noexcept {
    return {data_.data() + n_snapshots_ * hidden_size_, n_rows_, hidden_size_, stride()};
}

std::span<const float> ResidualStream::contents() const noexcept {
    K3_CHECK(n_snapshots_ + 1 == max_vectors_, std::to_string(n_snapshots_));
    return data_.span().first(n_rows_ * stride());
}

void ResidualStream::mix(const kernels::KernelTable& table, std::span<const std::uint32_t> rows,
                         std::span<const float> query, float* out) noexcept {
    const std::size_t n_sources = n_snapshots_ + 1;
    n_mixed_ = rows.size();
    kernels::parallel_for(rows.size(), 3 * n_sources * hidden_size_, [&](std::size_t i) {
        float* to = out + i * hidden_size_;
        if (n_sources == 1) {  // only before layer 0: its mix weights are dead (spec 3.4)
            std::memcpy(to, prefix(rows[i]), hidden_size_ * sizeof(float));
            return;
        }
        const float* sources[kMaxVectors];
        for (std::size_t s = 0; s < n_sources; ++s) sources[s] = vector(rows[i], s);
        table.attn_res_mix(sources, n_sources, hidden_size_, query.data(), eps_,
                           weights_.data() + i * n_sources, to);
    });
}

RowsView ResidualStream::mix_weights() const noexcept {
    return {weights_.data(), n_mixed_, n_snapshots_ + 1, n_snapshots_ + 1};
}

void ResidualStream::take_snapshot() noexcept {
    ++n_snapshots_;
    prefix_is_empty_ = true;
}

void ResidualStream::add(const kernels::KernelTable& table, const float* y) noexcept {
    kernels::parallel_for(n_rows_, hidden_size_, [&](std::size_t r) {
        const float* from = y + r * hidden_size_;
        if (prefix_is_empty_)
            std::memcpy(prefix(r), from, hidden_size_ * sizeof(float));
        else
            table.add(from, hidden_size_, prefix(r));
    });
    prefix_is_empty_ = false;
}

}  // namespace k3::trunk
