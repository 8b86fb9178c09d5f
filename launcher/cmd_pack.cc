// `k3pipe pack`: trunk runs or expert records of a checkpoint in one file for direct reads.

#include <fmt/format.h>

#include <functional>
#include <string>
#include <utility>

#include "common/base/settings.h"
#include "common/model/layer_range.h"
#include "common/model/load.h"
#include "common/model/placement_file.h"
#include "common/pack/make_pack.h"
#include "launcher/commands.h"
#include "launcher/progress_line.h"

namespace k3::launcher {

namespace {

struct Packed {
    pack::PackSummary summary;
    std::string what;
};

Result<Packed> pack_trunk(const PackCommand& command, const model::Model& model,
                          ProgressLine& progress) {
    ASSIGN_OR_RETURN(const model::LayerRange range,
                     model::parse_layers(command.layers, model.config));
    ASSIGN_OR_RETURN(const pack::PackSummary summary,
                     pack::make_trunk_pack(model, range.first, range.count, command.file,
                                           std::ref(progress), command.part));
    return Packed{summary, fmt::format("layers {}-{} of the trunk", range.first, range.end() - 1)};
}

Result<Packed> pack_experts(const PackCommand& command, const model::Model& model,
                            ProgressLine& progress) {
    ASSIGN_OR_RETURN(const model::Share share, model::read_share(command.share, model));
    const model::Placement& held = share.held;
    if (held.count() == 0)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("the share '{}' holds no expert", command.share),
                     "give a share that holds at least one"};
    ASSIGN_OR_RETURN(const pack::PackSummary summary,
                     pack::make_expert_pack(model, held, command.file, std::ref(progress)));
    return Packed{summary, fmt::format("{} experts", held.count())};
}

Result<Packed> pack_into_file(const PackCommand& command, ProgressLine& progress) {
    ASSIGN_OR_RETURN(const model::Model model, model::open_model(command.model));
    return command.kind == pack::Kind::trunk ? pack_trunk(command, model, progress)
                                             : pack_experts(command, model, progress);
}

}  // namespace

int pack_checkpoint(const PackCommand& command) {
    auto progress = ProgressLine::begin("packing");
    if (!progress) return report(progress.error());
    const Result<Packed> packed = pack_into_file(command, *progress);
    progress->end();
    if (!packed) return report(packed.error());
    const pack::PackSummary& summary = packed->summary;
    fmt::print("{}: {}, {}", command.file.string(), packed->what, format_bytes(summary.file_bytes));
    if (summary.kept_bytes > 0)
        fmt::print(", of which {} come from an earlier attempt", format_bytes(summary.kept_bytes));
    fmt::print("\n");
    return kExitOk;
}

}  // namespace k3::launcher
