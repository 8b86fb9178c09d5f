#include "launcher/slurm_remote.h"

#include <fmt/format.h>

#include <chrono>
#include <thread>
#include <utility>

#include "common/base/deadline.h"
#include "launcher/run_program.h"
#include "launcher/slurm_allocation.h"

namespace k3::launcher {

namespace {

constexpr std::int64_t kShowJobMs = 3000;
constexpr std::int64_t kSettleMs = 1500;  // for a job that ends to say how
constexpr std::int64_t kSettlePollMs = 100;

class SlurmRemote final : public Remote {
  public:
    SlurmRemote(std::string srun, std::string scontrol, std::string job)
        : srun_(std::move(srun)), scontrol_(std::move(scontrol)), job_(std::move(job)) {}

    std::vector<std::string> command(const std::string& host,
                                     std::string_view script) const override {
        // Without --exact a step has every core and all memory of the job on its node, and
        // --overlap lets the next one have them too. A batch job may have said to pass on nothing.
        std::vector<std::string> words = {srun_,           "--jobid=" + job_,   "--nodes=1",
                                          "--ntasks=1",    "--nodelist=" + host, "--overlap",
                                          "--mem=0",       "--cpu-bind=none",    "--mpi=none",
                                          "--export=ALL",  "--chdir=/",          "--quiet",
                                          "--job-name=k3pipe", "sh", "-c"};
        words.push_back(
            "test -d \"$XDG_RUNTIME_DIR\" && test -w \"$XDG_RUNTIME_DIR\" || unset "
            "XDG_RUNTIME_DIR\n" +
            std::string(script));
        return words;
    }

    std::optional<Error> fault(const std::string& host, const ProgramRun& run) const override {
        // Of a script that has run and failed srun says so.
        if (run.ending.exit_code() == 0 ||
            run.output.find(fmt::format("{}: task 0: ", host)) != std::string::npos)
            return std::nullopt;
        return Error{ErrorCode::unavailable,
                     fmt::format("Slurm job {} cannot run anything on {}: {}", job_, host,
                                 slurm_complaint(run.output)),
                     fmt::format("`{}` must work", by_hand(host))};
    }

    bool is_own_line(std::string_view line) const override {
        return line.starts_with("srun: ") || line.starts_with("slurmstepd");
    }

    std::string by_hand(const std::string& host) const override {
        return fmt::format("srun --jobid={} --overlap --nodes=1 --ntasks=1 --nodelist={} hostname",
                           job_, host);
    }

    std::optional<Error> lost() override {
        const Deadline settled = Deadline::after_ms(kSettleMs);
        for (;;) {
            auto shown = run_program({scontrol_, "show", "job", "--oneliner", job_},
                                     Deadline::after_ms(kShowJobMs));
            if (!shown.has_value() || shown->timed_out) return std::nullopt;
            if (shown->ending.exit_code() != 0) {
                if (shown->output.find("Invalid job id") == std::string::npos) return std::nullopt;
                return end_of_job(job_, "");
            }
            std::optional<Error> over = end_of_job(job_, shown->output);
            const bool is_ending = field_of(shown->output, "JobState") == "COMPLETING" &&
                                   field_of(shown->output, "Reason") == "None";
            if (!over.has_value() || !is_ending || settled.expired()) return over;
            std::this_thread::sleep_for(std::chrono::milliseconds(kSettlePollMs));
        }
    }

  private:
    std::string srun_;
    std::string scontrol_;
    std::string job_;
};

}  // namespace

std::unique_ptr<Remote> make_slurm_remote(std::string srun, std::string scontrol, std::string job) {
    return std::make_unique<SlurmRemote>(std::move(srun), std::move(scontrol), std::move(job));
}

}  // namespace k3::launcher
