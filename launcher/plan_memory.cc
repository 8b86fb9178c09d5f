#include "launcher/plan_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <numeric>
#include <optional>

#include "common/base/settings.h"
#include "common/model/memory_plan.h"
#include "common/model/placement_file.h"
#include "common/model/tensor_names.h"
#include "common/pack/holdings.h"
#include "common/pack/trunk_run.h"
#include "common/transport/lane_host.h"
#include "launcher/plan_model.h"

namespace k3::launcher {

using msg::ServiceKind;

namespace {

std::uint64_t sum_of(const std::vector<MemoryItem>& items) {
    return std::accumulate(
        items.begin(), items.end(), std::uint64_t{0},
        [](std::uint64_t sum, const MemoryItem& item) { return sum + item.bytes; });
}

/// What a stage's command line says, as the service will read it.
class Flags {
  public:
    explicit Flags(const StagePlan& stage) : stage_(stage) {}

    std::string text(const std::string& flag, const std::string& otherwise) const {
        const auto& argv = stage_.argv;
        for (std::size_t i = argv.size(); i > 1; --i)
            if (argv[i - 2] == flag) return argv[i - 1];
        return otherwise;
    }
    Result<std::uint64_t> number(const std::string& flag, std::uint64_t otherwise) const {
        const std::string value = text(flag, "");
        if (value.empty()) return otherwise;
        std::uint64_t number = 0;
        const char* end = value.data() + value.size();
        const auto [stop, problem] = std::from_chars(value.data(), end, number);
        if (problem == std::errc() && stop == end) return number;
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: {} {} is not a number", where(), flag, value),
                     "correct it in the pipeline file"};
    }
    Result<std::uint64_t> bytes(const std::string& flag) const {
        const std::string value = text(flag, "");
        if (value.empty()) return std::uint64_t{0};
        Result<std::uint64_t> parsed = parse_bytes(value);
        if (!parsed) return std::move(parsed).error().with_context(where());
        return parsed;
    }
    bool uses_shm() const { return text("--payload", "shm") == "shm"; }

    std::string where() const { return stage_.where.empty() ? stage_.name : stage_.where; }

  private:
    const StagePlan& stage_;
};

/// Threads that compute: as set, or a core each.
Result<std::uint64_t> threads_of(const Flags& flags, const MachineCores& machine) {
    ASSIGN_OR_RETURN(const std::uint64_t given, flags.number("--threads", 0));
    if (given > 0) return given;
    const std::string cores = flags.text("--cores", "");
    if (cores.empty()) return std::uint64_t{machine.allowed.size()};
    Result<CoreSet> set = parse_cores(cores);
    if (!set.has_value()) return std::move(set).error().with_context(flags.where());
    return std::uint64_t{set->size()};
}

class MemoryPlanner {
  public:
    MemoryPlanner(const PipelinePlan& plan, const StageWeights& weights,
                  const MachineCores& machine, std::uint64_t free_bytes)
        : plan_(plan), weights_(weights), machine_(machine), free_bytes_(free_bytes) {}

    Result<PipelineMemory> run() {
        out_.segments.name = "shared memory";
        out_.processes.push_back({"k3pipe", {{"launcher and janitor", model::kLauncherBaseBytes}}});
        for (const StagePlan& stage : plan_.stages)
            if (stage.kind == ServiceKind::experts) ++n_expert_servers_;
        for (const StagePlan& stage : plan_.stages)
            if (stage.owned) RETURN_IF_ERROR(add(stage));
        return std::move(out_);
    }

  private:
    Status add(const StagePlan& stage) {
        ProcessMemory process{stage.name, {{"program and libraries", model::kServiceBaseBytes}}};
        switch (stage.kind) {
            case ServiceKind::trunk:
                RETURN_IF_ERROR(add_trunk(stage, process));
                break;
            case ServiceKind::experts:
                RETURN_IF_ERROR(add_experts(stage, process));
                break;
            case ServiceKind::tokenizer:
                add_tokenizer(stage, process);
                break;
            case ServiceKind::sampler:
                for (const auto& [path, model] : weights_.models)
                    process.items.push_back(
                        {"candidates", model.config.vocab_size * model::kSamplerEntryBytes});
                break;
            default:
                break;
        }
        out_.processes.push_back(std::move(process));
        return Status::ok();
    }

