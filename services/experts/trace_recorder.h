#pragma once
// Records which experts the calls used, to be replayed (common/experts/trace_replay.h,
// bench/cache).
//
// One line for each call, as the cache policy saw it: number of the pass through the layers, layer,
// experts in order of rank. A pass begins when a call's layer is not larger than the last one's;
// then what was recorded is written, so a crash loses one pass at most.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "common/base/fd.h"
#include "common/base/result.h"
#include "common/experts/expert_key.h"

namespace k3::experts {

class TraceRecorder {
  public:
    struct Options {
        std::filesystem::path path;
        std::uint64_t max_bytes = 0;  // then recording ends, and the log says so
        std::uint32_t top_k = 0;      // names so many columns
    };
    /// Replaces the file. Error: io, not_found (no such folder).
    static Result<TraceRecorder> create(const Options& options);
    TraceRecorder(TraceRecorder&&) noexcept = default;
    TraceRecorder& operator=(TraceRecorder&&) = delete;
    TraceRecorder(const TraceRecorder&) = delete;
    TraceRecorder& operator=(const TraceRecorder&) = delete;
    /// Writes what is left.
    ~TraceRecorder();

    /// A call uses these experts of `layer`, in order of rank. Whatever becomes of the recording,
    /// the call goes on.
    void visit(std::uint32_t layer, std::span<const ExpertUse> uses);

  private:
    TraceRecorder(Options options, Fd fd);
    void flush();
    void end(const std::string& why);

    Options options_;
    Fd fd_;  // invalid after the end of the recording
    std::string lines_;
    std::uint64_t written_bytes_ = 0;
    std::uint32_t position_ = 0;
    std::uint32_t last_layer_ = 0;
};

}  // namespace k3::experts
