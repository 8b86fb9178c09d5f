#pragma once
// The memory of each process of a pipeline, before anything is allocated.
//
// Services size and refuse with these functions, and `k3pipe plan` and the presets add them up: so
// what is planned is what is taken. Bytes are those that a process may touch; what the kernel hands
// out lazily (a session's positions, rows of a step) is counted in full.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/model/config.h"
#include "common/model/layer_range.h"
#include "common/model/weight_plan.h"

namespace k3::model {

// --- trunk ---

/// Weights of a stage that keeps all of them: matrices as stored, vectors widened.
std::uint64_t resident_weight_bytes(const ModelConfig& config, LayerRange range);

/// Weights of a stage that was granted so many bytes for them.
struct TrunkWeightSize {
    std::uint64_t kept_bytes = 0;
    std::uint64_t ring_bytes = 0;   // 0: nothing is read again
    std::uint64_t token_bytes = 0;  // read again for every token
};
/// `budget_bytes`: 0 for all of them. Error: that of plan_weights.
Result<TrunkWeightSize> trunk_weight_size(const ModelConfig& config, LayerRange range,
                                          std::uint64_t budget_bytes, const ReadUnits& units = {});

/// The buffers of a step of up to `max_rows` rows.
std::uint64_t step_buffer_bytes(const ModelConfig& config, LayerRange range, std::uint64_t max_rows,
                                std::uint64_t n_threads);

/// State of one session in some layers, its MLA cache as config.mla.cache says. Spec section 3.5.
struct SessionSize {
    std::uint64_t fixed_bytes = 0;        // KDA: matrices and histories
    std::uint64_t latent_bytes = 0;       // MLA, per position
    std::uint64_t position_bytes = 0;     // latent_bytes and scores of every thread
    std::uint64_t kda_matrix_bytes = 0;   // of fixed_bytes
    std::uint64_t kda_history_bytes = 0;  // of fixed_bytes

    /// Saturates instead of overflowing.
    std::uint64_t bytes(std::uint64_t max_positions) const noexcept;
};
SessionSize session_size(const ModelConfig& config, LayerRange range, std::uint64_t n_threads);

// --- experts ---

/// A slot of the expert cache: the blocks that a record touches wherever it begins.
std::uint64_t expert_slot_bytes(std::uint64_t record_bytes) noexcept;

/// An expert in the disk cache: a block of header, and the record in whole blocks.
std::uint64_t disk_cache_entry_bytes(std::uint64_t record_bytes) noexcept;

/// Memory of a server with a disk cache: one entry is written while another is filled.
inline constexpr std::size_t kDiskCacheBuffers = 2;
std::uint64_t disk_cache_buffer_bytes(std::uint64_t record_bytes) noexcept;

/// Rows of a trunk step and of an expert call, unless the settings say otherwise.
inline constexpr std::uint32_t kDefaultMaxRows = 256;

/// What an expert server does with its cache_bytes.
struct ExpertMemory {
    std::uint64_t n_slots = 0;  // experts in memory, at most all that it holds
    std::uint64_t buffer_bytes = 0;
    std::uint64_t bytes = 0;  // of both
};
struct ExpertMemoryOptions {
    std::uint64_t cache_bytes = 0;   // 0: for all held experts, but at most a quarter of free_bytes
    std::uint64_t free_bytes = 0;    // of memory
    std::uint64_t slot_bytes = 0;    // of an expert
    std::uint64_t n_held = 0;        // experts
    std::uint64_t buffer_bytes = 0;  // taken off first: disk_cache_buffer_bytes() with a disk cache
};
/// The fewest slots: one expert is read while another computes.
inline constexpr std::uint64_t kFewestExpertSlots = 2;
/// Error: resource_exhausted below the fewest slots (or n_held, if that is less), naming the bytes
/// it needs.
Result<ExpertMemory> expert_memory(const ExpertMemoryOptions& options);

/// The buffers of an expert server for calls of up to `max_rows` rows.
std::uint64_t expert_buffer_bytes(const ModelConfig& config, std::uint64_t max_rows) noexcept;

// --- shared memory ---

/// An arena (docs/formats/arena.md); its memory is taken when it is made.
struct ArenaSize {
    std::uint64_t slot_bytes = 0;
    std::uint32_t n_slots = 0;
    std::uint64_t bytes() const noexcept;  // of the segment
};
/// Where a trunk stage puts logits or rows for the next stage: outputs of a few steps.
ArenaSize trunk_reply_arena(const ModelConfig& config, LayerRange range, std::uint64_t max_rows);
/// Where a trunk stage puts the rows of expert calls.
ArenaSize trunk_call_arena(std::uint64_t latent_size, std::uint64_t max_rows,
                           std::uint64_t n_servers) noexcept;
/// Where an expert server puts its sums.
ArenaSize expert_reply_arena(const ModelConfig& config, std::uint64_t max_rows) noexcept;

// --- every process ---

/// Names and places of tensors in a process that opened the checkpoint. While it is opened the text
/// of the index takes as much again, given back before anything else is taken.
std::uint64_t checkpoint_index_bytes(const ModelConfig& config) noexcept;
/// What a process takes that reads one shard's header after the other, for the fingerprint alone.
std::uint64_t shard_header_bytes(const ModelConfig& config) noexcept;

/// Program, libraries, threads and sockets of a service: 9 to 13 MB resident, measured on x86-64.
inline constexpr std::uint64_t kServiceBaseBytes = 13'000'000;
/// The launcher and its janitor together.
inline constexpr std::uint64_t kLauncherBaseBytes = 14'000'000;
/// For each entry of the vocabulary: the tokenizer's tables, and the sampler's candidates.
inline constexpr std::uint64_t kTokenizerEntryBytes = 120;
inline constexpr std::uint64_t kSamplerEntryBytes = 24;

}  // namespace k3::model
