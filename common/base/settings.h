#pragma once
// Settings of a program, declared once: each is a command-line flag and a TOML key.
//
// `cache_bytes` is `--cache-bytes 1GiB` on the command line and `cache_bytes = "1GiB"` in the file
// given by `--config FILE` (`-` reads standard input). A flag beats the file. An unknown name, a
// value that does not parse or is out of range, and a missing required setting are refused in one
// sentence that names the setting, the value, the legal range and the nearest known name.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"

namespace k3 {

class Settings {
  public:
    /// `program` and `summary` head the --help text.
    Settings(std::string program, std::string summary);
    ~Settings();
    Settings(const Settings&) = delete;
    Settings& operator=(const Settings&) = delete;

    /// `name` in snake_case; `*value` holds the default on entry, which --help shows. The pointee
    /// must live until parse() returns.
    void add_text(std::string name, std::string* value, std::string help, bool required = false);
    void add_choice(std::string name, std::string* value, std::vector<std::string> choices,
                    std::string help);
    void add_integer(std::string name, std::int64_t* value, std::int64_t min, std::int64_t max,
                     std::string help);
    /// "123", "64KiB", "1.5GiB", "20GB".
    void add_bytes(std::string name, std::uint64_t* value, std::string help);
    void add_number(std::string name, double* value, double min, double max, std::string help);
    void add_flag(std::string name, bool* value, std::string help);
    /// May be given several times; a list in TOML. What is given replaces the default.
    void add_list(std::string name, std::vector<std::string>* value, std::string help,
                  bool required = false);

    enum class Action { run, exit };  // exit: --help or --version has been printed
    /// Error: invalid_argument, "<program>: ...".
    Result<Action> parse(int argc, const char* const* argv);

  private:
    Result<Action> take_words(int argc, const char* const* argv);
    class Impl;
    std::unique_ptr<Impl> impl_;
};

/// "1.5GiB" -> 1610612736. Error: invalid_argument naming the text and the legal forms.
Result<std::uint64_t> parse_bytes(std::string_view text);
/// 1610612736 -> "1.5 GiB".
std::string format_bytes(std::uint64_t bytes);

/// The candidate nearest to `word` within edit distance 3 (and at most half its length), or "".
std::string nearest_name(std::string_view word, std::span<const std::string> candidates);

/// The version of this build, "0.1.0".
std::string_view version() noexcept;

}  // namespace k3
