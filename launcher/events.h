#pragma once
// What the launcher tells the person at the terminal: one line per event on stderr.

#include <string_view>

namespace k3::launcher {

class EventLog {
  public:
    enum class Detail {
        brief,    // `run`: what a reader of the answer must know
        normal,   // `up`: every change of a stage
        verbose,  // -v: also every line that services log
    };
    explicit EventLog(Detail detail) : detail_(detail) {}

    void important(std::string_view line) const { print(line); }
    void normal(std::string_view line) const {
        if (detail_ != Detail::brief) print(line);
    }
    void verbose(std::string_view line) const {
        if (detail_ == Detail::verbose) print(line);
    }
    Detail detail() const noexcept { return detail_; }

    /// A line of a service, after its name.
    void forward(std::string_view stage, std::string_view line) const;

  private:
    /// "k3pipe: <line>\n" in one write, so that lines of several threads do not mix.
    static void print(std::string_view line);
    Detail detail_;
};

}  // namespace k3::launcher
