#pragma once
// A checkpoint directory of one's own, to damage.
//
// Every damage is a function here, so that a test reads as the list of what it breaks. A failing
// helper (no such file, no such text) ends the test program: a damage that was not done must not
// pass as one that was survived.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace k3::test {

/// A directory below the system's temporary one, removed with everything in it.
class TempDir {
  public:
    TempDir();
    ~TempDir();
    TempDir(TempDir&& other) noexcept : path_(std::exchange(other.path_, {})) {}
    TempDir(const TempDir&) = delete;
    TempDir& operator=(const TempDir&) = delete;
    TempDir& operator=(TempDir&&) = delete;

    const std::filesystem::path& path() const noexcept { return path_; }

  private:
    std::filesystem::path path_;  // empty after a move
};

/// The whole file. / Replaces the whole file.
std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, std::string_view bytes);

class CheckpointCopy {
  public:
    /// Copies all files of `source`, e.g. golden_dir() / "tiny-k3" (6 MB, a few milliseconds).
    explicit CheckpointCopy(const std::filesystem::path& source);

    const std::filesystem::path& path() const noexcept { return dir_.path(); }
    std::filesystem::path file(std::string_view name) const { return path() / name; }
    std::filesystem::path config() const { return file("config.json"); }
    std::filesystem::path index() const { return file("model.safetensors.index.json"); }

    /// XORs the byte at `offset` with `mask`.
    void flip_byte(std::string_view name, std::uint64_t offset, std::uint8_t mask = 0xFF);
    /// Sets the byte at `offset`.
    void set_byte(std::string_view name, std::uint64_t offset, std::uint8_t value);
    void truncate(std::string_view name, std::uint64_t bytes);
    void remove(std::string_view name);

    /// Replaces every occurrence of `from` in a file; there must be one.
    void replace_text(std::string_view name, std::string_view from, std::string_view to);

    /// Hands the header JSON of a shard to `edit` and writes back what it returns, with a correct
    /// length; the data stay as they are.
    void edit_header(std::string_view shard, const std::function<std::string(std::string)>& edit);

  private:
    TempDir dir_;
};

}  // namespace k3::test
