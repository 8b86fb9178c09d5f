#include "launcher/paths.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace k3::launcher {

namespace fs = std::filesystem;

namespace {

bool is_executable(const fs::path& path) {
    std::error_code code;
    return fs::is_regular_file(path, code) && ::access(path.c_str(), X_OK) == 0;
}

std::vector<fs::path> search_path() {
    std::vector<fs::path> folders;
    const char* value = std::getenv("PATH");
    std::string_view rest = value == nullptr ? "/usr/local/bin:/usr/bin:/bin" : value;
    while (!rest.empty()) {
        std::size_t end = std::min(rest.find(':'), rest.size());
        if (end > 0) folders.emplace_back(rest.substr(0, end));
        rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    return folders;
}

}  // namespace

Result<fs::path> program_directory() {
    std::error_code code;
    fs::path self = fs::read_symlink("/proc/self/exe", code);
    if (code)
        return Error{ErrorCode::io, "cannot read /proc/self/exe: " + code.message(), "mount /proc"};
    return self.parent_path();
}

Result<fs::path> configs_directory() {
    if (const char* given = std::getenv("K3PIPE_CONFIGS"); given != nullptr && *given != 0)
        return fs::path(given);
    ASSIGN_OR_RETURN(fs::path here, program_directory());
    std::error_code code;
    fs::path installed = (here / "../share/k3pipe/configs").lexically_normal();
    if (fs::exists(installed / "demo.toml", code)) return installed;
    fs::path pointer = here / "k3pipe.configs";
    std::string line;
    if (std::ifstream file(pointer); file && std::getline(file, line)) return fs::path(line);
    return Error{ErrorCode::invalid_argument,
                 fmt::format("found no pipeline files: neither {} nor {} exists",
                             (installed / "demo.toml").string(), pointer.string()),
                 "name a pipeline file with -c, or their folder in K3PIPE_CONFIGS"};
}

fs::path default_session_directory() {
    // Relative values are to be ignored, as the XDG specification says.
    if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && *state == '/')
        return fs::path(state) / "k3pipe/sessions";
    if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/')
        return fs::path(home) / ".local/state/k3pipe/sessions";
    return {};
}

fs::path default_key_directory() {
    if (const char* config = std::getenv("XDG_CONFIG_HOME"); config != nullptr && *config == '/')
        return fs::path(config) / "k3pipe/keys";
    if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/')
        return fs::path(home) / ".config/k3pipe/keys";
    return {};
}

Result<fs::path> find_program(const std::string& name, std::string_view what) {
    if (name.find('/') != std::string::npos) {
        if (is_executable(name)) return fs::path(name);
        std::error_code code;
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{}: {} {}", what, name,
                                 fs::exists(name, code) ? "cannot be executed" : "does not exist"),
                     "correct the path in the pipeline file"};
    }
    ASSIGN_OR_RETURN(fs::path here, program_directory());
    std::vector<fs::path> places;
    if (name.starts_with("k3-"))
        places = {here, (here / "../services" / name.substr(3)).lexically_normal()};
    for (fs::path& folder : search_path()) places.push_back(std::move(folder));
    for (const fs::path& place : places)
        if (is_executable(place / name)) return place / name;
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{}: found no program {} beside {} or in PATH", what, name,
                             (here / "k3pipe").string()),
                 "build or install it, or give its path in the pipeline file"};
}

}  // namespace k3::launcher
