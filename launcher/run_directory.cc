#include "launcher/run_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "common/base/deadline.h"

namespace k3::launcher {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr std::int64_t kCleanupWaitMs = 6000;  // the janitor needs at most about three seconds
constexpr auto kPoll = std::chrono::milliseconds(20);

Error cannot(std::string_view verb, const fs::path& path, int code) {
    return Error{ErrorCode::io,
                 fmt::format("cannot {} {}: {}", verb, path.string(), std::strerror(code)),
                 "set XDG_RUNTIME_DIR or run_dir to a folder of yours"};
}

/// A private folder of ours: created, or found with the right owner. Refuses what another user may
/// have put there (the default base lies in /tmp).
Status make_private(const fs::path& path) {
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
        return cannot("create run directory", path, errno);
    struct stat info = {};
    if (::lstat(path.c_str(), &info) != 0) return cannot("examine run directory", path, errno);
    if (!S_ISDIR(info.st_mode)) return cannot("use run directory", path, ENOTDIR);
    if (info.st_uid != ::geteuid())
        return Error{ErrorCode::io,
                     fmt::format("run directory {} belongs to user {}", path.string(), info.st_uid),
                     "set XDG_RUNTIME_DIR or run_dir to a folder of yours"};
    if ((info.st_mode & 077) != 0 && ::chmod(path.c_str(), 0700) != 0)
        return cannot("make private run directory", path, errno);
    return Status::ok();
}

enum class Lock { taken, held, vanished };

/// Tries to lock `path`/lock. `vanished`: its owner removed it meanwhile, so look again.
Result<Lock> try_lock(const fs::path& path, bool create, Fd* out) {
    fs::path file = path / "lock";
    Fd fd(::open(file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT : 0), 0600));
    if (!fd.valid()) {
        if (errno == ENOENT) return Lock::vanished;
        return cannot("open", file, errno);
    }
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) return Lock::held;
        return cannot("lock", file, errno);
    }
    struct stat ours = {};
    struct stat named = {};
    if (::fstat(fd.get(), &ours) != 0 || ::stat(file.c_str(), &named) != 0 ||
        ours.st_ino != named.st_ino || ours.st_dev != named.st_dev)
        return Lock::vanished;
    *out = std::move(fd);
    return Lock::taken;
}

/// Only looks. A directory without a lock file counts as not held.
bool is_held(const fs::path& path) {
    Fd fd(::open((path / "lock").c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    return fd.valid() && ::flock(fd.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

json to_json(const RunRecord& record) {
    json stages = json::array();
    for (const StageRecord& stage : record.stages)
        stages.push_back({{"kind", stage.kind},
                          {"name", stage.name},
                          {"endpoint", stage.endpoint},
                          {"host", stage.host},
                          {"client", stage.client},
                          {"state", stage.state},
                          {"detail", stage.detail},
                          {"owned", stage.owned},
                          {"pid", stage.pid},
                          {"restarts", stage.restarts}});
    return {{"format", 1},
            {"name", record.name},
            {"pid", record.pid},
            {"run_id", record.run_id},
            {"file", record.file},
            {"state", record.state},
            {"started_unix_s", record.started_unix_s},
            {"gateway", record.gateway},
            {"keys", record.keys},
            {"keys_fingerprint", record.keys_fingerprint},
            {"stages", std::move(stages)}};
}

Result<RunRecord> read_record(const fs::path& file) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) return cannot("read", file, errno);
    try {
        json root = json::parse(stream);
        RunRecord record;
        record.name = root.at("name");
        record.pid = root.at("pid");
        record.run_id = root.at("run_id");
        record.file = root.at("file");
        record.state = root.at("state");
        record.started_unix_s = root.at("started_unix_s");
        record.gateway = root.at("gateway");
        record.keys = root.at("keys");
        record.keys_fingerprint = root.value("keys_fingerprint", "");  // of an older launcher: none
        for (const json& item : root.at("stages")) {
            StageRecord stage;
            stage.kind = item.at("kind");
            stage.name = item.at("name");
            stage.endpoint = item.at("endpoint");
            stage.host = item.at("host");
            stage.client = item.at("client");
            stage.state = item.at("state");
            stage.detail = item.at("detail");
            stage.owned = item.at("owned");
            stage.pid = item.at("pid");
            stage.restarts = item.at("restarts");
            record.stages.push_back(std::move(stage));
        }
        return record;
    } catch (const json::exception& e) {
        return Error{ErrorCode::io, fmt::format("{} is damaged: {}", file.string(), e.what()),
                     "stop the launcher that wrote it and start again"};
    }
}

Error already_runs(const fs::path& path, const std::string& name) {
    auto record = read_record(path / "state.json");
    std::string who = record.has_value() ? fmt::format("pid {}", record->pid) : "another launcher";
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("pipeline '{}' already runs ({}, in {})", name, who, path.string()),
                 fmt::format("stop it with `k3pipe down {0}`, use it with `k3pipe run --attach "
                             "{0}`, or start under another name with --name",
                             name)};
}

/// A launcher that was killed leaves the lock to its janitor for a moment, and one that starts or
/// ends has no state file for a moment: both are worth waiting for.
bool may_be_free_soon(const fs::path& path) {
    auto record = read_record(path / "state.json");
    if (!record.has_value()) return true;
    return record->pid > 0 && ::kill(static_cast<pid_t>(record->pid), 0) != 0 && errno == ESRCH;
}

void remove_contents(const fs::path& path, bool with_lock) noexcept {
    std::error_code code;
    std::vector<fs::path> files;
    for (fs::directory_iterator it(path, code), end; !code && it != end; it.increment(code))
        if (it->path().filename() != "lock") files.push_back(it->path());
    for (const fs::path& file : files) fs::remove(file, code);
    if (with_lock) fs::remove(path / "lock", code);
}

}  // namespace

