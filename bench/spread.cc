// spread: how much faster the experts of a step are done on several servers, each with a disk of
// its own, beside what common/experts/simulation predicts.
//
//     build/bench/spread --model /var/tmp/k3-synthetic
//
// Starts 1, 2 and 4 expert servers of the build tree on a checkpoint (of `k3pipe synth`, for
// instance), makes the calls of a trunk to them and measures what a trunk would wait for. Hints are
// left out: without a trunk's own work between them and the calls they would gain nothing. A disk
// of its own is a limit on what each server reads: a blkio cgroup where the kernel can (as root),
// or the server's own --read-limit. Memories hold only what passes through, so every expert is
// read. The routing is a recorded one, folded onto the layers and experts of the checkpoint. The
// sums that come back are compared: they must be the same bytes everywhere.

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "bench/disk_limit.h"
#include "bench/machine.h"
#include "bench/settings_main.h"
#include "common/base/fd.h"
#include "common/base/settings.h"
#include "common/experts/placement_plan.h"
#include "common/experts/simulation.h"
#include "common/model/load.h"
#include "common/model/memory_plan.h"
#include "common/model/placement_file.h"
#include "common/model/tensor_names.h"
#include "common/transport/channel.h"
#include "services/trunk/expert_client.h"

extern char** environ;

namespace {

namespace fs = std::filesystem;
using namespace k3;
using experts::RoutingTrace;

constexpr std::uint64_t kSlots = 8;  // of a server: none is kept, all are for passing experts
constexpr std::int64_t kAskMs = 30'000;

struct SpreadBench {
    std::string model;
    std::string trace = "tests/golden/routing-trace/decode_order.csv";
    std::uint64_t read_limit = 100'000'000;
    std::string disks = "auto";
    std::int64_t tokens = 2;  // one after the other
};

Result<Settings::Action> read_settings(int argc, const char* const* argv, SpreadBench& out) {
    Settings settings("spread", "Expert servers with a disk each: measured and predicted.");
    settings.add_text("model", &out.model, "directory of the checkpoint", true);
    settings.add_text("trace", &out.trace, "CSV file: position, layer, experts in order of rank");
    settings.add_bytes("read_limit", &out.read_limit, "bytes per second of each server's disk");
    settings.add_choice("disks", &out.disks, {"auto", "kernel", "server"},
                        "who slows them down: a blkio cgroup of each server, or its read_limit; "
                        "auto: the kernel where it can");
    settings.add_integer("tokens", &out.tokens, 1, 100, "steps of one row; one step of 16 follows");
    return settings.parse(argc, argv);
}

/// The trace's routing for a model with fewer layers and experts: `n_rows` rows, each with the
/// picks of some position in consecutive layers.
RoutingTrace folded(const RoutingTrace& trace, std::uint32_t n_rows,
                    const model::ModelConfig& config) {
    const std::uint32_t n_layers = config.n_layers - config.first_k_dense;
    const auto n_visits = static_cast<std::uint32_t>(trace.visits.size());
    RoutingTrace out;
    for (std::uint32_t row = 0; row < n_rows; ++row)
        for (std::uint32_t layer = 0; layer < n_layers; ++layer) {
            const auto& from = trace.visits[(row * n_layers + layer) % n_visits];
            RoutingTrace::Visit visit{row, config.first_k_dense + layer, {}};
            std::vector<bool> taken(config.moe.n_experts);
            for (std::uint32_t rank = 0; rank < config.moe.top_k; ++rank) {
                std::uint32_t expert = from.uses[rank % from.uses.size()].expert;
                do expert = (expert + 1) % config.moe.n_experts;
                while (taken[expert]);
                taken[expert] = true;
                visit.uses.push_back({expert, rank});
            }
            out.visits.push_back(std::move(visit));
        }
    return out;
}

/// A directory that is gone at the end, with everything in it.
class ScratchFolder {
  public:
    ScratchFolder() : path_(fs::temp_directory_path() / fmt::format("k3-spread-{}", ::getpid())) {
        fs::create_directory(path_);
    }
    ~ScratchFolder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    ScratchFolder(const ScratchFolder&) = delete;
    ScratchFolder& operator=(const ScratchFolder&) = delete;
    const fs::path& path() const { return path_; }

