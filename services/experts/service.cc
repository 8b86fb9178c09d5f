#include "services/experts/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/base/log.h"
#include "common/base/memory.h"
#include "common/base/settings.h"
#include "common/model/memory_plan.h"
#include "common/transport/tensor_io.h"
#include "services/experts/limited_store.h"
#include "services/experts/pack_store.h"

namespace k3::experts {

namespace {

/// A sum of 32 terms below 2^18, times 2^40, could reach 2^63.
constexpr std::uint32_t kMostTerms = 31;

/// The memory that --cache-bytes buys; refused if so much is not free.
Result<model::ExpertMemory> memory_for(std::uint64_t cache_bytes, const ExpertStore& origin,
                                       std::uint64_t n_held, bool disk_cache) {
    ASSIGN_OR_RETURN(AvailableMemory available, available_memory());
    model::ExpertMemoryOptions options;
    options.cache_bytes = cache_bytes;
    options.free_bytes = available.bytes;
    options.slot_bytes = origin.slot_bytes();
    options.n_held = n_held;
    if (disk_cache) options.buffer_bytes = model::disk_cache_buffer_bytes(origin.record_bytes());
    ASSIGN_OR_RETURN(const model::ExpertMemory memory, model::expert_memory(options));
    if (memory.bytes <= available.bytes) return memory;
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("a cache of {} does not fit the {} that are free according to {}",
                             format_bytes(memory.bytes), format_bytes(available.bytes),
                             available.limited_by),
                 "give a smaller --cache-bytes, or 0 for a quarter of the free memory"};
}

/// Whether a failed call is a matter for whoever runs this server; a caller's mistake is told to
/// the caller only.
bool is_ours(ErrorCode code) {
    return code == ErrorCode::corrupt || code == ErrorCode::io ||
           code == ErrorCode::resource_exhausted || code == ErrorCode::deadline_exceeded;
}

Error not_for_us(const msg::Body& body) {
    return Error{ErrorCode::unsupported,
                 fmt::format("an expert server does not answer {}", msg::name_of(body)),
                 "send it ExpertCall or Prefetch, and check which service this endpoint is"};
}

}  // namespace

Service::Service(const Options& options, const model::Model& model, model::Share share)
    : options_(options),
      config_(model.config),
      fingerprint_(model.fingerprint),
      held_(std::move(share.held)),
      weight_(options.weight > 0 ? options.weight : share.weight),
      sums_(std::size_t{options.max_call_rows} * model.config.moe.latent_size),
      calls_(counters_.add("expert_calls")),
      failed_calls_(counters_.add("expert_calls_failed")),
      rows_(counters_.add("expert_call_rows")),
      picks_(counters_.add("expert_call_picks")),
      hints_(counters_.add("prefetch_hints")),
      bad_hints_(counters_.add("prefetch_hints_refused")),
      overtaken_hints_(counters_.add("prefetch_hints_overtaken")),
      read_wait_ns_(counters_.add("expert_read_wait_ns")),
      compute_ns_(counters_.add("expert_compute_ns")) {}

Result<std::unique_ptr<Service>> Service::create(const Options& options, const model::Model& model,
                                                 std::shared_ptr<const pack::Pack> pack) {
    ASSIGN_OR_RETURN(model::Share share, model::read_share(options.share, model));
    if (share.held.count() == 0)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("the share '{}' holds no expert of {}", options.share, model.config.name),
            "give a share that holds at least one, or leave this server out"};
    if (model.config.moe.top_k > kMostTerms)
        return Error{ErrorCode::unsupported,
                     fmt::format("{} experts for each row, and a 64-bit sum holds {} terms",
                                 model.config.moe.top_k, kMostTerms),
                     "use a model with fewer experts for each token"};
    std::unique_ptr<Service> service(new Service(options, model, std::move(share)));
    RETURN_IF_ERROR(service->open_origin(model, std::move(pack)));
    RETURN_IF_ERROR(service->open_disk_cache());
    RETURN_IF_ERROR(service->build());
    service->make_arena();
    return service;
}

Status Service::open_origin(const model::Model& model, std::shared_ptr<const pack::Pack> pack) {
    std::string why_buffered;
    if (pack != nullptr) {
        why_buffered = pack->why_buffered();
        ASSIGN_OR_RETURN(origin_, PackStore::create(std::move(pack), model, held_));
    } else {
        using Mode = storage::DirectFile::Mode;
        ASSIGN_OR_RETURN(
            auto store,
            CheckpointStore::create(model, held_,
                                    options_.direct ? Mode::direct_if_possible : Mode::buffered));
        why_buffered = store->why_buffered();
        origin_ = std::move(store);
    }
    if (!why_buffered.empty())
        log::info("experts are read through the page cache: " + why_buffered);
    if (options_.read_limit > 0)
        origin_ = std::make_unique<LimitedStore>(std::move(origin_), options_.read_limit);
    return Status::ok();
}

