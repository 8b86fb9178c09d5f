#include "common/model/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "common/model/tensor_names.h"
#include "common/storage/direct_file.h"
#include "common/transport/arena_layout.h"

namespace k3::model {

namespace {

constexpr std::uint64_t kFloat = sizeof(float);

/// Most names have 77 bytes; a record has 72, and the table of names up to 32. An entry of a header
/// is a name, type, shape and places, and again as much for the parser.
constexpr std::uint64_t kTensorEntryBytes = 72 + 77 + 32;
constexpr std::uint64_t kHeaderEntryBytes = std::uint64_t{2} * 180;
constexpr std::uint64_t kTrunkTensorsOfLayer = 28;  // 22 to 28
constexpr std::uint64_t kPartsOfExpert = 6;

/// Matrices as stored; everything else is widened when it is loaded.
std::uint64_t loaded_bytes(const TensorSpec& tensor) {
    const bool is_matrix = tensor.shape.size() == 2 && tensor.shape[0] > 1;
    return is_matrix ? tensor.bytes() : tensor.bytes() / storage::size_of(tensor.dtype) * kFloat;
}

std::uint64_t page_ceiling(std::uint64_t bytes) noexcept { return storage::block_ceiling(bytes); }

}  // namespace

std::uint64_t resident_weight_bytes(const ModelConfig& config, LayerRange range) {
    std::uint64_t bytes = 0;
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer)
        for (const TensorSpec& tensor : trunk_layer_tensors(config, layer))
            bytes += loaded_bytes(tensor);
    for (const TensorSpec& tensor : model_level_tensors(config))
        if (tensor.name == kEmbeddingTensor ? range.is_first() : range.is_last(config))
            bytes += loaded_bytes(tensor);
    return bytes;
}

Result<TrunkWeightSize> trunk_weight_size(const ModelConfig& config, LayerRange range,
                                          std::uint64_t budget_bytes, const ReadUnits& units) {
    const TrunkWeightSize all{resident_weight_bytes(config, range), 0, 0};
    if (budget_bytes == 0) return all;
    WeightPlanOptions options;
    options.first_layer = range.first;
    options.n_layers = range.count;
    options.budget_bytes = budget_bytes;
    options.units = units;
    ASSIGN_OR_RETURN(const WeightPlan plan, plan_weights(config, options));
    if (plan.keeps_all()) return all;
    return TrunkWeightSize{plan.memory_bytes() - plan.ring_bytes, plan.ring_bytes,
                           plan.token_bytes(config)};
}

std::uint64_t step_buffer_bytes(const ModelConfig& config, LayerRange range, std::uint64_t max_rows,
                                std::uint64_t n_threads) {
    bool has_kda = false;
    bool has_mla = false;
    std::uint64_t ffn_width = 0;
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer) {
        (config.layer_kinds[layer] == LayerKind::kda ? has_kda : has_mla) = true;
        ffn_width = std::max<std::uint64_t>(
            ffn_width, config.is_moe(layer) ? config.moe.shared_width() : config.intermediate_size);
    }
    const std::uint64_t hidden = config.hidden_size;
    const std::uint64_t n_vectors = config.vectors_before(range.end());
    std::uint64_t floats = n_vectors * (hidden + 1) + 2 * hidden;  // residual stream, in and out
    if (has_kda)
        floats += std::uint64_t{7} * config.kda.width() + config.kda.head_dim + config.kda.n_heads;
    if (has_mla) {
        const MlaConfig& mla = config.mla;
        floats += mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim +
                  std::uint64_t{mla.n_heads} * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) +
                  std::uint64_t{2} * mla.width();
    }
    const MoeConfig& moe = config.moe;
    // Gate and up; scores twice; weights and ids of picks; latents, sums of 64 bits, their floats.
    floats += 2 * ffn_width + std::uint64_t{2} * moe.n_experts + std::uint64_t{2} * moe.top_k +
              std::uint64_t{4} * moe.latent_size + hidden;
    if (range.is_last(config)) floats += config.vocab_size;
    std::uint64_t bytes = max_rows * floats * kFloat;
    if (has_mla) bytes += n_threads * 2 * config.mla.kv_lora_rank * kFloat;
    return bytes;
}

std::uint64_t SessionSize::bytes(std::uint64_t max_positions) const noexcept {
    constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
    if (position_bytes == 0) return fixed_bytes;
    if (max_positions > (kMost - fixed_bytes) / position_bytes) return kMost;
    return fixed_bytes + max_positions * position_bytes;
}

SessionSize session_size(const ModelConfig& config, LayerRange range, std::uint64_t n_threads) {
    const std::uint64_t width = config.kda.width();
    SessionSize size;
    for (std::uint32_t layer = range.first; layer < range.end(); ++layer) {
        if (config.layer_kinds[layer] == LayerKind::kda) {
            size.kda_matrix_bytes += width * config.kda.head_dim * kFloat;
            size.kda_history_bytes += 3 * width * (config.kda.conv_kernel - 1) * kFloat;
        } else {
            size.latent_bytes += config.mla.cache_bytes();
        }
    }
    size.fixed_bytes = size.kda_matrix_bytes + size.kda_history_bytes;
    size.position_bytes = size.latent_bytes;
    if (size.latent_bytes > 0) size.position_bytes += n_threads * kFloat;
    return size;
}