  private:
    fs::path path_;
};

/// An expert server, ended by the destructor.
class ServerProcess {
  public:
    explicit ServerProcess(std::vector<std::string> words) {
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        if (posix_spawn(&pid_, argv[0], nullptr, nullptr, argv.data(), environ) != 0) pid_ = -1;
    }
    ~ServerProcess() {
        if (pid_ < 0) return;
        ::kill(pid_, SIGTERM);
        ::waitpid(pid_, nullptr, 0);
    }
    ServerProcess(ServerProcess&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
    ServerProcess& operator=(ServerProcess&&) = delete;
    bool is_running() const { return pid_ > 0; }
    pid_t pid() const { return pid_; }

  private:
    pid_t pid_ = -1;
};

/// The servers of one line of the table, and the trunk's side of them.
class Boxes {
  public:
    static Result<std::unique_ptr<Boxes>> start(const SpreadBench& settings,
                                                const model::Model& model,
                                                const std::vector<model::Placement>& placed) {
        std::unique_ptr<Boxes> boxes(new Boxes(model));
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0 || ::fcntl(ends[0], F_SETFD, 0) != 0)
            return Error{ErrorCode::io, "cannot make a pipe", "check the limit on open files"};
        boxes->lifeline_ = {Fd(ends[0]), Fd(ends[1])};
        model::PlacementFile file{model.fingerprint, {}};
        for (std::size_t s = 0; s < placed.size(); ++s)
            file.servers.push_back({fmt::format("experts-{}", s), 1, placed[s]});
        const fs::path placement = boxes->folder_.path() / "placement";
        std::ofstream(placement) << model::format_placement(file);
        const std::uint64_t slot = model::expert_slot_bytes(model::expert_bytes(model.config));
        const fs::path program = fs::read_symlink("/proc/self/exe").parent_path().parent_path() /
                                 "services/experts/k3-experts";
        trunk::ExpertClient::Options client;
        for (const model::ServerPlacement& server : file.servers) {
            const std::string endpoint =
                "ipc://" + (boxes->folder_.path() / (server.name + ".sock")).string();
            client.endpoints.push_back(endpoint);
            RETURN_IF_ERROR(boxes->start_server(
                settings, {program.string(), "--listen", endpoint, "--name", server.name, "--model",
                           settings.model, "--share", model::share_in_file(placement, server.name),
                           "--cache-bytes", std::to_string(kSlots * slot), "--threads", "1",
                           "--log-level", "warn"}));
        }
        const model::ModelConfig& config = model.config;
        client.needs = {"spread",
                        model.fingerprint,
                        config.first_k_dense,
                        config.n_layers - config.first_k_dense,
                        config.moe.n_experts,
                        config.moe.latent_size};
        client.run_id = static_cast<std::uint64_t>(::getpid());
        client.top_k = config.moe.top_k;
        client.max_rows = 16;
        boxes->endpoints_ = client.endpoints;
        ASSIGN_OR_RETURN(boxes->client_,
                         trunk::ExpertClient::create(std::move(client), boxes->counters_));
        RETURN_IF_ERROR(boxes->client_->connect());
        return boxes;
    }

