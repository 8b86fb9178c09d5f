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

/// Config, index, all shards, every tensor. Nothing if it cannot be used.
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
    report.add(examine_disk(*model));
    return *std::move(model);
}

Diagnosis budget_finding(const PipelineMemory& memory, const AvailableMemory& available) {
    const std::string text = fmt::format("{} bytes of {} that are free", grouped(memory.bytes()),
                                         grouped(available.bytes));
    if (memory.bytes() <= available.bytes) return {Grade::fine, "budget", text, "", {}};
    return {Grade::failure, "budget", text,
            "k3pipe init --preset auto MODEL writes budgets that fit",
            ErrorCode::resource_exhausted};
}

/// The budgets of a pipeline file against the memory that is there.
Status examine_pipeline(const PipelinePlan& plan, const Models& models,
                        const AvailableMemory& available, Report& report) {
    ASSIGN_OR_RETURN(const PipelineMemory memory,
                     plan_memory(plan, models, machine_cores(), available.bytes));
    report.add(budget_finding(memory, available));
    return Status::ok();
}

/// The configuration that `k3pipe init` would write.
void advise(const model::Model& model, const AvailableMemory& available, Report& report) {
    const auto preset = find_preset("auto", available);
    const auto text = preset.has_value() ? preset_file(*preset, model, machine_cores())
                                         : Result<std::string>(preset.error());
    if (!text.has_value())
        report.add("advice", text.error());
    else
        fmt::print("\nadvice: `k3pipe init {} -o FILE` writes\n\n{}",
                   model.checkpoint->directory().string(), *text);
}

Status examine_file(const std::filesystem::path& file, const AvailableMemory& available,
                    Report& report) {
    ASSIGN_OR_RETURN(PipelineSpec spec, load_pipeline(file));
    RETURN_IF_ERROR(resolve_addresses(&spec));
    ASSIGN_OR_RETURN(const PipelinePlan whole,
                     make_plan(spec, run_base(spec.run_dir) / spec.name, 0));
    const PipelinePlan plan = whole.on_this_box();
    Models models;
    for (const StagePlan& stage : plan.stages) {
        if (stage.model.empty() || models.contains(stage.model)) continue;
        auto model = examine_model(stage.model, report);
        if (!model) return Status::ok();  // it has been reported
        models.emplace(stage.model, *std::move(model));
    }
    return examine_pipeline(plan, models, available, report);
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
    } else if (!command.model.empty()) {
        if (const auto model = examine_model(command.model, report))
            advise(*model, *available, report);
    }
    return report.exit_status();
}

}  // namespace k3::launcher
