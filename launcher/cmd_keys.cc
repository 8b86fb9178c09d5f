// `k3pipe keys`: the key file of a pipeline.

#include <fmt/format.h>
#include <sys/stat.h>

#include "common/base/settings.h"
#include "launcher/commands.h"
#include "launcher/paths.h"
#include "launcher/pipeline_file.h"
#include "launcher/pipeline_keys.h"
#include "launcher/words.h"

namespace k3::launcher {

namespace fs = std::filesystem;

namespace {

/// The default place is made as it is needed, for nobody else to look into.
Status make_default_directory() {
    const fs::path directory = default_key_directory();
    std::error_code code;
    if (fs::is_directory(directory, code)) return Status::ok();
    fs::create_directories(directory.parent_path(), code);
    if (::mkdir(directory.c_str(), 0700) == 0 || fs::is_directory(directory, code))
        return Status::ok();
    return Error{ErrorCode::io, fmt::format("cannot make the folder {}", directory.string()),
                 "make it, or write keys = \"FILE\" in [pipeline]"};
}

Status make_keys(const KeysCommand& command) {
    ASSIGN_OR_RETURN(const fs::path config, config_or_default(command.config));
    ASSIGN_OR_RETURN(PipelineSpec spec, load_pipeline(config));
    if (!command.name.empty()) {
        if (!is_legal_name(command.name))
            return Error{ErrorCode::invalid_argument,
                         fmt::format("'{}' is not a legal pipeline name", command.name),
                         "use letters, digits, - and _, at most 40"};
        spec.name = command.name;
    }
    const fs::path path = key_file_of(spec);
    if (path.empty())
        return Error{ErrorCode::invalid_argument,
                     "there is no place for keys: neither XDG_CONFIG_HOME nor HOME is set",
                     "write keys = \"FILE\" in [pipeline]"};
    if (spec.keys.empty()) RETURN_IF_ERROR(make_default_directory());
    ASSIGN_OR_RETURN(const std::string fingerprint, make_key_file(path, command.replace));
    fmt::print("keys of pipeline '{}': {}\nfingerprint {}\n", spec.name, path.string(),
               fingerprint);
    return Status::ok();
}

}  // namespace

int keys(const KeysCommand& command) {
    const Status made = make_keys(command);
    return made.has_value() ? kExitOk : report(made.error());
}

}  // namespace k3::launcher
