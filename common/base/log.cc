#include "common/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>

namespace k3::log {

namespace {

spdlog::level::level_enum native(Level level) {
    switch (level) {
        case Level::debug:
            return spdlog::level::debug;
        case Level::info:
            return spdlog::level::info;
        case Level::warn:
            return spdlog::level::warn;
        case Level::error:
            return spdlog::level::err;
    }
    return spdlog::level::info;
}

/// One event is one line, whatever bytes an error sentence has picked up from a file or a peer.
std::string one_line(std::string_view line) {
    std::string clean(line);
    for (char& c : clean)
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
    return clean;
}

}  // namespace

void init(std::string_view service, std::string_view run, Level level) {
    auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    auto logger = std::make_shared<spdlog::logger>(std::string(service), std::move(sink));
    std::string pattern = "%Y-%m-%d %H:%M:%S.%e %l %n";
    if (!run.empty()) pattern += " run=";
    for (char c : run) pattern += c == '%' ? "%%" : std::string(1, c);  // % starts a pattern flag
    logger->set_pattern(pattern + " %v");
    logger->set_level(native(level));
    logger->flush_on(spdlog::level::debug);
    spdlog::set_default_logger(std::move(logger));
}

namespace {

/// A program that fails before init() still logs to stderr in the one format.
void init_if_needed() {
    if (spdlog::default_logger_raw()->name().empty()) init("k3pipe", "", Level::info);
}

}  // namespace

void debug(std::string_view line) {
    init_if_needed();
    spdlog::debug("{}", one_line(line));
}
void info(std::string_view line) {
    init_if_needed();
    spdlog::info("{}", one_line(line));
}
void warn(std::string_view line) {
    init_if_needed();
    spdlog::warn("{}", one_line(line));
}
void error(std::string_view line) {
    init_if_needed();
    spdlog::error("{}", one_line(line));
}

}  // namespace k3::log