    /// Seconds of the experts of a step whose rows are those of `routing`; `digest` takes in the
    /// sums.
    Result<double> step(const RoutingTrace& routing, std::uint32_t first_row, std::size_t n_rows,
                        std::uint64_t& digest) {
        const model::MoeConfig& moe = model_.config.moe;
        std::vector<float> latent(n_rows * moe.latent_size);
        for (std::size_t i = 0; i < latent.size(); ++i)
            latent[i] = static_cast<float>(i % 13) / 16 - 0.25F;
        const std::vector<float> weights(n_rows * moe.top_k, 1.0F / static_cast<float>(moe.top_k));
        std::vector<std::int64_t> sums(latent.size());
        double seconds = 0;
        for (std::uint32_t layer = model_.config.first_k_dense; layer < model_.config.n_layers;
             ++layer) {
            std::vector<std::uint32_t> ids;
            for (const RoutingTrace::Visit& visit : routing.visits)
                if (visit.layer == layer && visit.position >= first_row &&
                    visit.position < first_row + n_rows)
                    for (const experts::ExpertUse& use : visit.uses) ids.push_back(use.expert);
            const trunk::Routing call{layer, n_rows, moe.top_k, ids.data(), weights.data()};
            const double start = bench::now();
            RETURN_IF_ERROR(client_->start(call, latent));
            RETURN_IF_ERROR(client_->finish(sums));
            seconds += bench::now() - start;
            for (std::int64_t sum : sums)
                digest = (digest ^ static_cast<std::uint64_t>(sum)) * 0x100000001B3U;
        }
        return seconds;
    }

    /// Bytes of experts that each server has read so far.
    Result<std::vector<std::uint64_t>> read_bytes() const {
        std::vector<std::uint64_t> bytes;
        for (const std::string& endpoint : endpoints_) {
            ASSIGN_OR_RETURN(auto channel,
                             transport::Channel::create({.endpoint = endpoint, .peer = "experts"}));
            RETURN_IF_ERROR(channel->hello({}, Deadline::after_ms(kAskMs)));
            ASSIGN_OR_RETURN(const auto statistics, transport::expect<msg::Statistics>(
                                                        channel->call(msg::GetStatistics{}, {},
                                                                      Deadline::after_ms(kAskMs)),
                                                        "experts"));
            for (const msg::Counter& counter : statistics.counters)
                if (counter.name == "expert_read_bytes") bytes.push_back(counter.value);
        }
        return bytes;
    }

  private:
    explicit Boxes(const model::Model& model) : model_(model) {}

    Status start_server(const SpreadBench& settings, std::vector<std::string> words) {
        if (settings.disks == "server") {
            words.insert(words.end(), {"--read-limit", std::to_string(settings.read_limit)});
        } else {
            ASSIGN_OR_RETURN(auto limit,
                             bench::DiskLimit::create(settings.model, settings.read_limit,
                                                      std::to_string(servers_.size())));
            limits_.push_back(std::move(limit));
        }
        // Ends it when this program ends, however that may be.
        words.insert(words.end(), {"--lifeline-fd", std::to_string(lifeline_[0].get())});
        const std::string program = words.front();
        servers_.emplace_back(std::move(words));
        if (!servers_.back().is_running())
            return Error{ErrorCode::not_found, program + " cannot be started",
                         "build it: ./dev bench spread does"};
        return limits_.empty() ? Status::ok() : limits_.back()->add(servers_.back().pid());
    }

