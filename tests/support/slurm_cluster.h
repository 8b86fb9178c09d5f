#pragma once
// A Slurm cluster of boxes on this machine, for tests of pipelines that run in its jobs.
//
// munged and slurmctld run beside the test program, in its network, and a slurmd in each box; all
// of them are Debian's, with settings, key and state of the test's own, and die with the test
// program. Nothing needs cgroups: steps are tracked by their processes' parents
// (proctrack/linuxproc), and cores and memory are given out but not enforced.
//
//   TEST_CASE("..." * doctest::skip(!slurm_can_be_run())) {
//       World world;
//       Boxes boxes(world.path(), 3);
//       SlurmCluster slurm(world, boxes, 3);     // "box0", "box1", "box2"; must end before the others
//       Pipeline pipeline(world, "demo", demo_model_dir(), "", "insecure = true\n", {"--slurm"});
//
// While it lives SLURM_CONF is set in the environment.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "tests/support/boxes.h"
#include "tests/support/pipeline.h"

namespace k3::test {

/// Whether boxes_can_be_made() and Slurm's daemons and programs are installed. Says "NOT RUN: why"
/// once if not.
bool slurm_can_be_run();

class SlurmCluster {
  public:
    /// Makes nodes of the first `n` boxes, with four cores and 4000 MB each in Slurm's eyes, in the
    /// partition "main", and waits until all are idle. Jobs for "closed" wait for ever.
    SlurmCluster(const World& world, const Boxes& boxes, std::size_t n);
    ~SlurmCluster();
    SlurmCluster(const SlurmCluster&) = delete;
    SlurmCluster& operator=(const SlurmCluster&) = delete;

    /// What a shell command, such as one of Slurm's programs, prints here.
    static std::string run(const std::string& shell_command);
    /// The number of the only job; empty if there is none.
    static std::string job();
    /// Waits until there is no job, also none that is ending.
    static bool has_no_job(std::int64_t ms);

  private:
    void start_daemon(const World& world, const std::string& command);
    bool wait_until(const std::string& shell_condition) const;
    std::filesystem::path directory_;
    std::vector<Program> daemons_;
};

}  // namespace k3::test
