// `k3pipe synth`: a checkpoint of random weights in the released layout, for benchmarks.

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "common/model/synthetic.h"
#include "launcher/commands.h"
#include "launcher/stop_signals.h"

namespace k3::launcher {

namespace {

/// One line on a terminal, rewritten at every percent.
class Progress {
  public:
    explicit Progress(StopSignals signals) : signals_(std::move(signals)) {}

    bool operator()(std::uint64_t done, std::uint64_t total) {
        const auto percent = static_cast<int>(done * 100 / total);
        if (terminal_ && percent != shown_)
            fmt::print(stderr, "\r{:3} % of {:.1f} GB", percent, static_cast<double>(total) / 1e9);
        shown_ = percent;
        return !signals_.came();
    }
    void end() const {
        if (terminal_ && shown_ >= 0) fmt::print(stderr, "\r\033[K");
    }

  private:
    StopSignals signals_;
    bool terminal_ = ::isatty(STDERR_FILENO) == 1;
    int shown_ = -1;
};

}  // namespace

int synth(const SynthCommand& command) {
    auto plan = model::plan_synthetic(command.options);
    if (!plan) return report(plan.error());
    auto signals = StopSignals::take();
    if (!signals) return report(signals.error());
    Progress progress(*std::move(signals));
    const Status written = model::write_synthetic(*plan, command.directory, std::ref(progress));
    progress.end();
    if (!written) {
        const int code = report(written.error());
        return written.error().code == ErrorCode::cancelled ? kExitInterrupted : code;
    }
    fmt::print(
        "{}: {} layers, {} experts a layer, {} vocabulary rows, {:.2f} GB; a token reads "
        "{:.2f} GB\n",
        command.directory.string(), command.options.n_layers, command.options.n_experts,
        command.options.vocab_size, static_cast<double>(plan->bytes) / 1e9,
        static_cast<double>(plan->bytes_per_token) / 1e9);
    return kExitOk;
}

}  // namespace k3::launcher