    /// It looks at the checkpoint, if there is one, for its fingerprint only.
    void add_tokenizer(const StagePlan& stage, ProcessMemory& process) const {
        const model::ModelConfig& config = config_of(stage);
        process.items.push_back({"vocabulary", config.vocab_size * model::kTokenizerEntryBytes});
        if (weights_.models.at(stage.model).checkpoint == nullptr) return;
        process.items.push_back({"header of a shard, at start", model::shard_header_bytes(config)});
    }

    const model::ModelConfig& config_of(const StagePlan& stage) const {
        return weights_.models.at(stage.model).config;
    }

    /// Where everything lies. A stage with packs opens the checkpoint too, if there is one.
    void add_index(const StagePlan& stage, ProcessMemory& process) const {
        const model::Model& model = weights_.models.at(stage.model);
        if (model.checkpoint != nullptr)
            process.items.push_back(
                {"index of the checkpoint", model::checkpoint_index_bytes(model.config)});
        for (const std::string& path : settings_of(stage, "pack"))
            process.items.push_back(
                {"table of the pack", pack::table_memory_bytes(*weights_.packs.at(path))});
    }

    void add_segment(const StagePlan& stage, const char* what, const model::ArenaSize& size) {
        out_.segments.items.push_back({fmt::format("{}, {}", stage.name, what), size.bytes()});
    }

    Status add_trunk(const StagePlan& stage, ProcessMemory& process) {
        const Flags flags(stage);
        const model::ModelConfig& config = config_of(stage);
        ASSIGN_OR_RETURN(const model::LayerRange range,
                         model::parse_layers(flags.text("--layers", "all"), config));
        ASSIGN_OR_RETURN(const std::uint64_t rows,
                         flags.number("--max-step-rows", model::kDefaultMaxRows));
        ASSIGN_OR_RETURN(const std::uint64_t threads, threads_of(flags, machine_));
        ASSIGN_OR_RETURN(std::uint64_t sessions, flags.bytes("--session-bytes"));
        ASSIGN_OR_RETURN(const std::uint64_t budget, flags.bytes("--weights-bytes"));
        const model::ReadUnits units = settings_of(stage, "pack").empty()
                                           ? model::ReadUnits{}
                                           : pack::read_units(config, range);
        const auto weights = model::trunk_weight_size(config, range, budget, units);
        if (!weights.has_value()) return Error(weights.error()).with_context(stage.name);
        out_.trunk_token_bytes += weights->token_bytes;
        const std::uint64_t buffers = model::step_buffer_bytes(config, range, rows, threads);
        add_index(stage, process);
        process.items.push_back(
            {fmt::format("weights of layers {}-{}, kept", range.first, range.end() - 1),
             weights->kept_bytes});
        if (weights->ring_bytes > 0)
            process.items.push_back({"ring of weights that are read again", weights->ring_bytes});
        process.items.push_back({fmt::format("step buffers, {} rows", rows), buffers});
        process.items.push_back(
            {"rows of expert calls", rows * config.moe.latent_size * sizeof(float)});
        if (sessions == 0) {
            sessions = (free_bytes_ - std::min(free_bytes_, weights->kept_bytes +
                                                                weights->ring_bytes + buffers)) /
                       4;
            out_.notes.push_back(
                fmt::format("{}: session_bytes is not set; a quarter of what is free after loading",
                            stage.name));
        }
        process.items.push_back({"sessions, at most", sessions});
        model::ModelConfig kept = config;
        if (flags.text("--mla-cache", "fp32") == "bf16") kept.mla.cache = model::MlaCache::bf16;
        const model::SessionSize session = model::session_size(kept, range, threads);
        std::uint64_t positions = config.max_positions;
        if (session.position_bytes > 0)
            positions = std::min(positions, (sessions - std::min(sessions, session.fixed_bytes)) /
                                                session.position_bytes);
        out_.notes.push_back(fmt::format(
            "{}: a session takes {} (KDA matrices {}, histories {}) and {} for each position; one "
            "alone holds {} positions",
            stage.name, grouped(session.fixed_bytes), grouped(session.kda_matrix_bytes),
            grouped(session.kda_history_bytes), grouped(session.position_bytes),
            sessions < session.fixed_bytes ? "no" : grouped(positions)));
        if (!flags.uses_shm()) return Status::ok();
        add_segment(stage, "replies", model::trunk_reply_arena(config, range, rows));
        if (n_expert_servers_ > 0)
            add_segment(stage, "expert calls",
                        model::trunk_call_arena(config.moe.latent_size, rows, n_expert_servers_));
        return Status::ok();
    }

