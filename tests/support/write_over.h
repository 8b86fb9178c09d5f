#pragma once
// Other bytes in a file that somebody is reading: at no moment is it shorter than before.

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string_view>

namespace k3::test {

inline void write_over(const std::filesystem::path& path, std::string_view bytes) {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) throw std::runtime_error("cannot write over " + path.string());
}

}  // namespace k3::test
