#include "services/experts/pack_store.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/pack/holdings.h"

namespace k3::experts {

Result<std::unique_ptr<PackStore>> PackStore::create(std::shared_ptr<const pack::Pack> pack,
                                                     const model::Model& model,
                                                     const model::Placement& held) {
    RETURN_IF_ERROR(pack::check_records(*pack, model.config, held));
    return std::unique_ptr<PackStore>(new PackStore(std::move(pack), model.config));
}

Result<std::span<const std::byte>> PackStore::read(ExpertKey key, std::span<std::byte> slot) {
    K3_CHECK(slot.size() == slot_bytes(),
             fmt::format("{} bytes for a slot of {}", slot.size(), slot_bytes()));
    const pack::Entry* entry = pack_->find({key.layer, key.expert});
    if (entry == nullptr)
        return Error{ErrorCode::not_found,
                     fmt::format("layer {} expert {} is not in {}", key.layer, key.expert,
                                 pack_->path().string()),
                     "check which share of the experts this server was given"};
    RETURN_IF_ERROR(pack_->read(*entry, slot.first(entry->stored_bytes())));
    n_reads_.fetch_add(1, std::memory_order_relaxed);
    const std::span<const std::byte> record = slot.first(record_.bytes());
    // The pack's writer has checked this; who else may have written the file, nobody knows.
    ExpertRecord::BadGroup bad;
    if (!record_.find_bad_group(record, bad)) return record;
    return pack::unusable_weights(
        config_, {key.layer, key.expert}, bad,
        {pack_->path(), entry->offset + record_.offset(bad.packed_part + 1) + bad.scale_offset});
}

StoreCounts PackStore::counts() const noexcept {
    const std::uint64_t n = n_reads_.load(std::memory_order_relaxed);
    return {n * record_.bytes(), n * (storage::block_ceiling(record_.bytes()) - record_.bytes()),
            n};
}

}  // namespace k3::experts
