#pragma once
// Log lines on stderr, one per event: time, level, service, run, a short sentence, key=value pairs.
//
//   2026-11-29 22:04:11.532 info trunk run=7f3a ready layers=0-8 bytes=3841200
//
// error: a request or service failed, and what to do; warn: it went on, worse; info: start, ready,
// stop, state change; debug: per message. No prompts, no generated text. Logged once, where it is
// handled: common/ returns Errors instead of logging them.

#include <string_view>

namespace k3::log {

enum class Level { debug, info, warn, error };

/// Called once from main before any line. `service` appears in every line; `run` may be empty.
void init(std::string_view service, std::string_view run, Level level);

void debug(std::string_view line);
void info(std::string_view line);
void warn(std::string_view line);
void error(std::string_view line);

}  // namespace k3::log
