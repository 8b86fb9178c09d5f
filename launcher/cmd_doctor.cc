// `k3pipe doctor`: whether this box can run a model, and how it should.

#include <fmt/format.h>

#include <optional>

#include "common/base/memory.h"
#include "launcher/commands.h"
#include "launcher/doctor.h"
#include "launcher/hosts.h"
#include "launcher/pipeline_file.h"
#include "launcher/plan_memory.h"
#include "launcher/plan_model.h"
#include "launcher/preset.h"
#include "launcher/run_directory.h"
#include "launcher/settings_check.h"

namespace k3::launcher {

namespace {

/// Prints findings as they come and remembers the first failure.
class Report {
  public:
    void add(const Diagnosis& finding) {
        const char* mark = finding.grade == Grade::fine     ? "ok    "
                           : finding.grade == Grade::advice ? "advice"
                                                            : "FAILS ";
        fmt::print("{}  {:<14}{}\n", mark, finding.subject, finding.text);
        if (!finding.remedy.empty()) fmt::print("{:24}-> {}\n", "", finding.remedy);
        if (finding.grade == Grade::failure && !first_) first_ = finding.code;
    }
    void add(const std::vector<Diagnosis>& findings) {
        for (const Diagnosis& finding : findings) add(finding);
    }
    void add(const char* subject, const Error& error) {
        add(Diagnosis{Grade::failure, subject, error.message, error.remedy, error.code});
    }
    int exit_status() const { return first_ ? exit_code(*first_) : kExitOk; }

  private:
    std::optional<ErrorCode> first_;
};

/// Config, index, all shards, every tensor of a checkpoint. Nothing if it cannot be used.
std::optional<model::Model> examine_model(const std::filesystem::path& directory, Report& report) {
    const std::vector<Diagnosis> damages = examine_shards(directory);
    report.add(damages);
    auto model = model::open_model(directory);
    if (!model.has_value()) {
        if (damages.empty()) report.add("checkpoint", model.error());
        return std::nullopt;
    }
    if (const Status complete = check_complete(*model); !complete.has_value()) {
        report.add("checkpoint", complete.error());
        return std::nullopt;
    }
    report.add(Diagnosis{
        Grade::fine,
        "checkpoint",
        fmt::format("{}: {} tensors in {} files, complete", directory.string(),
                    grouped(model->checkpoint->tensors().size()), model->checkpoint->n_shards()),
        "",
        {}});
    report.add(examine_open_files(model->checkpoint->n_shards()));
    return *std::move(model);
}

/// What opening found, beyond checkpoints that have been examined.
void examine_weights(const StageWeights& weights, Report& report) {
    for (const auto& [directory, model] : weights.models)
        if (model.checkpoint == nullptr)
            report.add(Diagnosis{Grade::fine,
                                 "checkpoint",
                                 fmt::format("{}: config.json only", directory.string()),
                                 "",
                                 {}});
    report.add(examine_packs(weights.packs));
    if (!weights.files().empty()) report.add(examine_disk(weights));
}

Diagnosis budget_finding(const PipelineMemory& memory, const AvailableMemory& available) {
    const std::string text = fmt::format("{} bytes of {} that are free", grouped(memory.bytes()),
                                         grouped(available.bytes));
    if (memory.bytes() <= available.bytes) return {Grade::fine, "budget", text, "", {}};
    return {Grade::failure, "budget", text,
            "k3pipe init --preset auto MODEL writes budgets that fit",
            ErrorCode::resource_exhausted};
}

/// The configuration that `k3pipe init` would write.
void advise(const ModelFiles& files, const StageWeights& weights, const AvailableMemory& available,
            Report& report) {
    const auto preset = find_preset("auto", available);
    const auto text = preset.has_value() ? preset_file(*preset, files, weights, machine_cores())
                                         : Result<std::string>(preset.error());
    if (!text.has_value()) {
        report.add("advice", text.error());
        return;
    }
    std::string packs;
    for (const auto& file : files.trunk_pack) packs += " --trunk-pack " + file.string();
    if (!files.experts_pack.empty()) packs += " --experts-pack " + files.experts_pack.string();
    fmt::print("\nadvice: `k3pipe init {}{} -o FILE` writes\n\n{}", files.directory.string(), packs,
               *text);
}

/// A directory and its packs, for a pipeline on this box.
Status examine_files(const ModelFiles& files, const AvailableMemory& available, Report& report) {
    Models opened;
    const bool is_packed = !files.trunk_pack.empty() && !files.experts_pack.empty();
    if (has_checkpoint(files.directory) || !is_packed) {
        auto model = examine_model(files.directory, report);
        if (!model) return Status::ok();  // it has been reported
        opened.emplace(std::filesystem::absolute(files.directory), *std::move(model));
    }
    report.add(examine_tokenizer(files.directory));
    ASSIGN_OR_RETURN(const StageWeights weights, open_files(files, std::move(opened)));
    examine_weights(weights, report);
    advise(files, weights, available, report);
    return Status::ok();
}

/// The weights and budgets of a pipeline file, and the memory that is there.
Status examine_file(const std::filesystem::path& file, const AvailableMemory& available,
                    Report& report) {
    ASSIGN_OR_RETURN(PipelineSpec spec, load_pipeline(file));
    RETURN_IF_ERROR(resolve_addresses(&spec));
    ASSIGN_OR_RETURN(const PipelinePlan whole,
                     make_plan(spec, run_base(spec.run_dir) / spec.name, 0));
    if (const Status settings = check_settings(whole); settings.has_value())
        report.add(Diagnosis{Grade::fine, "settings", "every service accepts its own", "", {}});
    else
        report.add("settings", settings.error());
    const PipelinePlan plan = whole.on_this_box();
    Models opened;
    for (const StagePlan& stage : plan.stages) {
        if (stage.model.empty()) continue;
        if (stage.kind == msg::ServiceKind::tokenizer) report.add(examine_tokenizer(stage.model));
        if (opened.contains(stage.model) || !has_checkpoint(stage.model)) continue;
        auto model = examine_model(stage.model, report);
        if (!model) return Status::ok();  // it has been reported
        opened.emplace(stage.model, *std::move(model));
    }
    ASSIGN_OR_RETURN(const StageWeights weights, open_weights(plan, std::move(opened)));
    examine_weights(weights, report);
    ASSIGN_OR_RETURN(const PipelineMemory memory,
                     plan_memory(plan, weights, machine_cores(), available.bytes));
    report.add(budget_finding(memory, available));
    return Status::ok();
}

}  // namespace

int doctor(const DoctorCommand& command) {
    Report report;
    report.add(examine_machine());
    const auto available = available_memory();
    if (!available.has_value()) return report.exit_status();
    if (!command.config.empty()) {
        if (const Status status = examine_file(command.config, *available, report);
            !status.has_value())
            report.add("pipeline file", status.error());
    } else if (!command.files.directory.empty()) {
        if (const Status status = examine_files(command.files, *available, report);
            !status.has_value())
            report.add("weights", status.error());
    }
    return report.exit_status();
}

}  // namespace k3::launcher
