#pragma once
// An expert server's messages: ExpertCall and Prefetch. Everything else is refused by name.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/model/load.h"
#include "common/model/memory_plan.h"
#include "common/model/placement_file.h"
#include "common/pack/pack.h"
#include "common/telemetry/counters.h"
#include "common/transport/arena.h"
#include "common/transport/server.h"
#include "services/experts/called_hints.h"
#include "services/experts/disk_cache_store.h"
#include "services/experts/executor.h"
#include "services/experts/expert_cache.h"
#include "services/experts/expert_store.h"
#include "services/experts/pick_groups.h"
#include "services/experts/trace_recorder.h"
#include "services/experts/warm_file.h"

namespace k3::experts {

class Service {
  public:
    struct Options {
        std::string name = "experts";
        std::string share = "all";      // common/model/placement_file.h
        std::uint64_t cache_bytes = 0;  // 0: all held experts, or a quarter of the free memory
        std::string policy = "rank-weighted";
        std::uint32_t max_call_rows = model::kDefaultMaxRows;
        std::uint32_t weight = 0;  // announced: msg::ExpertFacts; 0: as the share says
        std::uint32_t n_readers = 4;
        std::uint64_t read_limit = 0;        // bytes per second, to try a slower disk; 0: none
        bool direct = true;                  // read past the page cache where that is possible
        std::string disk_cache;              // directory; empty: none
        std::uint64_t disk_cache_bytes = 0;  // on the disk
        std::string warm_file;  // empty: "warm" in the disk cache's directory, if there is one
        std::string trace;      // file to record routing in; empty: none
        std::uint64_t trace_bytes = std::uint64_t{1} << 30U;
        std::int64_t read_wait_ms = 30'000;  // of one call, for all its experts
        bool use_shm = true;
        std::uint64_t run_id = 0;
    };

    /// Looks up the share's tensors and takes the memory; reads no weights, but those that a former
    /// run kept in the background. A disk cache that the system refuses (full, read-only) is told
    /// and done without.
    /// Errors: invalid_argument (share, or one without experts), those of CheckpointStore::create,
    /// DiskCacheStore::create, TraceRecorder::create and ExpertCache::create, resource_exhausted (a
    /// cache larger than the free memory).
    /// With `pack`, whose model this is, experts are read from it: errors of PackStore::create.
    static Result<std::unique_ptr<Service>> create(
        const Options& options, const model::Model& model,
        std::shared_ptr<const pack::Pack> pack = nullptr);

    /// Facts for Server::set_ready; kind, name and version are the server's.
    msg::Announcement announcement() const;
    /// Has the progress of its calls told there, from now on.
    void report_to(transport::WorkProgress& work) noexcept { executor_->report_to(&work); }
    /// Answers one request.
    void handle(transport::Request request);
    /// Any thread.
    std::vector<msg::Counter> statistics() const;

    std::uint64_t n_held() const noexcept { return held_.count(); }
    const ExpertCache& cache() const noexcept { return *cache_; }

  private:
    Service(const Options& options, const model::Model& model, model::Share share);
    Status open_origin(const model::Model& model, std::shared_ptr<const pack::Pack> pack);
    Status open_disk_cache();
    Status build();
    ExpertStore& store() noexcept;
    void make_arena();

    Status check_layer(std::uint32_t layer) const;
    Result<msg::Bytes> take_rows(const msg::ExpertCall& call, std::vector<msg::Bytes>& frames);
    Status answer(const msg::ExpertCall& call, transport::Request& request);
    Status take_hint(const msg::Prefetch& hint);

    const Options options_;
    const model::ModelConfig config_;
    const std::string fingerprint_;
    const model::Placement held_;
    const std::uint32_t weight_;
    std::unique_ptr<ExpertStore> origin_;         // pack or checkpoint
    std::unique_ptr<DiskCacheStore> disk_cache_;  // null: none
    std::unique_ptr<ExpertCache> cache_;
    std::unique_ptr<WarmFile> warm_file_;  // null: none
    std::optional<TraceRecorder> trace_;
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<PickGroups> groups_;
    CalledHints called_hints_;
    std::unique_ptr<transport::Arena> arena_;  // null: replies are inline
    transport::ArenaReader reader_;
    std::vector<std::int64_t> sums_;  // [max_call_rows, latent_size]

    telemetry::Counters counters_;
    std::atomic<std::uint64_t>& calls_;
    std::atomic<std::uint64_t>& failed_calls_;
    std::atomic<std::uint64_t>& rows_;
    std::atomic<std::uint64_t>& picks_;
    std::atomic<std::uint64_t>& hints_;
    std::atomic<std::uint64_t>& bad_hints_;
    std::atomic<std::uint64_t>& overtaken_hints_;
    std::atomic<std::uint64_t>& read_wait_ns_;
    std::atomic<std::uint64_t>& compute_ns_;
};

}  // namespace k3::experts
