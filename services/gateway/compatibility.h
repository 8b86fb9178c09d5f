#pragma once
// Do these stages make one pipeline? Judged from their announcements alone, before any of them is
// used: a pipeline put together from parts that do not belong together prints fluent nonsense.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/transport/messages/control.h"

namespace k3::gateway {

/// What the stages agree on.
struct PipelineFacts {
    std::string fingerprint;  // of the checkpoint; may be empty
    std::uint32_t vocab_size = 0;
    std::uint32_t hidden_size = 0;
    bool mla_bf16 = false;            // MLA latents are kept in bf16, not fp32
    std::uint64_t max_positions = 0;  // the context: the smallest of the trunk stages'
    std::uint32_t max_step_rows = 0;  // the smallest of the trunk stages'
    std::uint32_t max_sessions = 0;   // the smallest of the trunk stages'
    std::uint32_t max_sample_rows = 0;
    std::vector<std::uint32_t> stop_ids;  // the model's own
};

/// `trunk` in the order in which rows pass through.
/// Error: incompatible, naming both stages and what each says, if a stage is of another kind than
/// its place asks for, layers are missing, twice or out of order, or fingerprints, vocabulary
/// sizes, row widths or layer totals differ. A tokenizer without a fingerprint is believed.
Result<PipelineFacts> check_stages(const msg::Announcement& tokenizer,
                                   std::span<const msg::Announcement> trunk,
                                   const msg::Announcement& sampler);

}  // namespace k3::gateway
