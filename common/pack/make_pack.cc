#include "common/pack/make_pack.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/pack/expert_record.h"
#include "common/pack/trunk_run.h"

namespace k3::pack {

namespace {

/// Reads any part of a run, tensor by tensor; between tensors there are zeros.
Status read_run(const storage::Checkpoint& checkpoint, const TrunkRun& run, std::uint64_t offset,
                std::span<std::byte> dst) {
    std::ranges::fill(dst, std::byte{0});
    const std::uint64_t end = offset + dst.size();
    for (const PlacedTensor& placed : run.tensors()) {
        const std::uint64_t from = std::max(offset, placed.offset);
        const std::uint64_t to = std::min(end, placed.offset + placed.spec.bytes());
        if (from >= to) continue;
        ASSIGN_OR_RETURN(
            const storage::TensorInfo* tensor,
            checkpoint.require(placed.spec.name, placed.spec.dtype, placed.spec.shape));
        Status read = checkpoint.read_range(tensor->shard, tensor->offset + (from - placed.offset),
                                            dst.subspan(from - offset, to - from));
        if (!read) return std::move(read).error().with_context("tensor " + placed.spec.name);
    }
    return Status::ok();
}

/// The same of one part: `offset` counts the bytes of its stripes only.
Status read_stripes(const storage::Checkpoint& checkpoint, const TrunkRun& run, Part part,
                    std::uint64_t offset, std::span<std::byte> dst) {
    const std::uint64_t stripe = stripe_bytes(run);
    while (!dst.empty()) {
        const std::uint64_t inside = offset % stripe;
        const std::uint64_t bytes = std::min<std::uint64_t>(stripe - inside, dst.size());
        const std::uint64_t number = offset / stripe * part.count + part.index;
        RETURN_IF_ERROR(read_run(checkpoint, run, number * stripe + inside, dst.first(bytes)));
        offset += bytes;
        dst = dst.subspan(bytes);
    }
    return Status::ok();
}

/// Finds the tensors of every expert in `held`: what is absent must not be found after hours.
Status check_experts(const model::Model& model, const model::Placement& held) {
    for (std::uint32_t layer = 0; layer < held.n_layers(); ++layer)
        for (std::uint32_t expert = 0; expert < held.n_experts(); ++expert) {
            if (!held.holds(layer, expert)) continue;
            for (const auto& spec : model::expert_tensors(model.config, layer, expert))
                RETURN_IF_ERROR(model.checkpoint->require(spec.name, spec.dtype, spec.shape));
        }
    return Status::ok();
}

/// Reads one expert, and makes sure that fp32 can hold each of its weights.
Status read_record(const model::Model& model, const ExpertRecord& layout, ExpertId id,
                   std::span<std::byte> record) {
    const storage::Checkpoint& checkpoint = *model.checkpoint;
    const auto specs = model::expert_tensors(model.config, id.layer, id.expert);
    std::array<const storage::TensorInfo*, ExpertRecord::kParts> tensors{};
    for (std::size_t part = 0; part < specs.size(); ++part) {
        ASSIGN_OR_RETURN(tensors[part], checkpoint.require(specs[part].name, specs[part].dtype,
                                                           specs[part].shape));
        RETURN_IF_ERROR(checkpoint.read(
            *tensors[part], record.subspan(layout.offset(part), layout.part_bytes(part))));
    }
    ExpertRecord::BadGroup bad;
    if (!layout.find_bad_group(record, bad)) return Status::ok();
    const storage::TensorInfo& scale = *tensors[bad.packed_part + 1];
    return unusable_weights(model.config, id, bad,
                            {checkpoint.shard_path(scale.shard), scale.offset + bad.scale_offset});
}

}  // namespace

Origin origin_of(const model::Model& model) {
    return {model.fingerprint, model::config_digest(model.config)};
}

PackPlan plan_trunk_pack(const model::Model& model, std::uint32_t first, std::uint32_t count,
                         Part part) {
    PackPlan plan{Kind::trunk, origin_of(model), part, {}};
    for (const TrunkRun& run : trunk_runs(model.config, first, count))
        if (const Entry entry = entry_of(run, part); entry.bytes > 0) plan.entries.push_back(entry);
    return plan;
}

Result<PackSummary> make_trunk_pack(const model::Model& model, std::uint32_t first,
                                    std::uint32_t count, const std::filesystem::path& path,
                                    const PackProgress& progress, Part part) {
    RETURN_IF_ERROR(model::check_trunk_tensors(*model.checkpoint, model.config, first, count));
    std::map<EntryKey, TrunkRun> runs;
    for (TrunkRun& run : trunk_runs(model.config, first, count)) {
        const EntryKey key = run.key();
        runs.emplace(key, std::move(run));
    }
    auto source = [&](const Entry& entry, std::uint64_t offset, std::span<std::byte> dst) {
        const TrunkRun& run = runs.at(entry.key);
        if (part.count == 1) return read_run(*model.checkpoint, run, offset, dst);
        return read_stripes(*model.checkpoint, run, part, offset, dst);
    };
    PackPlan plan = plan_trunk_pack(model, first, count, part);
    if (plan.entries.empty())
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("part {}/{} of these layers would hold nothing", part.index, part.count),
            "make fewer parts"};
    return write_pack(plan, path, source, progress);
}

PackPlan plan_expert_pack(const model::Model& model, const model::Placement& held) {
    PackPlan plan{Kind::experts, origin_of(model), {}, {}};
    Entry entry;
    entry.bytes = model::expert_bytes(model.config);
    entry.piece_bytes = entry.stored_bytes();  // an expert is read whole
    for (std::uint32_t layer = 0; layer < held.n_layers(); ++layer)
        for (std::uint32_t expert = 0; expert < held.n_experts(); ++expert) {
            entry.key = {layer, expert};
            if (held.holds(layer, expert)) plan.entries.push_back(entry);
        }
    return plan;
}

Result<PackSummary> make_expert_pack(const model::Model& model, const model::Placement& held,
                                     const std::filesystem::path& path,
                                     const PackProgress& progress) {
    RETURN_IF_ERROR(check_experts(model, held));
    const ExpertRecord layout(model.config);
    auto source = [&](const Entry& entry, std::uint64_t offset, std::span<std::byte> dst) {
        K3_CHECK(offset == 0 && dst.size() == entry.bytes, "an expert is one piece");
        return read_record(model, layout, {entry.key.layer, entry.key.part}, dst);
    };
    return write_pack(plan_expert_pack(model, held), path, source, progress);
}

}  // namespace k3::pack
