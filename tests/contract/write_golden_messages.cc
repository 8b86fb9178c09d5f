// Writes tests/golden/messages: the bytes of every sample message, and MANIFEST.txt.
//
//   build/tests/contract/write_golden_messages tests/golden/messages
//
// A file that exists is never changed: released messages keep their bytes for ever, and a new form
// of a message gets a new name.

#include <xxhash.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/sample_messages.h"

namespace {

std::string read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: write_golden_messages FOLDER\n");
        return 2;
    }
    const std::filesystem::path folder = argv[1];
    std::ofstream manifest(folder / "MANIFEST.txt");
    manifest << "# Encoded messages of protocol version " << k3::msg::kProtocolVersion
             << ", one envelope frame each; made by tests/contract/write_golden_messages.cc from\n"
                "# tests/support/sample_messages.cc. Columns: file, message, bytes, XXH3-64.\n";
    int n_new = 0;
    for (const k3::test::SampleMessage& sample : k3::test::sample_messages()) {
        const std::filesystem::path path = folder / (sample.name + ".bin");
        if (!std::filesystem::exists(path)) {
            const k3::msg::Bytes bytes = k3::msg::encode(sample.envelope);
            std::ofstream(path, std::ios::binary)
                .write(reinterpret_cast<const char*>(bytes.data()),
                       static_cast<std::streamsize>(bytes.size()));
            ++n_new;
        }
        const std::string bytes = read(path);
        char line[200];
        std::snprintf(line, sizeof(line), "%s.bin %s %zu %016llx\n", sample.name.c_str(),
                      std::string(k3::msg::name_of(sample.envelope.body)).c_str(), bytes.size(),
                      static_cast<unsigned long long>(XXH3_64bits(bytes.data(), bytes.size())));
        manifest << line;
    }
    std::printf("%d new files in %s\n", n_new, folder.c_str());
    return manifest ? 0 : 1;
}
