#pragma once
// Where the six tensors of one expert lie in the bytes that a slot, a pack or the disk cache holds.
//
// One order for all of them, whatever order the checkpoint's shards have: then a record can be
// copied from any tier to any other. docs/formats/expert_record.md is the page of this layout.

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "common/base/error.h"
#include "common/kernels/kernel_table.h"
#include "common/model/config.h"
#include "common/model/tensor_names.h"

namespace k3::pack {

class ExpertRecord {
  public:
    static constexpr std::size_t kParts = 6;  // in the order of model::ExpertPart

    ExpertRecord() = default;
    explicit ExpertRecord(const model::ModelConfig& config);

    /// Of the whole record.
    std::uint64_t bytes() const noexcept { return offsets_[kParts]; }
    std::uint64_t offset(std::size_t part) const noexcept { return offsets_[part]; }
    std::uint64_t part_bytes(std::size_t part) const noexcept {
        return offsets_[part + 1] - offsets_[part];
    }
    std::uint32_t latent_size() const noexcept { return latent_size_; }
    std::uint32_t inner_size() const noexcept { return inner_size_; }

    /// The three matrices of a record; they borrow its bytes.
    /// gate [inner, latent] and up [inner, latent] of a latent row; down [latent, inner].
    kernels::Matrix gate(std::span<const std::byte> record) const noexcept;
    kernels::Matrix up(std::span<const std::byte> record) const noexcept;
    kernels::Matrix down(std::span<const std::byte> record) const noexcept;

    /// A group of 32 weights that no fp32 can hold.
    struct BadGroup {
        std::size_t packed_part = 0;  // the matrix: w1, w2 or w3's packed codes
        std::uint64_t row = 0;
        std::uint64_t group = 0;  // of the row
        std::uint8_t scale = 0;
        /// Of the group's scale, from the beginning of the scale tensor.
        std::uint64_t scale_offset = 0;
    };
    /// The first one in the order w1, w2, w3. Returns whether there is one.
    bool find_bad_group(std::span<const std::byte> record, BadGroup& bad) const noexcept;

  private:
    kernels::Matrix matrix(std::span<const std::byte> record, model::ExpertPart packed,
                           std::size_t n_out, std::size_t n_in) const noexcept;

    std::array<std::uint64_t, kParts + 1> offsets_{};  // the last one is the record's size
    std::uint32_t latent_size_ = 0;
    std::uint32_t inner_size_ = 0;
};

/// The error for a group that find_bad_group found: corrupt, with layer, expert, tensor, row, group
/// and the place of its scale byte.
struct ExpertId {
    std::uint32_t layer = 0;
    std::uint32_t expert = 0;
};
struct BytePlace {
    std::filesystem::path file;
    std::uint64_t offset = 0;
};
Error unusable_weights(const model::ModelConfig& config, ExpertId id,
                       const ExpertRecord::BadGroup& bad, const BytePlace& scale);

}  // namespace k3::pack
