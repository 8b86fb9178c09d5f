#include "common/pack/expert_record.h"

#include <fmt/format.h>

#include "common/base/check.h"

namespace k3::pack {

namespace {

constexpr std::size_t kGroup = 32;  // weights that share a scale

const std::uint8_t* bytes_at(std::span<const std::byte> record, std::uint64_t offset) noexcept {
    return reinterpret_cast<const std::uint8_t*>(record.data() + offset);
}

}  // namespace

ExpertRecord::ExpertRecord(const model::ModelConfig& config)
    : latent_size_(config.moe.latent_size), inner_size_(config.moe.moe_intermediate_size) {
    const std::uint64_t weights = std::uint64_t{latent_size_} * inner_size_;  // of each matrix
    for (std::size_t part = 0; part < kParts; ++part)
        offsets_[part + 1] = offsets_[part] + (part % 2 == 0 ? weights / 2 : weights / kGroup);
    K3_CHECK(bytes() == model::expert_bytes(config),
             fmt::format("{} against {}", bytes(), model::expert_bytes(config)));
}

kernels::Matrix ExpertRecord::matrix(std::span<const std::byte> record, model::ExpertPart packed,
                                     std::size_t n_out, std::size_t n_in) const noexcept {
    const auto part = static_cast<std::size_t>(packed);
    return {kernels::WeightType::mxfp4, bytes_at(record, offsets_[part]),
            bytes_at(record, offsets_[part + 1]), n_out, n_in};
}

kernels::Matrix ExpertRecord::gate(std::span<const std::byte> record) const noexcept {
    return matrix(record, model::ExpertPart::w1_packed, inner_size_, latent_size_);
}

kernels::Matrix ExpertRecord::up(std::span<const std::byte> record) const noexcept {
    return matrix(record, model::ExpertPart::w3_packed, inner_size_, latent_size_);
}

kernels::Matrix ExpertRecord::down(std::span<const std::byte> record) const noexcept {
    return matrix(record, model::ExpertPart::w2_packed, latent_size_, inner_size_);
}

bool ExpertRecord::find_bad_group(std::span<const std::byte> record, BadGroup& bad) const noexcept {
    for (std::size_t part = 0; part < kParts; part += 2) {
        const std::uint8_t* packed = bytes_at(record, offsets_[part]);
        const std::uint8_t* scales = bytes_at(record, offsets_[part + 1]);
        const std::uint64_t n_groups = part_bytes(part + 1);
        const std::uint64_t found = kernels::find_corrupt_group(packed, scales, n_groups);
        if (found == n_groups) continue;
        const bool is_down = part == static_cast<std::size_t>(model::ExpertPart::w2_packed);
        const std::uint64_t groups_per_row = (is_down ? inner_size_ : latent_size_) / kGroup;
        bad = {part, found / groups_per_row, found % groups_per_row, scales[found], found};
        return true;
    }
    return false;
}

Error unusable_weights(const model::ModelConfig& config, ExpertId id,
                       const ExpertRecord::BadGroup& bad, const BytePlace& scale) {
    const auto specs = model::expert_tensors(config, id.layer, id.expert);
    const char* why =
        bad.scale == 255 ? "which stands for no number" : "under which its codes exceed fp32";
    return Error{
        ErrorCode::corrupt,
        fmt::format("layer {} expert {}: {} row {} group {} has scale byte {}, {} ({} at byte {})",
                    id.layer, id.expert, specs[bad.packed_part + 1].name, bad.row, bad.group,
                    bad.scale, why, scale.file.string(), scale.offset),
        "copy that file again from its source and compare its checksum"};
}

}  // namespace k3::pack
