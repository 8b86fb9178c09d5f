#pragma once
// How fast a device delivers, and which requests it likes best, found out on the files themselves.
//
// What is best differs by a factor of two between devices, and on one device between days: a
// network disk may want eight requests at a time, another loses a third with requests of 1 MiB.

#include <cstdint>
#include <functional>

#include "common/base/result.h"
#include "common/storage/direct_file.h"
#include "common/storage/read_pool.h"

namespace k3::storage {

struct ReadRate {
    std::uint64_t bytes = 0;
    double seconds = 0;
    double bytes_per_s() const noexcept {
        return seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
    }
};

/// Reads the file from `offset` on, around its end if need be, until `max_bytes` are read or
/// `max_seconds` are over, as a stream does it: several reads are always queued. Takes 128 MiB of
/// memory, or `max_bytes` if that is less. Errors: those of DirectFile::read, resource_exhausted.
Result<ReadRate> measure_reads(const DirectFile& file, const ReadShape& shape, std::uint64_t offset,
                               std::uint64_t max_bytes, double max_seconds);

struct ReadProbe {
    ReadShape shape;
    double bytes_per_s = 0;  // 0: not measured
};

/// Tries some shapes for half a second altogether. The usual one is kept unless another is better
/// by more than a quarter: a shared device differs by that much from one moment to the next.
/// Requests of 1 MiB are not tried, which win a moment and lose a third on a bad day. A file that
/// is small or read through the page cache says nothing about a device: the usual shape, not
/// measured. Errors: as measure_reads.
Result<ReadProbe> probe_reads(const DirectFile& file);

}  // namespace k3::storage
