#pragma once
// What a service writes on stderr: cut into lines, and judged by the level in its log format.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace k3::launcher {

enum class LineLevel { debug, info, warning, error, other };

struct OutputLine {
    LineLevel level = LineLevel::other;  // other: not of our log format (a crash, a wrapper)
    std::string text;                    // the whole line
    std::string message;                 // without time, level, name and run
};

/// "2026-11-29 22:04:11.532 error trunk run=7f3a <message>" (common/base/log.h).
OutputLine parse_line(std::string_view line);

/// Collects what arrives on one pipe.
class OutputReader {
  public:
    /// Appends bytes and returns the lines that became complete. Lines over 8 KiB are cut.
    std::vector<OutputLine> add(std::string_view bytes);
    /// What is left when the pipe has ended.
    std::vector<OutputLine> finish();

  private:
    std::string partial_;
};

}  // namespace k3::launcher
