#pragma once
// Real pipelines for tests: k3pipe of the build tree, run in a world of its own.
//
// A World is a temporary XDG_RUNTIME_DIR. Whatever k3pipe starts there becomes a child of the test
// program when its parent dies (the program is a subreaper), so that nothing can hide: at the end
// of a World no child, no file below it and no shared-memory segment of a dead process may be left.

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/base/deadline.h"
#include "common/base/fd.h"
#include "common/transport/messages/gateway.h"
#include "launcher/run_directory.h"
#include "tests/support/checkpoint_copy.h"

namespace k3::test {

/// A program of the build tree: "launcher/k3pipe", "services/trunk/k3-trunk".
std::filesystem::path built(const std::string& path);

/// True if `text` holds `part`.
bool has(const std::string& text, const std::string& part);

/// How a program ended and what it said.
struct Ended {
    int code = -1;  // exit code; 128 + signal if it was killed
    std::string out;
    std::string err;
    double seconds = 0;
    /// The one line of stderr that is the failure: "k3pipe: ...", the last of them.
    std::string sentence() const;
};

/// A running program; killed by the destructor if it still runs.
class Program {
  public:
    Program(const std::vector<std::string>& argv, const std::map<std::string, std::string>& env);
    ~Program();
    Program(Program&& other) noexcept;
    Program& operator=(Program&&) = delete;

    pid_t pid() const noexcept { return pid_; }
    void signal(int number) const;
    /// True once stderr (or stdout) holds `text`; false at the deadline or its end.
    bool says(const std::string& text, std::int64_t ms = 30000);
    bool prints(const std::string& text, std::int64_t ms = 30000);
    const std::string& out() const noexcept { return out_; }
    const std::string& err() const noexcept { return err_; }
    /// Waits for the end; kills it (and fails the test) after `ms`.
    Ended wait(std::int64_t ms = 60000);

  private:
    bool read_some(std::int64_t ms);
    bool wait_text(const std::string& stream, const std::string& text, std::int64_t ms);
    pid_t pid_ = -1;
    Fd out_fd_;
    Fd err_fd_;
    std::string out_;
    std::string err_;
    Clock::time_point started_ = Clock::now();
};

class World {
  public:
    World();
    /// Checks that nothing is left; see above.
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    const std::filesystem::path& path() const noexcept { return dir_.path(); }
    std::filesystem::path base() const;  // of the run directories
    std::filesystem::path write(const std::string& name, const std::string& text) const;

    /// k3pipe with these arguments, started, or run to its end.
    Program start(std::vector<std::string> arguments) const;
    Ended k3pipe(std::vector<std::string> arguments, std::int64_t ms = 60000) const;
    /// Any program, with the same environment.
    Program start_program(const std::vector<std::string>& argv) const;

    /// The state file of a running pipeline, as soon as it is there.
    std::optional<launcher::RunRecord> record(const std::string& name) const;

  private:
    TempDir dir_;
};

/// What a request brought.
struct Answer {
    std::optional<Error> error;
    std::vector<std::uint32_t> prompt_ids;
    std::vector<std::uint32_t> ids;
    std::string text;
    std::string logits;  // bytes, as want_logits asked
    std::optional<msg::SessionLoaded> loaded;
    std::optional<msg::SessionSaved> saved;
    msg::Finished finished;
    double seconds = 0;
};

/// `k3pipe up`, ready. The destructor stops it with SIGINT and checks that it ends well.
class Pipeline {
  public:
    /// `stages`: the tables after [pipeline]; `extra`: further keys of [pipeline]; `flags`: of up.
    Pipeline(World& world, const std::string& name, const std::filesystem::path& model,
             const std::string& stages, const std::string& extra = "",
             const std::vector<std::string>& flags = {});
    ~Pipeline();
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;

    const std::string& gateway() const noexcept { return gateway_; }
    Program& program() noexcept { return program_; }
    launcher::StageRecord stage(const std::string& name) const;
    /// Waits until every stage is ready and `stage` has been restarted `restarts` times.
    bool complete_again(const std::string& stage, std::uint32_t restarts) const;
    /// Ends it now instead of in the destructor, as the caller has arranged it.
    void given_up() noexcept { given_up_ = true; }

    Answer ask(const msg::Submit& submit) const;
    /// A counter of a stage: "steps".
    std::uint64_t counter(const std::string& name, const std::string& of = "gateway") const;

  private:
    World& world_;
    std::string name_;
    Program program_;
    std::string gateway_;
    bool given_up_ = false;
};

/// Sends the requests through one connection, `at_once` of them outstanding, in order.
std::vector<Answer> ask_all(const std::string& gateway, const std::vector<msg::Submit>& submits,
                            std::size_t at_once);

/// Greedy requests.
msg::Submit of_text(const std::string& text, std::uint32_t max_tokens);
msg::Submit of_ids(std::vector<std::uint32_t> ids, std::uint32_t max_tokens);

}  // namespace k3::test
