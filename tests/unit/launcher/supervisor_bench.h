#pragma once
// A supervisor with real processes that are small: fake_service lives as its flags say.

#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/base/deadline.h"
#include "launcher/starter.h"
#include "launcher/supervisor.h"
#include "tests/support/checkpoint_copy.h"

namespace k3::test {

/// A pipeline of fake services in a directory of its own, with its loop on a thread.
class SupervisorBench {
  public:
    SupervisorBench();
    /// Stops what still runs.
    ~SupervisorBench();
    SupervisorBench(const SupervisorBench&) = delete;
    SupervisorBench& operator=(const SupervisorBench&) = delete;

    std::string endpoint(const std::string& name) const;
    std::filesystem::path file(const std::string& name) const { return temp_.path() / name; }
    /// "<service>-<pid>", of this pipeline alone: other pipelines may run beside.
    std::set<std::string> segments() const;

    launcher::StagePlan& add(msg::ServiceKind kind, const std::string& name,
                             const std::vector<std::string>& behaviour = {});
    /// A trunk with these behaviours, and the gateway that every pipeline ends with.
    launcher::StagePlan& add_pair(const std::vector<std::string>& behaviour = {});

    void start();
    launcher::Supervisor& supervisor() { return *supervisor_; }
    /// Waits for the end of the loop.
    launcher::Outcome finish();

    /// As last published.
    launcher::StageRecord stage(const std::string& name);
    std::string state();

    template <typename Condition>
    bool wait_for(Condition condition, std::int64_t ms = 10000) {
        Deadline deadline = Deadline::after_ms(ms);
        while (!condition()) {
            if (deadline.expired()) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        return true;
    }

    launcher::SupervisorOptions options;

  private:
    TempDir temp_;
    launcher::EventLog events_{launcher::EventLog::Detail::brief};
    std::unique_ptr<launcher::ProcessStarter> starter_;
    launcher::PipelinePlan plan_;
    std::unique_ptr<launcher::Supervisor> supervisor_;
    std::thread thread_;
    launcher::Outcome outcome_;
    std::mutex mutex_;
    std::string state_;
    std::vector<launcher::StageRecord> stages_;
};

}  // namespace k3::test