    Status add_experts(const StagePlan& stage, ProcessMemory& process) {
        const Flags flags(stage);
        const model::ModelConfig& config = config_of(stage);
        ASSIGN_OR_RETURN(
            const model::Share share,
            model::read_share(flags.text("--share", "all"), weights_.models.at(stage.model)));
        const model::Placement& held = share.held;
        ASSIGN_OR_RETURN(const std::uint64_t rows,
                         flags.number("--max-call-rows", model::kDefaultMaxRows));
        model::ExpertMemoryOptions options;
        ASSIGN_OR_RETURN(options.cache_bytes, flags.bytes("--cache-bytes"));
        const std::uint64_t record = model::expert_bytes(config);
        options.free_bytes = free_bytes_;
        options.slot_bytes = model::expert_slot_bytes(record);
        options.n_held = held.count();
        if (!flags.text("--disk-cache", "").empty())
            options.buffer_bytes = model::disk_cache_buffer_bytes(record);
        const auto memory = model::expert_memory(options);
        if (!memory.has_value()) return Error(memory.error()).with_context(stage.name);
        if (options.cache_bytes == 0)
            out_.notes.push_back(fmt::format(
                "{}: cache_bytes is not set; its whole share, or a quarter of what is free",
                stage.name));
        out_.expert_slots += memory->n_slots;
        out_.slots_of[stage.name] = memory->n_slots;
        out_.experts_held += held.count();
        add_index(stage, process);
        process.items.push_back({fmt::format("cache, {} of {} experts", grouped(memory->n_slots),
                                             grouped(held.count())),
                                 memory->n_slots * options.slot_bytes});
        if (memory->buffer_bytes > 0)
            process.items.push_back({"what goes to the disk cache", memory->buffer_bytes});
        process.items.push_back(
            {fmt::format("call buffers, {} rows", rows), model::expert_buffer_bytes(config, rows)});
        if (!flags.uses_shm()) return Status::ok();
        add_segment(stage, "sums", model::expert_reply_arena(config, rows));
        const transport::LaneSegment::Sizes lanes = transport::LaneHost::Options().sizes;
        out_.segments.items.push_back(
            {fmt::format("{}, fast lanes", stage.name),
             transport::kLanePage + std::uint64_t{lanes.n_lanes} *
                                        (std::uint64_t{lanes.request_bytes} + lanes.reply_bytes)});
        return Status::ok();
    }

    const PipelinePlan& plan_;
    const StageWeights& weights_;
    const MachineCores& machine_;
    const std::uint64_t free_bytes_;
    std::uint64_t n_expert_servers_ = 0;
    PipelineMemory out_;
};

void print_process(const ProcessMemory& process, std::string& text) {
    fmt::format_to(std::back_inserter(text), "  {:<44}{:>20}\n", process.name,
                   grouped(process.bytes()));
    for (const MemoryItem& item : process.items)
        fmt::format_to(std::back_inserter(text), "    {:<42}{:>20}\n", item.what,
                       grouped(item.bytes));
}

}  // namespace

std::uint64_t ProcessMemory::bytes() const noexcept { return sum_of(items); }

std::uint64_t PipelineMemory::bytes() const noexcept {
    std::uint64_t sum = segments.bytes();
    for (const ProcessMemory& process : processes) sum += process.bytes();
    return sum;
}

Result<PipelineMemory> plan_memory(const PipelinePlan& plan, const StageWeights& weights,
                                   const MachineCores& machine, std::uint64_t free_bytes) {
    return MemoryPlanner(plan, weights, machine, free_bytes).run();
}

std::string memory_table(const PipelineMemory& memory, const AvailableMemory& available) {
    std::string text = fmt::format("{:<46}{:>20}\n", "memory, at most", "bytes");
    for (const ProcessMemory& process : memory.processes) print_process(process, text);
    print_process(memory.segments, text);
    const std::uint64_t sum = memory.bytes();
    fmt::format_to(std::back_inserter(text), "  {:<44}{:>20}\n", "all processes", grouped(sum));
    fmt::format_to(std::back_inserter(text), "  {}: {} bytes are free here ({})\n",
                   sum <= available.bytes ? "fits" : "DOES NOT FIT", grouped(available.bytes),
                   available.limited_by);
    for (const std::string& note : memory.notes)
        fmt::format_to(std::back_inserter(text), "  {}\n", note);
    return text;
}

}  // namespace k3::launcher