Status Service::open_disk_cache() {
    if (options_.disk_cache.empty()) return Status::ok();
    DiskCacheStore::Options disk;
    disk.directory = options_.disk_cache;
    disk.budget_bytes = options_.disk_cache_bytes;
    disk.fingerprint = fingerprint_;
    disk.n_layers = config_.n_layers;
    disk.n_experts = config_.moe.n_experts;
    disk.policy = options_.policy;
    auto opened = DiskCacheStore::create(disk, *origin_);
    if (opened.has_value())
        disk_cache_ = std::move(opened).value();
    else if (opened.error().code == ErrorCode::io)
        log::warn("serving without the disk cache: " + opened.error().sentence());
    else
        return std::move(opened).error();
    return Status::ok();
}

ExpertStore& Service::store() noexcept {
    if (disk_cache_) return *disk_cache_;
    return *origin_;
}

Status Service::build() {
    const model::MoeConfig& moe = config_.moe;
    ASSIGN_OR_RETURN(
        const model::ExpertMemory memory,
        memory_for(options_.cache_bytes, *origin_, held_.count(), disk_cache_ != nullptr));
    ExpertCache::Options cache;
    cache.budget_bytes = memory.n_slots * origin_->slot_bytes();
    cache.n_layers = config_.n_layers;
    cache.n_experts = moe.n_experts;
    cache.n_held = held_.count();
    cache.top_k = moe.top_k;
    cache.n_readers = options_.n_readers;
    cache.policy = options_.policy;
    ASSIGN_OR_RETURN(cache_, ExpertCache::create(cache, store()));
    if (!options_.trace.empty()) {
        ASSIGN_OR_RETURN(TraceRecorder trace,
                         TraceRecorder::create({options_.trace, options_.trace_bytes, moe.top_k}));
        trace_.emplace(std::move(trace));
    }
    std::filesystem::path warm = options_.warm_file;
    if (warm.empty() && disk_cache_) warm = std::filesystem::path(options_.disk_cache) / "warm";
    if (!warm.empty())
        warm_file_ = std::make_unique<WarmFile>(
            WarmFile::Options{warm, fingerprint_, options_.policy}, *cache_);
    executor_ = std::make_unique<Executor>(config_, kernels::kernels(), *cache_);
    groups_ = std::make_unique<PickGroups>(
        PickGroups::Limits{moe.n_experts, moe.top_k, options_.max_call_rows}, held_, options_.name);
    return Status::ok();
}

void Service::make_arena() {
    if (!options_.use_shm) return;
    const model::ArenaSize size = model::expert_reply_arena(config_, options_.max_call_rows);
    auto arena = transport::Arena::create(
        {transport::segment_name(options_.run_id, options_.name), size.slot_bytes, size.n_slots});
    if (arena.has_value())
        arena_ = std::move(arena).value();
    else  // the other lane always works
        log::warn("replies go inline: " + arena.error().sentence());
}

msg::Announcement Service::announcement() const {
    msg::Announcement out;
    out.fingerprint = fingerprint_;
    if (arena_) out.arena = arena_->probe();
    out.facts = msg::ExpertFacts{config_.moe.n_experts, config_.moe.latent_size, held_.holdings(),
                                 options_.max_call_rows, weight_};
    return out;
}

void Service::handle(transport::Request request) {
    if (const auto* call = std::get_if<msg::ExpertCall>(&request.envelope.body)) {
        const Status status = answer(*call, request);
        if (status.has_value()) return;
        ++failed_calls_;
        if (is_ours(status.error().code)) log::error(status.error().sentence());
        request.responder.send_error(status.error());
    } else if (const auto* hint = std::get_if<msg::Prefetch>(&request.envelope.body)) {
        const Status status = take_hint(*hint);
        if (!status.has_value()) ++bad_hints_;
        if (!request.responder.wants_reply()) return;
        if (status.has_value())
            request.responder.send(msg::Done{});
        else
            request.responder.send_error(status.error());
    } else {
        request.responder.send_error(not_for_us(request.envelope.body));
    }
}

Status Service::check_layer(std::uint32_t layer) const {
    if (layer < config_.n_layers && config_.is_moe(layer)) return Status::ok();
    return Error{ErrorCode::invalid_argument,
                 fmt::format("layer {} has no routed experts: the layers {} to {} have", layer,
                             config_.first_k_dense, config_.n_layers - 1),
                 "check that trunk and experts serve the same checkpoint"};
}

