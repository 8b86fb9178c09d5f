#include "services/trunk/mla.h"

#include <omp.h>

#include <cmath>
#include <cstring>

#include "common/base/check.h"
#include "common/kernels/parallel.h"

namespace k3::trunk {

Result<Mla> Mla::create(const model::ModelConfig& config, std::size_t max_rows, int n_threads) {
    Mla mla;
    const model::MlaConfig& c = config.mla;
    mla.config_ = c;
    mla.hidden_size_ = config.hidden_size;
    mla.scale_ = 1.0F / std::sqrt(static_cast<float>(c.qk_nope_head_dim + c.qk_rope_head_dim));
    mla.n_threads_ = n_threads;
    auto rows = [&](std::size_t width) {
        return Buffer<float>::create(max_rows * width, "MLA rows");
    };
    ASSIGN_OR_RETURN(mla.q_low_, rows(c.q_lora_rank));
    ASSIGN_OR_RETURN(mla.q_,
                     rows(std::size_t{c.n_heads} * (c.qk_nope_head_dim + c.qk_rope_head_dim)));
    ASSIGN_OR_RETURN(mla.kv_, rows(c.kv_lora_rank + c.qk_rope_head_dim));
    ASSIGN_OR_RETURN(mla.gate_, rows(c.width()));
    ASSIGN_OR_RETURN(mla.out_, rows(c.width()));
    ASSIGN_OR_RETURN(mla.in_latent_,
                     Buffer<float>::create(static_cast<std::size_t>(n_threads) * 2 * c.kv_lora_rank,
                                           "MLA heads"));
    return mla;
}

Status Mla::run(const Products& products, std::uint32_t layer, const MlaWeights& weights,
                const Batch& batch, const float* x, float* y) {
    const kernels::KernelTable& table = products.table();
    const std::size_t n = batch.n_rows();
    const std::size_t low = config_.q_lora_rank;
    const std::size_t heads = config_.n_heads;
    RETURN_IF_ERROR(products.matmul(weights.q_a, x, hidden_size_, n, q_low_.data(), low));
    kernels::parallel_for(n, 2 * low, [&](std::size_t r) {
        float* row = q_low_.data() + r * low;
        table.rms_norm(row, weights.q_a_norm.data(), low, config_.lora_norm_eps, row);
    });
    RETURN_IF_ERROR(
        products.matmul(weights.q_b, q_low_.data(), low, n, q_.data(), weights.q_b.n_out()));
    const std::size_t kv_width = weights.kv_a.n_out();
    RETURN_IF_ERROR(products.matmul(weights.kv_a, x, hidden_size_, n, kv_.data(), kv_width));
    RETURN_IF_ERROR(
        products.matmul(weights.g, x, hidden_size_, n, gate_.data(), weights.g.n_out()));

    kernels::parallel_for(n, 3 * kv_width, [&](std::size_t r) {
        append(table, layer, weights, batch.rows[r], kv_.data() + r * kv_width);
    });
    // A head goes through its rows of kv_b once and through the cache twice.
    const std::size_t work =
        2 * kv_width * (batch.rows.back().position + 1 + config_.qk_nope_head_dim);
    {
        ASSIGN_OR_RETURN(const MatrixRows kv_b, products.whole(weights.kv_b));
        kernels::parallel_for(n * heads, work, [&](std::size_t i) {
            attend(table, layer, kv_b.rows(), batch.rows[i / heads], i / heads, i % heads);
        });
    }
    return products.matmul(weights.o, out_.data(), config_.width(), n, y, hidden_size_);
}

/// The cache holds the latent after its norm and the shared key as projected: never normalised,
/// never rotated. `projected` holds both parts, and the normalised latent afterwards.
void Mla::append(const kernels::KernelTable& table, std::uint32_t layer, const MlaWeights& weights,
                 const StepRow& row, float* projected) const noexcept {
    const std::size_t latent = config_.kv_lora_rank;
    const std::size_t rope = config_.qk_rope_head_dim;
    table.rms_norm(projected, weights.kv_norm.data(), latent, config_.lora_norm_eps, projected);
    const MlaState cache = row.session->mla(layer);
    const auto put = [&](const float* values, std::size_t n, std::byte* rows) {
        std::byte* to = rows + row.position * n * model::value_bytes(config_.cache);
        if (config_.cache == model::MlaCache::bf16)
            table.round_to_bf16(values, n, reinterpret_cast<std::uint16_t*>(to));
        else
            std::memcpy(to, values, n * sizeof(float));
    };
    put(projected, latent, cache.latent);
    put(projected + latent, rope, cache.rope);
}

/// Absorbed form for one head of one row: the query goes into latent space, attention runs there,
/// the result comes out through the head's value rows. A plain gate follows, no norm (unlike KDA).
void Mla::attend(const kernels::KernelTable& table, std::uint32_t layer,
                 const kernels::Matrix& kv_b, const StepRow& row, std::size_t row_index,
                 std::size_t head) noexcept {
    const std::size_t nope = config_.qk_nope_head_dim;
    const std::size_t rope = config_.qk_rope_head_dim;
    const std::size_t latent = config_.kv_lora_rank;
    const std::size_t v_dim = config_.v_head_dim;
    const int thread = omp_get_thread_num();
    K3_DCHECK(thread < n_threads_, "more threads than at start");
    float* q_latent = in_latent_.data() + static_cast<std::size_t>(thread) * 2 * latent;
    float* mixed = q_latent + latent;

    const std::size_t kv_first = head * (nope + v_dim);
    const float* q = q_.data() + (row_index * config_.n_heads + head) * (nope + rope);
    table.matvec_transposed(kv_b.rows(kv_first, nope), q, q_latent);
    const MlaState cache = row.session->mla(layer);
    const auto attend_to = [&](auto kernel, const auto* latents, const auto* keys) {
        kernel(q_latent, q + nope, latents, latent, keys, rope, row.position + 1, latent, rope,
               scale_, row.session->scores(thread), mixed);
    };
    if (config_.cache == model::MlaCache::bf16)
        attend_to(table.mla_attend_bf16, reinterpret_cast<const std::uint16_t*>(cache.latent),
                  reinterpret_cast<const std::uint16_t*>(cache.rope));
    else
        attend_to(table.mla_attend, reinterpret_cast<const float*>(cache.latent),
                  reinterpret_cast<const float*>(cache.rope));

    const std::size_t at = row_index * config_.width() + head * v_dim;
    float* out = out_.data() + at;
    table.matmul(kv_b.rows(kv_first + nope, v_dim), mixed, latent, 1, out, v_dim);
    table.sigmoid_gate(out, gate_.data() + at, v_dim, out);
}

}  // namespace k3::trunk
