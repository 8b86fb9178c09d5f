// `k3pipe synth`: a checkpoint of random weights in the released layout, for benchmarks.

#include <fmt/format.h>

#include <functional>

#include "common/model/synthetic.h"
#include "launcher/commands.h"
#include "launcher/progress_line.h"

namespace k3::launcher {

int synth(const SynthCommand& command) {
    auto plan = model::plan_synthetic(command.options);
    if (!plan) return report(plan.error());
    auto progress = ProgressLine::begin("writing");
    if (!progress) return report(progress.error());
    const Status written = model::write_synthetic(*plan, command.directory, std::ref(*progress));
    progress->end();
    if (!written) return report(written.error());
    if (command.options.sparse) {
        fmt::print("{}: {} files, {} tensors, {:.2f} TB of zeros that take no room\n",
                   command.directory.string(), plan->shards.size(), plan->n_tensors,
                   static_cast<double>(plan->bytes) / 1e12);
        return kExitOk;
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