/// [n_rows, latent_size] f32, every value finite.
Result<msg::Bytes> Service::take_rows(const msg::ExpertCall& call,
                                      std::vector<msg::Bytes>& frames) {
    const std::uint64_t latent = config_.moe.latent_size;
    if (call.rows.shape.size() == 2 &&
        (call.rows.shape[0] == 0 || call.rows.shape[0] > options_.max_call_rows))
        return Error{ErrorCode::invalid_argument,
                     fmt::format("layer {}: a call of {} rows, and {} takes 1 to {}", call.layer,
                                 call.rows.shape[0], options_.name, options_.max_call_rows),
                     "split the call, or start this server with a larger --max-call-rows"};
    const std::uint64_t expected[] = {0, latent};
    ASSIGN_OR_RETURN(msg::Bytes bytes,
                     transport::take_tensor(call.rows, "the call's rows", msg::DType::f32, expected,
                                            frames, reader_));
    const std::span<const float> values = transport::view_as<float>(bytes);
    const auto bad = std::find_if(values.begin(), values.end(),
                                  [](float value) { return !std::isfinite(value); });
    if (bad == values.end()) return bytes;
    const auto at = static_cast<std::uint64_t>(bad - values.begin());
    return Error{ErrorCode::invalid_argument,
                 fmt::format("layer {}: row {} holds a value that is not finite (column {})",
                             call.layer, at / latent, at % latent),
                 "check the trunk: its state or weights are damaged"};
}

Status Service::answer(const msg::ExpertCall& call, transport::Request& request) {
    ++calls_;
    RETURN_IF_ERROR(check_layer(call.layer));
    ASSIGN_OR_RETURN(msg::Bytes bytes, take_rows(call, request.frames));
    const std::span<const float> rows = transport::view_as<float>(bytes);
    const std::uint64_t n_rows = call.rows.shape[0];
    RETURN_IF_ERROR(groups_->group(call.layer, n_rows, call.picks));
    called_hints_.add(call.hint);
    if (trace_) trace_->visit(call.layer, groups_->uses());
    rows_ += n_rows;
    picks_ += call.picks.size();

    Executor::Times times;
    const std::span<std::int64_t> sums = std::span(sums_).first(rows.size());
    const Status status = executor_->run(call.layer, rows, call.picks, *groups_,
                                         Deadline::after_ms(options_.read_wait_ms), sums, times);
    read_wait_ns_ += times.read_ns;
    compute_ns_ += times.compute_ns;
    RETURN_IF_ERROR(status);

    msg::PartialSums reply;
    std::vector<msg::Bytes> frames;
    reply.sums = transport::put_tensor(msg::DType::i64, {n_rows, config_.moe.latent_size},
                                       std::as_bytes(sums), arena_.get(), call.reply_shm, frames);
    reply.compute_ns = times.compute_ns;
    reply.read_ns = times.read_ns;
    request.responder.send(std::move(reply), std::move(frames));
    return Status::ok();
}

Status Service::take_hint(const msg::Prefetch& hint) {
    ++hints_;
    RETURN_IF_ERROR(check_layer(hint.layer));
    for (std::uint32_t expert : hint.experts)
        RETURN_IF_ERROR(groups_->check_held(hint.layer, expert));
    if (called_hints_.has(hint.number)) {
        ++overtaken_hints_;
        return Status::ok();
    }
    cache_->prefetch(hint.layer, hint.experts);
    return Status::ok();
}

std::vector<msg::Counter> Service::statistics() const {
    std::vector<msg::Counter> all = counters_.snapshot();
    const CacheCounts cache = cache_->counts();
    const ExpertCache::Slots slots = cache_->slots();
    const StoreCounts store = disk_cache_ ? disk_cache_->counts() : origin_->counts();
    const DiskCacheCounts disk = disk_cache_ ? disk_cache_->disk_counts() : DiskCacheCounts{};
    const std::pair<const char*, std::uint64_t> more[] = {
        {"experts_held", held_.count()},
        {"expert_cache_slots", slots.n_slots},
        {"expert_cache_kept_slots", slots.n_kept},
        {"expert_cache_bytes", slots.n_slots * origin_->slot_bytes()},
        {"expert_cache_hits", cache.hits},
        {"expert_cache_misses", cache.misses},
        {"expert_cache_refused_admissions", cache.refused_admissions},
        {"expert_cache_evictions", cache.evictions},
        {"expert_cache_warmed", cache.warmed},
        {"prefetch_reads", cache.prefetch_reads},
        {"prefetch_useful", cache.prefetch_useful},
        {"prefetch_late", cache.prefetch_late},
        {"prefetch_unused", cache.prefetch_unused},
        {"prefetch_dropped", cache.prefetch_dropped},
        {"expert_reads", cache.reads},
        {"expert_reads_failed", cache.failed_reads},
        {"expert_read_bytes", store.read_bytes},
        {"expert_read_rounding_bytes", store.rounding_bytes},
        {"expert_read_runs", store.runs},
        {"disk_cache_entries", disk.entries},
        {"disk_cache_capacity", disk.capacity},
        {"disk_cache_hits", disk.hits},
        {"disk_cache_misses", disk.misses},
        {"disk_cache_damaged", disk.damaged},
        {"disk_cache_writes", disk.writes},
        {"disk_cache_writes_failed", disk.failed_writes},
        {"disk_cache_unwritten", disk.unwritten},
        {"disk_cache_refused_admissions", disk.refused},
        {"disk_cache_evictions", disk.evictions},
    };
    for (const auto& [name, value] : more) all.push_back({name, value});
    return all;
}

}  // namespace k3::experts