fs::path run_base(const fs::path& given) {
    if (!given.empty()) return given;
    const char* runtime = std::getenv("XDG_RUNTIME_DIR");
    fs::path root = runtime != nullptr && *runtime != 0 ? runtime : "/tmp";
    return root / fmt::format("k3pipe-{}", ::geteuid());
}

Result<std::unique_ptr<RunDirectory>> RunDirectory::acquire(const fs::path& base,
                                                            const std::string& name) {
    fs::path path = base / name;
    Deadline deadline = Deadline::after_ms(kCleanupWaitMs);
    for (;;) {
        RETURN_IF_ERROR(make_private(base));
        Status made = make_private(path);
        Fd lock;
        if (made.has_value()) {
            ASSIGN_OR_RETURN(Lock outcome, try_lock(path, true, &lock));
            if (outcome == Lock::taken) {
                remove_contents(path, false);  // of a dead run
                return std::unique_ptr<RunDirectory>(
                    new RunDirectory(std::move(path), std::move(lock)));
            }
            if (outcome == Lock::held && (!may_be_free_soon(path) || deadline.expired()))
                return already_runs(path, name);
        } else if (deadline.expired() || fs::exists(base)) {
            return std::move(made).error();  // else: the base vanished between the two calls
        }
        if (deadline.expired()) return already_runs(path, name);
        std::this_thread::sleep_for(kPoll);
    }
}

RunDirectory::~RunDirectory() { remove_run_directory(path_); }

Status RunDirectory::write(const RunRecord& record) const {
    fs::path file = path_ / "state.json";
    fs::path fresh = path_ / "state.json.new";
    std::string text = to_json(record).dump(1, ' ', false, json::error_handler_t::replace) + "\n";
    Fd fd(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!fd.valid()) return cannot("write", fresh, errno);
    if (::write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
        return cannot("write", fresh, errno);
    if (::rename(fresh.c_str(), file.c_str()) != 0) return cannot("replace", file, errno);
    return Status::ok();
}

std::vector<FoundRun> list_runs(const fs::path& base) {
    std::vector<FoundRun> runs;
    std::error_code code;
    for (fs::directory_iterator it(base, code), end; !code && it != end; it.increment(code)) {
        auto found = find_run(base, it->path().filename().string());
        if (found.has_value() && found->has_value()) runs.push_back(std::move(**found));
    }
    std::sort(runs.begin(), runs.end(),
              [](const FoundRun& a, const FoundRun& b) { return a.record.name < b.record.name; });
    return runs;
}

Result<std::optional<FoundRun>> find_run(const fs::path& base, const std::string& name) {
    fs::path path = base / name;
    if (!is_held(path)) return std::optional<FoundRun>();
    auto record = read_record(path / "state.json");
    if (!record.has_value()) {
        // The launcher has the lock and not yet written, or just removed its file.
        if (!fs::exists(path / "state.json")) return std::optional<FoundRun>();
        return std::move(record).error();
    }
    return std::optional<FoundRun>(FoundRun{*std::move(record), true});
}

bool wait_until_gone(const fs::path& base, const std::string& name, std::int64_t timeout_ms) {
    Deadline deadline = Deadline::after_ms(timeout_ms);
    while (is_held(base / name)) {
        if (deadline.expired()) return false;
        std::this_thread::sleep_for(kPoll);
    }
    return true;
}

std::vector<std::string> sweep_dead_runs(const fs::path& base) {
    std::vector<std::string> swept;
    std::error_code code;
    std::vector<fs::path> paths;
    for (fs::directory_iterator it(base, code), end; !code && it != end; it.increment(code))
        if (it->is_directory(code)) paths.push_back(it->path());
    for (const fs::path& path : paths) {
        Fd lock;
        // Without a lock file it is being made right now, or is not a run directory.
        auto outcome = try_lock(path, false, &lock);
        if (!outcome.has_value() || *outcome != Lock::taken) continue;
        remove_contents(path, true);
        if (::rmdir(path.c_str()) == 0) swept.push_back(path.filename().string());
    }
    return swept;
}

void remove_run_directory(const fs::path& path) noexcept {
    remove_contents(path, true);
    ::rmdir(path.c_str());
    // The base is ours if it has the default name; with other runs in it this fails, as it should.
    fs::path base = path.parent_path();
    if (base.filename().string().starts_with("k3pipe-")) ::rmdir(base.c_str());
}

}  // namespace k3::launcher
