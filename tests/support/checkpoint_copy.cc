#include "tests/support/checkpoint_copy.h"

#include <stdlib.h>  // mkdtemp

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

namespace k3::test {

namespace {

[[noreturn]] void fail(const std::string& what, const std::filesystem::path& path) {
    std::fprintf(stderr, "checkpoint_copy: %s: %s\n", what.c_str(), path.c_str());
    std::abort();
}

/// Applies `change` to one byte of a file.
template <typename Change>
void change_byte(const std::filesystem::path& path, std::uint64_t offset, Change change) {
    std::string bytes = read_file(path);
    if (offset >= bytes.size()) fail("no byte at that offset", path);
    auto& byte = bytes[static_cast<std::size_t>(offset)];
    byte = static_cast<char>(change(static_cast<std::uint8_t>(byte)));
    write_file(path, bytes);
}

}  // namespace

TempDir::TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "k3-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) fail("cannot make a directory", name);
    path_ = name;
}

TempDir::~TempDir() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fail("cannot read", path);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) fail("cannot write", path);
}

CheckpointCopy::CheckpointCopy(const std::filesystem::path& source) {
    for (const auto& entry : std::filesystem::directory_iterator(source))
        if (entry.is_regular_file())
            std::filesystem::copy_file(entry.path(), path() / entry.path().filename());
}

void CheckpointCopy::flip_byte(std::string_view name, std::uint64_t offset, std::uint8_t mask) {
    change_byte(file(name), offset, [mask](std::uint8_t byte) { return byte ^ mask; });
}

void CheckpointCopy::set_byte(std::string_view name, std::uint64_t offset, std::uint8_t value) {
    change_byte(file(name), offset, [value](std::uint8_t) { return value; });
}

void CheckpointCopy::truncate(std::string_view name, std::uint64_t bytes) {
    if (std::filesystem::file_size(file(name)) <= bytes) fail("already that short", file(name));
    std::filesystem::resize_file(file(name), bytes);
}

void CheckpointCopy::remove(std::string_view name) {
    if (!std::filesystem::remove(file(name))) fail("nothing to remove", file(name));
}

void CheckpointCopy::replace_text(std::string_view name, std::string_view from,
                                  std::string_view to) {
    std::string text = read_file(file(name));
    std::size_t at = text.find(from);
    if (at == std::string::npos) fail("does not contain '" + std::string(from) + "'", file(name));
    for (; at != std::string::npos; at = text.find(from, at + to.size()))
        text.replace(at, from.size(), to);
    write_file(file(name), text);
}

void CheckpointCopy::edit_header(std::string_view shard,
                                 const std::function<std::string(std::string)>& edit) {
    std::string bytes = read_file(file(shard));
    std::uint64_t n = 0;
    std::memcpy(&n, bytes.data(), sizeof n);
    std::string header = edit(bytes.substr(sizeof n, n));
    std::string data = bytes.substr(sizeof n + n);
    n = header.size();
    std::string length(sizeof n, '\0');
    std::memcpy(length.data(), &n, sizeof n);
    write_file(file(shard), length + header + data);
}

}  // namespace k3::test
