#pragma once
// Where the trunk's tensors lie on disk, for reads past the page cache.

#include <cstdint>
#include <map>
#include <string>

#include "common/base/result.h"
#include "common/model/tensor_names.h"
#include "common/storage/checkpoint.h"
#include "common/storage/direct_file.h"
#include "services/trunk/weight_ring.h"

namespace k3::trunk {

/// The shards of a checkpoint, each opened when a tensor in it is looked up.
class WeightFiles {
  public:
    /// Borrows the checkpoint.
    WeightFiles(const storage::Checkpoint& checkpoint, storage::DirectFile::Mode mode)
        : checkpoint_(checkpoint), mode_(mode) {}
    WeightFiles(const WeightFiles&) = delete;
    WeightFiles& operator=(const WeightFiles&) = delete;

    /// Valid as long as this. Errors: not_found, incompatible (another type or shape), io.
    Result<FileRange> find(const storage::TensorSpec& spec);

    /// Why reads are buffered, of the first such file; empty if all are direct.
    std::string why_buffered() const;

  private:
    const storage::Checkpoint& checkpoint_;
    const storage::DirectFile::Mode mode_;
    std::map<std::uint32_t, storage::DirectFile> shards_;  // a map: its values stay where they are
};

}  // namespace k3::trunk
