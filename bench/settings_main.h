#pragma once
// main() of a bench with settings: reads them, runs, and says in a sentence what went wrong.

#include <cstdio>

#include "common/base/result.h"
#include "common/base/settings.h"

namespace k3::bench {

/// `read` is (argc, argv, settings) -> Result<Settings::Action>, `run` is (settings) -> Status.
template <typename BenchSettings, typename Read, typename Run>
int settings_main(int argc, const char* const* argv, const Read& read, const Run& run) {
    BenchSettings settings;
    const Result<Settings::Action> action = read(argc, argv, settings);
    if (action.has_value() && *action == Settings::Action::exit) return kExitOk;
    const Status status = action.has_value() ? run(settings) : Status(action.error());
    if (status.has_value()) return kExitOk;
    std::fprintf(stderr, "%s\n", status.error().sentence().c_str());
    return exit_code(status.error().code);
}

}  // namespace k3::bench
