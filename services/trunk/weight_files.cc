#include "services/trunk/weight_files.h"

#include <fmt/format.h>

#include <utility>

namespace k3::trunk {

Result<FileRange> WeightFiles::find(const storage::TensorSpec& spec) {
    ASSIGN_OR_RETURN(const storage::TensorInfo* tensor,
                     checkpoint_.require(spec.name, spec.dtype, spec.shape));
    auto shard = shards_.find(tensor->shard);
    if (shard == shards_.end()) {
        ASSIGN_OR_RETURN(storage::DirectFile file,
                         storage::DirectFile::open(checkpoint_.shard_path(tensor->shard), mode_));
        shard = shards_.emplace(tensor->shard, std::move(file)).first;
    }
    return FileRange{&shard->second, tensor->offset, tensor->bytes};
}

std::string WeightFiles::why_buffered() const {
    for (const auto& [number, file] : shards_)
        if (!file.is_direct())
            return fmt::format("{}: {}", file.path().string(), file.why_buffered());
    return {};
}

}  // namespace k3::trunk
