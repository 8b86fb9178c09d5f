// `k3pipe render`: a pipeline as units for systemd or manifests for Kubernetes.

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "common/storage/atomic_file.h"
#include "launcher/commands.h"
#include "launcher/events.h"
#include "launcher/pipeline_keys.h"
#include "launcher/render.h"
#include "launcher/words.h"

namespace k3::launcher {

namespace fs = std::filesystem;

namespace {

/// All or none, as far as that can be known before the first is written.
Status write_files(const fs::path& folder, const std::vector<RenderedFile>& files) {
    std::error_code code;
    for (const RenderedFile& file : files) {
        const fs::path directory = (folder / file.name).parent_path();
        fs::create_directories(directory, code);
        if (!fs::is_directory(directory, code))
            return Error{ErrorCode::io,
                         fmt::format("cannot make the folder {}", directory.string()),
                         "give --out a folder that can be written"};
        RETURN_IF_ERROR(storage::check_replaceable(folder / file.name, kRenderedMagic,
                                                   "a file of k3pipe render"));
    }
    for (const RenderedFile& file : files)
        RETURN_IF_ERROR(storage::replace_file(folder / file.name, file.text, 0644));
    for (const RenderedFile& file : files) fmt::print("{}\n", (folder / file.name).string());
    return Status::ok();
}

/// Files of an earlier rendering of this pipeline that this one does not have: they would still be
/// started.
void tell_leftovers(const fs::path& folder, const std::vector<RenderedFile>& files,
                    const std::string& prefix, const EventLog& events) {
    std::set<fs::path> written;
    std::set<fs::path> directories;
    for (const RenderedFile& file : files) {
        written.insert(folder / file.name);
        directories.insert((folder / file.name).parent_path());
    }
    for (const fs::path& directory : directories) {
        std::error_code code;
        for (const auto& entry : fs::directory_iterator(directory, code)) {
            const std::string name = entry.path().filename().string();
            if (!name.starts_with(prefix) || written.contains(entry.path())) continue;
            std::ifstream stream(entry.path());
            std::string line;
            if (std::getline(stream, line) && line.starts_with(kRenderedMagic))
                events.important(
                    fmt::format("{} is of an earlier rendering: remove it if it "
                                "belonged to this pipeline",
                                entry.path().string()));
        }
    }
}

void print_files(const std::vector<RenderedFile>& files, bool is_yaml) {
    for (const RenderedFile& file : files)
        if (is_yaml)
            fmt::print("---\n{}", file.text);
        else
            fmt::print("{}# {}\n{}", &file == &files.front() ? "" : "\n", file.name.string(),
                       file.text);
}

Status render_pipeline(const RenderCommand& command) {
    ASSIGN_OR_RETURN(const fs::path config, config_or_default(command.config));
    ASSIGN_OR_RETURN(PipelineSpec spec, load_pipeline(config));
    if (!command.name.empty()) spec.name = command.name;
    if (!is_legal_name(spec.name))
        return Error{ErrorCode::invalid_argument,
                     fmt::format("'{}' is not a legal pipeline name", spec.name),
                     "use letters, digits, - and _, at most 40"};
    const bool is_yaml = command.manager == RenderCommand::For::kubernetes;
    ASSIGN_OR_RETURN(const std::vector<RenderedFile> files,
                     is_yaml ? render_kubernetes(command, spec) : render_systemd(command, spec));
    const EventLog events(EventLog::Detail::normal);
    if (command.out.empty()) {
        print_files(files, is_yaml);
    } else {
        RETURN_IF_ERROR(write_files(command.out, files));
        tell_leftovers(command.out, files, fmt::format("k3pipe-{}", spec.name), events);
    }
    const bool has_secret = std::ranges::any_of(files, [](const RenderedFile& file) {
        return file.text.find("secretName: ") != std::string::npos;
    });
    if (has_secret)
        events.normal(fmt::format(
            "the key file goes into a secret: kubectl create secret generic {} --from-file=keys={}",
            command.keys_secret.empty() ? kubernetes_keys_secret(spec.name) : command.keys_secret,
            key_file_of(spec).string()));
    return Status::ok();
}

}  // namespace

int render(const RenderCommand& command) {
    const Status done = render_pipeline(command);
    return done.has_value() ? kExitOk : report(done.error());
}

}  // namespace k3::launcher
