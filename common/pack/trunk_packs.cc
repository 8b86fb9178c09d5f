#include "common/pack/trunk_packs.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/storage/read_pool.h"

namespace k3::pack {

namespace {

static_assert(format::kMaxParts <= storage::kMaxLanes, "a pool reads every part");

constexpr const char* kNameAll = "name every part of one pack once";

Error other_parts(const Pack& first, const Pack& second) {
    return Error{ErrorCode::incompatible,
                 fmt::format("{} is part {}/{} of a pack of checkpoint {}, and {} is part {}/{} of "
                             "one of {}",
                             first.path().string(), first.part().index, first.part().count,
                             first.origin().fingerprint, second.path().string(),
                             second.part().index, second.part().count, second.origin().fingerprint),
                 kNameAll};
}

}  // namespace

Result<TrunkPacks> TrunkPacks::open(std::span<const std::filesystem::path> files, Pack::Mode mode) {
    std::vector<std::shared_ptr<const Pack>> parts;
    for (const std::filesystem::path& file : files) {
        ASSIGN_OR_RETURN(auto part, Pack::open(file, mode));
        parts.push_back(std::move(part));
    }
    return of(std::move(parts));
}

Result<TrunkPacks> TrunkPacks::of(std::vector<std::shared_ptr<const Pack>> parts) {
    K3_CHECK(!parts.empty(), "there is a pack");
    const Pack& first = *parts.front();
    TrunkPacks packs;
    packs.parts_.resize(first.part().count);
    for (std::shared_ptr<const Pack>& part : parts) {
        RETURN_IF_ERROR(part->check_kind(Kind::trunk));
        if (part->part().count != first.part().count || part->origin() != first.origin())
            return other_parts(first, *part);
        std::shared_ptr<const Pack>& place = packs.parts_[part->part().index];
        if (place != nullptr)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{} and {} are both part {}/{}", place->path().string(),
                                     part->path().string(), part->part().index, part->part().count),
                         kNameAll};
        place = part;
    }
    std::vector<std::string> missing;
    for (std::uint32_t i = 0; i < packs.n_parts(); ++i)
        if (packs.parts_[i] == nullptr)
            missing.push_back(fmt::format("{}/{}", i, first.part().count));
    if (missing.empty()) return packs;
    return Error{
        ErrorCode::not_found,
        fmt::format("{} is part {}/{} of a pack, and part{} {} {} missing", first.path().string(),
                    first.part().index, first.part().count, missing.size() == 1 ? "" : "s",
                    fmt::join(missing, ", "), missing.size() == 1 ? "is" : "are"),
        kNameAll};
}

std::string TrunkPacks::name() const {
    const std::string first = part(0).path().string();
    return n_parts() == 1 ? first : fmt::format("{} and {} more", first, n_parts() - 1);
}

std::string TrunkPacks::why_buffered() const {
    for (const auto& part : parts_)
        if (!part->why_buffered().empty())
            return fmt::format("{}: {}", part->path().string(), part->why_buffered());
    return {};
}

RunSource::RunSource(const TrunkPacks& packs, const TrunkRun& run)
    : packs_(&packs),
      key_(run.key()),
      unit_bytes_(entry_of(run).piece_bytes),
      stripe_bytes_(stripe_bytes(run)),
      end_(storage::block_ceiling(run.bytes())) {}

Status RunSource::read(std::uint64_t offset, std::span<std::byte> dst) const {
    const std::uint64_t count = packs_->n_parts();
    while (!dst.empty()) {
        const std::uint64_t stripe = offset / stripe_bytes_;
        std::uint64_t bytes = dst.size();
        std::uint64_t place = offset;  // in the entry
        if (count > 1) {
            bytes = std::min(bytes, (stripe + 1) * stripe_bytes_ - offset);
            place = stripe / count * stripe_bytes_ + offset % stripe_bytes_;
        }
        const Pack& part = packs_->part(static_cast<std::uint32_t>(stripe % count));
        const Entry& entry = *part.find(key_);
        RETURN_IF_ERROR(part.read(entry, Pack::pieces_of(entry, place, bytes), dst.first(bytes)));
        offset += bytes;
        dst = dst.subspan(bytes);
    }
    return Status::ok();
}

}  // namespace k3::pack
