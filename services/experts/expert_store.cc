#include "services/experts/expert_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "common/base/check.h"

namespace k3::experts {

namespace {

constexpr std::uint32_t kNone = 0xFFFFFFFF;

/// What is wrong with a checkpoint, told in one sentence.
class Problems {
  public:
    void add(const Error& error) {
        if (++count_ > kShown) return;
        if (count_ == 1) first_ = error;
        text_ += (count_ == 1 ? "" : "; ") + error.message;
    }
    Status result() const {
        if (count_ == 0) return Status::ok();
        Error error = first_;
        error.message = text_;
        if (count_ > kShown) error.message += fmt::format("; and {} more", count_ - kShown);
        return error;
    }

  private:
    static constexpr std::size_t kShown = 3;
    std::size_t count_ = 0;
    Error first_;
    std::string text_;
};

}  // namespace

CheckpointStore::CheckpointStore(const model::Model& model, const model::Placement& held)
    : checkpoint_(model.checkpoint),
      config_(model.config),
      record_(model.config),
      index_(std::size_t{held.n_layers()} * held.n_experts(), kNone) {}

Result<std::unique_ptr<CheckpointStore>> CheckpointStore::create(const model::Model& model,
                                                                 const model::Placement& held,
                                                                 storage::DirectFile::Mode mode) {
    std::unique_ptr<CheckpointStore> store(new CheckpointStore(model, held));
    RETURN_IF_ERROR(store->look_up(held));
    RETURN_IF_ERROR(store->open_files(mode));
    return store;
}

Status CheckpointStore::look_up(const model::Placement& held) {
    Problems problems;
    places_.reserve(held.count());
    for (std::uint32_t layer = 0; layer < held.n_layers(); ++layer) {
        for (std::uint32_t expert = 0; expert < held.n_experts(); ++expert) {
            if (!held.holds(layer, expert)) continue;
            const auto specs = model::expert_tensors(config_, layer, expert);
            Places places{};
            for (std::uint32_t part = 0; part < specs.size(); ++part) {
                auto tensor =
                    checkpoint_->require(specs[part].name, specs[part].dtype, specs[part].shape);
                if (!tensor)
                    problems.add(tensor.error());
                else
                    places[part] = {(*tensor)->offset, (*tensor)->shard, part};
            }
            std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
                return std::tie(a.shard, a.offset) < std::tie(b.shard, b.offset);
            });
            index_[std::size_t{layer} * held.n_experts() + expert] =
                static_cast<std::uint32_t>(places_.size());
            places_.push_back(places);
        }
    }
    return problems.result();
}

Status CheckpointStore::open_files(storage::DirectFile::Mode mode) {
    files_.resize(checkpoint_->n_shards());
    std::vector<bool> tried(files_.size());
    std::size_t n_scattered = 0;
    for (const Places& places : places_) {
        if (!is_one_run(places)) {
            ++n_scattered;
            continue;
        }
        const std::uint32_t shard = places[0].shard;
        if (tried[shard]) continue;
        tried[shard] = true;
        ASSIGN_OR_RETURN(storage::DirectFile file,
                         storage::DirectFile::open(checkpoint_->shard_path(shard), mode));
        if (file.is_direct())
            files_[shard] = std::move(file);
        else if (why_buffered_.empty())
            why_buffered_ = fmt::format("{}: {}", file.path().string(), file.why_buffered());
    }
    if (n_scattered > 0 && why_buffered_.empty())
        why_buffered_ = fmt::format("{} of {} experts do not lie in one piece in their shard",
                                    n_scattered, places_.size());
    return Status::ok();
}

/// Whether the parts follow one another in a shard as they do in the record.
bool CheckpointStore::is_one_run(const Places& places) const noexcept {
    for (std::uint32_t i = 0; i < places.size(); ++i)
        if (places[i].part != i || places[i].shard != places[0].shard ||
            places[i].offset != places[0].offset + record_.offset(i))
            return false;
    return true;
}

const CheckpointStore::Places* CheckpointStore::places_of(ExpertKey key) const noexcept {
    const std::size_t n_experts = config_.moe.n_experts;
    if (key.layer >= config_.n_layers || key.expert >= n_experts) return nullptr;
    const std::uint32_t at = index_[key.layer * n_experts + key.expert];
    return at == kNone ? nullptr : &places_[at];
}

