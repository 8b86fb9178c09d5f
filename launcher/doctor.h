#pragma once
// What `k3pipe doctor` looks at: machine, limits, disk, checkpoint.
//
// Looking changes nothing: no file is written, and reads for measuring are bounded in time.

#include <filesystem>
#include <string>
#include <vector>

#include "common/base/cores.h"
#include "common/base/error.h"
#include "launcher/stage_weights.h"

namespace k3::launcher {

enum class Grade {
    fine,
    advice,   // works, and could be better
    failure,  // something will not work
};

struct Diagnosis {
    Grade grade = Grade::fine;
    std::string subject;  // "memory"
    std::string text;
    std::string remedy;                    // empty if fine
    ErrorCode code = ErrorCode::internal;  // of a failure: decides the exit code
};

/// Processor, memory, huge pages, limits, shared memory. `root` is put before /proc and /sys
/// (tests).
std::vector<Diagnosis> examine_machine(const std::filesystem::path& root = "/");

/// Shards that are absent, short or damaged, each by name; nothing if all are there.
std::vector<Diagnosis> examine_shards(const std::filesystem::path& directory);

/// Whether this process may open all shards at once, with room for sockets.
Diagnosis examine_open_files(std::size_t n_shards);

/// Whether the directory has what a tokenizer reads.
Diagnosis examine_tokenizer(const std::filesystem::path& directory);

/// What each pack holds.
std::vector<Diagnosis> examine_packs(const Packs& packs);

/// How fast memory and the disk of these weights read, and whether reads are checked against
/// checksums.
std::vector<Diagnosis> examine_disk(const StageWeights& weights);

}  // namespace k3::launcher