    const model::Model& model_;
    ScratchFolder folder_;
    std::array<Fd, 2> lifeline_;                             // servers inherit the first
    std::vector<std::unique_ptr<bench::DiskLimit>> limits_;  // outlive their processes
    std::vector<ServerProcess> servers_;
    std::vector<std::string> endpoints_;
    telemetry::Counters counters_;
    std::unique_ptr<trunk::ExpertClient> client_;
};

struct Line {
    std::size_t n_servers;
    std::uint32_t replicas;
};

/// What the first line measured: others are told as parts of it, and compared with its sums.
struct Alone {
    double seconds = 0;
    std::uint64_t digest = 0;
};

Status measure(const SpreadBench& settings, const model::Model& model, const RoutingTrace& trace,
               const Line& line, std::uint32_t n_rows, double memory_rate, Alone& alone) {
    experts::PlacementRequest request;
    request.weights.assign(line.n_servers, 1);
    request.replicas = line.replicas;
    ASSIGN_OR_RETURN(const std::vector<model::Placement> placed,
                     experts::place_experts(request, model.config));
    const std::uint32_t n_steps = n_rows == 1 ? static_cast<std::uint32_t>(settings.tokens) : 1;
    const RoutingTrace routing = folded(trace, n_rows * n_steps, model.config);

    experts::SimulationOptions options;
    options.rows_per_step = n_rows;
    for (const model::Placement& held : placed)
        options.boxes.push_back({.held = held,
                                 .disk_rate = static_cast<double>(settings.read_limit),
                                 .memory_rate = memory_rate});
    ASSIGN_OR_RETURN(const experts::Simulation predicted,
                     experts::simulate(options, routing, model.config));

    ASSIGN_OR_RETURN(const std::unique_ptr<Boxes> boxes, Boxes::start(settings, model, placed));
    double seconds = 0;
    std::uint64_t digest = 0;
    for (std::uint32_t step = 0; step < n_steps; ++step) {
        ASSIGN_OR_RETURN(const double taken, boxes->step(routing, step * n_rows, n_rows, digest));
        seconds += taken;
    }
    ASSIGN_OR_RETURN(const std::vector<std::uint64_t> read, boxes->read_bytes());
    if (alone.seconds == 0) alone = {seconds, digest};
    if (digest != alone.digest)
        return Error{ErrorCode::internal, "the sums differ from those of one server",
                     "this is a bug: no placement may change a bit"};
    std::string megabytes;
    for (const std::uint64_t bytes : read)
        megabytes += fmt::format("{}{:.0f}", megabytes.empty() ? "" : " ",
                                 static_cast<double>(bytes) / 1e6 / n_steps);
    fmt::print("{},{},{},{:.3f},{:.3f},{:.1f},{:.2f},{:.3f},{}\n", n_rows, line.n_servers,
               line.replicas, seconds / n_steps, predicted.expert_s / n_steps,
               100 * (predicted.expert_s / seconds - 1), alone.seconds / seconds,
               predicted.imbalance, megabytes);
    std::fflush(stdout);
    return Status::ok();
}

Status run(SpreadBench settings) {
    ASSIGN_OR_RETURN(const model::Model model, model::open_model(settings.model));
    if (settings.disks == "auto")
        settings.disks =
            bench::DiskLimit::create(settings.model, settings.read_limit, "try").has_value()
                ? "kernel"
                : "server";
    ASSIGN_OR_RETURN(const RoutingTrace trace, experts::read_trace(settings.trace));
    if (trace.visits.empty())
        return Error{ErrorCode::invalid_argument, settings.trace + " holds no visit", ""};
    const double memory_rate = bench::read_bandwidth(1);
    fmt::print(
        "# machine: {}; {} layers of {} experts; each server reads {:.0f} MB/s "
        "(limited by the {}), a thread computes from memory at {:.1f} GB/s\n",
        bench::cpu_model(), model.config.n_layers - model.config.first_k_dense,
        model.config.moe.n_experts, static_cast<double>(settings.read_limit) / 1e6, settings.disks,
        memory_rate / 1e9);
    fmt::print(
        "rows,servers,replicas,seconds,predicted,error_percent,faster,imbalance,"
        "mb_read_of_each\n");
    for (const std::uint32_t n_rows : {1U, 16U}) {
        Alone alone;
        for (const Line& line : {Line{1, 1}, Line{2, 1}, Line{2, 2}, Line{4, 1}, Line{4, 2}})
            RETURN_IF_ERROR(measure(settings, model, trace, line, n_rows, memory_rate, alone));
    }
    return Status::ok();
}

}  // namespace

int main(int argc, char** argv) {
    return bench::settings_main<SpreadBench>(argc, argv, read_settings, run);
}