Result<std::span<const std::byte>> CheckpointStore::read(ExpertKey key, std::span<std::byte> slot) {
    K3_CHECK(slot.size() == slot_bytes(),
             fmt::format("{} bytes for a slot of {}", slot.size(), slot_bytes()));
    const Places* places = places_of(key);
    if (places == nullptr)
        return Error{ErrorCode::not_found,
                     fmt::format("layer {} expert {} is not in this store", key.layer, key.expert),
                     "check which share of the experts this server was given"};
    const auto in_context = [&](Error error) {
        return std::move(error).with_context(
            fmt::format("layer {} expert {}", key.layer, key.expert));
    };
    std::span<const std::byte> record = slot.first(record_.bytes());
    const std::optional<storage::DirectFile>& file = files_[(*places)[0].shard];
    if (file && is_one_run(*places)) {
        auto read = read_blocks(*file, (*places)[0].offset, slot);
        if (!read) return in_context(std::move(read).error());
        record = *read;
    } else if (Status read = read_parts(*places, slot.first(record_.bytes())); !read) {
        return in_context(std::move(read).error());
    }
    ExpertRecord::BadGroup bad;
    if (record_.find_bad_group(record, bad)) return bad_group(key, bad);
    return record;
}

/// The blocks that the record at `offset` touches.
Result<std::span<const std::byte>> CheckpointStore::read_blocks(const storage::DirectFile& file,
                                                                std::uint64_t offset,
                                                                std::span<std::byte> slot) {
    const std::uint64_t first = storage::block_floor(offset);
    const std::uint64_t end = storage::block_ceiling(offset + record_.bytes());
    RETURN_IF_ERROR(file.read(first, slot.first(end - first)));
    count(record_.bytes(), std::min(end, file.bytes()) - first - record_.bytes());
    return std::span<const std::byte>(slot.subspan(offset - first, record_.bytes()));
}

/// One read for every run of tensors that follow one another in a shard: in the released files that
/// is one for the whole expert. A run may be cut by the end of a shard, and nothing promises the
/// order of the six inside it.
Status CheckpointStore::read_parts(const Places& places, std::span<std::byte> record) {
    std::array<std::span<std::byte>, ExpertRecord::kParts> parts;
    for (std::size_t first = 0; first < places.size();) {
        std::size_t n_parts = 0;
        std::uint64_t end = places[first].offset;
        while (first + n_parts < places.size() &&
               places[first + n_parts].shard == places[first].shard &&
               places[first + n_parts].offset == end) {
            const std::uint32_t part = places[first + n_parts].part;
            parts[n_parts++] = record.subspan(record_.offset(part), record_.part_bytes(part));
            end += record_.part_bytes(part);
        }
        RETURN_IF_ERROR(
            checkpoint_->read_range(places[first].shard, places[first].offset,
                                    std::span<const std::span<std::byte>>(parts.data(), n_parts)));
        count(end - places[first].offset, 0);
        first += n_parts;
    }
    return Status::ok();
}

void CheckpointStore::count(std::uint64_t read_bytes, std::uint64_t rounding_bytes) noexcept {
    read_bytes_.fetch_add(read_bytes, std::memory_order_relaxed);
    rounding_bytes_.fetch_add(rounding_bytes, std::memory_order_relaxed);
    runs_.fetch_add(1, std::memory_order_relaxed);
}

StoreCounts CheckpointStore::counts() const noexcept {
    return {read_bytes_.load(std::memory_order_relaxed),
            rounding_bytes_.load(std::memory_order_relaxed), runs_.load(std::memory_order_relaxed)};
}

Error CheckpointStore::bad_group(ExpertKey key, const ExpertRecord::BadGroup& bad) const {
    const Places& places = *places_of(key);
    const auto place = std::find_if(places.begin(), places.end(),
                                    [&](const Place& p) { return p.part == bad.packed_part + 1; });
    return pack::unusable_weights(
        config_, {key.layer, key.expert}, bad,
        {checkpoint_->shard_path(place->shard), place->offset + bad.scale_offset});
}

}  // namespace k3::experts