std::uint64_t disk_cache_entry_bytes(std::uint64_t record_bytes) noexcept {
    return storage::kBlockBytes + storage::block_ceiling(record_bytes);
}

std::uint64_t disk_cache_buffer_bytes(std::uint64_t record_bytes) noexcept {
    return kDiskCacheBuffers * disk_cache_entry_bytes(record_bytes);
}

std::uint64_t expert_slot_bytes(std::uint64_t record_bytes) noexcept {
    return storage::block_ceiling(record_bytes + storage::kBlockBytes - 1);
}

Result<ExpertMemory> expert_memory(const ExpertMemoryOptions& options) {
    const std::uint64_t slot = options.slot_bytes;
    const std::uint64_t set_aside = options.buffer_bytes;
    const std::uint64_t all = options.n_held * slot + set_aside;
    const std::uint64_t budget =
        options.cache_bytes > 0 ? options.cache_bytes : std::min(all, options.free_bytes / 4);
    const std::uint64_t fit = (budget - std::min(budget, set_aside)) / slot;
    const std::uint64_t n_slots = std::min(fit, options.n_held);
    const std::uint64_t fewest = std::min(kFewestExpertSlots, options.n_held);
    if (n_slots >= fewest) return ExpertMemory{n_slots, set_aside, n_slots * slot + set_aside};
    const std::uint64_t needed = fewest * slot + set_aside;
    return Error{
        ErrorCode::resource_exhausted,
        fmt::format("a cache of {} bytes{} holds {} experts of {} bytes, and needs room for {} "
                    "({} bytes)",
                    budget,
                    set_aside > 0 ? fmt::format(", {} of them for what is written to the disk "
                                                "cache,",
                                                set_aside)
                                  : "",
                    fit, slot, fewest, needed),
        fmt::format("give a cache_bytes of {} or more", needed)};
}

std::uint64_t expert_buffer_bytes(const ModelConfig& config, std::uint64_t max_rows) noexcept {
    constexpr std::uint64_t kBlockRows = 64;  // that the executor takes together
    const MoeConfig& moe = config.moe;
    return max_rows * moe.latent_size * sizeof(std::int64_t) +
           kBlockRows * 2 * (std::uint64_t{moe.latent_size} + moe.moe_intermediate_size) * kFloat;
}

std::uint64_t ArenaSize::bytes() const noexcept {
    return transport::kArenaPage + page_ceiling(n_slots * sizeof(transport::SlotEntry)) +
           n_slots * page_ceiling(slot_bytes);
}

ArenaSize trunk_reply_arena(const ModelConfig& config, LayerRange range, std::uint64_t max_rows) {
    constexpr std::uint64_t kLogitRows = 16;  // of one step; more go inline
    constexpr std::uint32_t kSlots = 4;
    if (range.is_last(config))
        return {std::min(max_rows, kLogitRows) * config.vocab_size * kFloat, kSlots};
    const std::uint64_t vectors = config.vectors_before(range.end());
    return {max_rows * vectors * config.hidden_size * kFloat, kSlots};
}

ArenaSize trunk_call_arena(std::uint64_t latent_size, std::uint64_t max_rows,
                           std::uint64_t n_servers) noexcept {
    // A slot is read before its server replies, so twice the calls of a layer is ample; a server
    // that takes few rows at a time may still find one overwritten, and is asked again.
    constexpr std::uint64_t kFewest = 4;
    return {max_rows * latent_size * kFloat,
            static_cast<std::uint32_t>(std::max(kFewest, 2 * n_servers))};
}

ArenaSize expert_reply_arena(const ModelConfig& config, std::uint64_t max_rows) noexcept {
    // Larger replies go inline; /dev/shm may be as small as 64 MB for all services.
    constexpr std::uint64_t kMostBytes = std::uint64_t{2} << 20U;
    constexpr std::uint32_t kSlots = 8;
    return {std::min(max_rows * config.moe.latent_size * sizeof(std::int64_t), kMostBytes), kSlots};
}

std::uint64_t checkpoint_index_bytes(const ModelConfig& config) noexcept {
    std::uint64_t n = config.n_layers * kTrunkTensorsOfLayer;
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer)
        if (config.is_moe(layer)) n += config.moe.n_experts * kPartsOfExpert;
    return n * kTensorEntryBytes;
}

std::uint64_t shard_header_bytes(const ModelConfig& config) noexcept {
    // A shard of the release holds a layer. Beside records and names: the text, and its parser's.
    return (config.moe.n_experts * kPartsOfExpert + kTrunkTensorsOfLayer) *
           (kTensorEntryBytes + kHeaderEntryBytes);
}

}  // namespace k3::model
