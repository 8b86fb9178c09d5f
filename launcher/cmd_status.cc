// `k3pipe status` and `k3pipe down`.

#include <fmt/format.h>
#include <signal.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/base/settings.h"
#include "common/transport/channel.h"
#include "common/transport/curve_keys.h"
#include "launcher/commands.h"
#include "launcher/events.h"
#include "launcher/run_directory.h"

namespace k3::launcher {

using nlohmann::json;

namespace {

constexpr std::int64_t kAskMs = 500;

/// What the stage itself says now; nothing if it does not answer.
struct Live {
    msg::Pong pong;
    std::optional<msg::Statistics> statistics;
};

using Keys = std::shared_ptr<const transport::CurveKeys>;

/// Null if the pipeline has none, or if they cannot be read: then its stages on tcp do not answer.
Keys keys_of(const RunRecord& run) {
    if (run.keys.empty()) return nullptr;
    auto keys = transport::CurveKeys::load(run.keys);
    if (keys.has_value()) return *std::move(keys);
    EventLog(EventLog::Detail::brief).important(keys.error().sentence());
    return nullptr;
}

std::optional<Live> ask(const StageRecord& stage, const Keys& keys) {
    transport::Channel::Options options;
    options.endpoint = stage.endpoint;
    options.peer = stage.name;
    options.keys = keys;
    auto channel = transport::Channel::create(std::move(options));
    if (!channel.has_value()) return std::nullopt;
    auto pong = (*channel)->ping(Deadline::after_ms(kAskMs));
    if (!pong.has_value()) return std::nullopt;
    Live live{*std::move(pong), std::nullopt};
    if (live.pong.state != msg::State::ready ||
        !(*channel)->hello({}, Deadline::after_ms(kAskMs)).has_value())
        return live;
    auto statistics = transport::expect<msg::Statistics>(
        (*channel)->call(msg::GetStatistics{}, {}, Deadline::after_ms(kAskMs)), stage.name);
    if (statistics.has_value()) live.statistics = *std::move(statistics);
    return live;
}

std::string duration_text(std::int64_t seconds) {
    if (seconds < 120) return fmt::format("{} s", seconds);
    if (seconds < 7200) return fmt::format("{} min", seconds / 60);
    return fmt::format("{} h", seconds / 3600);
}

/// A stage whose process has ended is what its launcher makes of it, whoever answers at its
/// endpoint.
bool is_between_processes(const StageRecord& stage) {
    return stage.owned && stage.host.empty() && stage.pid <= 0;
}

/// In words for people.
std::string state_of(const StageRecord& stage) {
    if (stage.state == "backing off") return "restarting";
    return is_between_processes(stage) && stage.state == "ready" ? "stopped" : stage.state;
}

void print_stage(const StageRecord& stage, std::optional<Live> live) {
    if (is_between_processes(stage)) live.reset();
    std::string state =
        live.has_value() ? std::string(msg::to_string(live->pong.state)) : state_of(stage);
    if (!live.has_value() && state == "ready") state = "no answer";
    if (live.has_value() && live->pong.state == msg::State::loading)
        state = fmt::format("loading {} %", live->pong.progress_permille / 10);
    const std::string waiting_for = live.has_value() ? live->pong.waiting_for : "";
    if (!waiting_for.empty()) state = "waiting";
    std::string who = stage.owned ? (stage.pid > 0 ? std::to_string(stage.pid) : "-") : "attached";
    if (!stage.host.empty()) who = stage.client;
    std::string memory = "-";
    std::string queued = "-";
    if (live.has_value() && live->statistics.has_value()) {
        memory = format_bytes(live->statistics->resident_bytes);
        queued = std::to_string(live->statistics->queued);
    }
    fmt::print(
        "  {:<14} {:<12} {:>8} {:>8} {:>11} {:>6}  {}\n", stage.name, state, who, stage.restarts,
        memory, queued,
        stage.host.empty() ? stage.endpoint : fmt::format("{} on {}", stage.endpoint, stage.host));
    if (!waiting_for.empty()) fmt::print("  {:<14} waits for {}\n", "", waiting_for);
}

/// Whether the key file is not what the pipeline was started with: it answers nobody who reads it
/// now.
bool has_other_keys(const RunRecord& run, const Keys& keys) {
    return keys != nullptr && !run.keys_fingerprint.empty() &&
           keys->fingerprint() != run.keys_fingerprint;
}

std::vector<std::optional<Live>> ask_all(const RunRecord& run, const Keys& keys) {
    std::vector<std::optional<Live>> lives;
    for (const StageRecord& stage : run.stages) lives.push_back(ask(stage, keys));
    return lives;
}

/// The record once all stages were asked: one that was being restarted may have a process by now.
RunRecord record_now(const std::filesystem::path& base, const RunRecord& run) {
    auto found = find_run(base, run.name);
    const bool is_same = found.has_value() && found->has_value() &&
                         (*found)->record.run_id == run.run_id &&
                         (*found)->record.stages.size() == run.stages.size();
    return is_same ? std::move((*found)->record) : run;
}

void print_run(const std::filesystem::path& base, const RunRecord& run) {
    std::int64_t age = std::time(nullptr) - run.started_unix_s;
    fmt::print("{}: {}, pid {}, up {}, {}\n", run.name, run.state, run.pid, duration_text(age),
               run.file);
    fmt::print("  {:<14} {:<12} {:>8} {:>8} {:>11} {:>6}  {}\n", "stage", "state", "pid",
               "restarts", "memory", "queue", "endpoint");
    const Keys keys = keys_of(run);
    if (has_other_keys(run, keys))
        fmt::print(
            "  {} has been replaced since the start ({} then, {} now): stop the pipeline and "
            "start it again\n",
            run.keys, run.keys_fingerprint, keys->fingerprint());
    const auto lives = ask_all(run, keys);
    const RunRecord now = record_now(base, run);
    for (std::size_t i = 0; i < now.stages.size(); ++i) print_stage(now.stages[i], lives[i]);
}

json to_json(const std::filesystem::path& base, const RunRecord& run) {
    json stages = json::array();
    const Keys keys = keys_of(run);
    const auto lives = ask_all(run, keys);
    const RunRecord now = record_now(base, run);
    for (std::size_t i = 0; i < now.stages.size(); ++i) {
        const StageRecord& stage = now.stages[i];
        json item = {
            {"name", stage.name},         {"kind", stage.kind},   {"state", state_of(stage)},
            {"pid", stage.pid},           {"owned", stage.owned}, {"restarts", stage.restarts},
            {"endpoint", stage.endpoint}, {"host", stage.host},   {"answers", false}};
        if (const auto& live = lives[i]; live && !is_between_processes(stage)) {
            item["answers"] = true;
            item["state"] = std::string(msg::to_string(live->pong.state));
            if (!live->pong.waiting_for.empty()) {
                item["state"] = "waiting";
                item["waiting_for"] = live->pong.waiting_for;
            }
            if (live->statistics.has_value()) {
                item["resident_bytes"] = live->statistics->resident_bytes;
                item["uptime_ms"] = live->statistics->uptime_ms;
                item["queued"] = live->statistics->queued;
                json counters = json::object();
                for (const msg::Counter& counter : live->statistics->counters)
                    counters[counter.name] = counter.value;
                item["counters"] = std::move(counters);
            }
        }
        stages.push_back(std::move(item));
    }
    return {{"name", run.name},
            {"state", run.state},
            {"pid", run.pid},
            {"run_id", run.run_id},
            {"file", run.file},
            {"started_unix_s", run.started_unix_s},
            {"gateway", run.gateway},
            {"keys_replaced", has_other_keys(run, keys)},
            {"stages", std::move(stages)}};
}

}  // namespace

int status(const StatusCommand& command) {
    std::filesystem::path base = run_base(command.run_dir);
    std::vector<FoundRun> runs;
    if (command.name.empty()) {
        runs = list_runs(base);
    } else {
        auto found = find_run(base, command.name);
        if (!found.has_value()) return report(found.error());
        if (found->has_value()) runs.push_back(**std::move(found));
    }
    if (runs.empty()) {
        if (command.json && command.name.empty()) {
            fmt::print("[]\n");
            return kExitOk;
        }
        auto running = find_running(command.run_dir, command.name, "k3pipe status NAME");
        return running.has_value() ? kExitOk : report(running.error());
    }
    json list = json::array();
    bool ready = true;
    for (const FoundRun& run : runs) {
        ready = ready && run.record.state == "ready";
        if (command.json)
            list.push_back(to_json(base, run.record));
        else
            print_run(base, run.record);
    }
    if (command.json) fmt::print("{}\n", list.dump(2, ' ', false, json::error_handler_t::replace));
    return ready ? kExitOk : kExitUnavailable;
}

int down(const DownCommand& command) {
    EventLog events(EventLog::Detail::normal);
    std::filesystem::path base = run_base(command.run_dir);
    auto running = find_running(command.run_dir, command.name, "k3pipe down NAME");
    if (!running.has_value()) return report(running.error());
    auto pid = static_cast<pid_t>(running->pid);
    if (::kill(pid, SIGTERM) != 0 && errno != ESRCH)
        return report(Error{ErrorCode::io,
                            fmt::format("cannot signal pid {}: {}", pid, std::strerror(errno)),
                            "stop it as the user who started it"});
    // A launcher needs at most four seconds; one that was stopped itself (SIGSTOP) is killed, and
    // its janitor does the rest.
    if (!wait_until_gone(base, running->name, 6000)) {
        events.important(fmt::format("pid {} does not stop and is killed", pid));
        ::kill(pid, SIGKILL);
        if (!wait_until_gone(base, running->name, 6000))
            return report(Error{ErrorCode::deadline_exceeded,
                                fmt::format("pipeline '{}' is still there 12 s after it was asked "
                                            "to stop",
                                            running->name),
                                "look at its processes with k3pipe status"});
    }
    events.normal(fmt::format("pipeline '{}' (pid {}) has stopped", running->name, pid));
    return kExitOk;
}

}  // namespace k3::launcher
