#include "services/experts/kept_experts.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "common/base/check.h"
#include "common/storage/atomic_file.h"
#include "common/storage/file.h"

namespace k3::experts {

namespace {

constexpr std::array<char, 8> kKeptMagic = {'K', '3', 'K', 'E', 'P', 'T', 0, 0};
constexpr std::uint32_t kKeptVersion = 1;
constexpr std::uint64_t kMostKept = 1U << 24U;

/// The file's beginning; see docs/formats/kept_experts.md.
struct KeptHeader {
    std::array<char, 8> magic{};
    std::uint32_t version = 0;
    std::uint32_t entry_bytes = 0;
    std::uint64_t n_experts = 0;
    std::array<char, 32> fingerprint{};
    std::array<char, 16> policy{};
};
static_assert(sizeof(KeptHeader) == 72 && offsetof(KeptHeader, fingerprint) == 24 &&
              offsetof(KeptHeader, policy) == 56);

struct KeptEntry {
    std::uint32_t layer = 0;
    std::uint32_t expert = 0;
    double value = 0;
};
static_assert(sizeof(KeptEntry) == 16 && offsetof(KeptEntry, value) == 8);

using Checksum = std::uint64_t;  // XXH3-64 of everything before it, at the end

template <std::size_t n>
std::array<char, n> padded(std::string_view text) {
    K3_CHECK(text.size() <= n, std::string(text));
    std::array<char, n> out{};
    std::copy(text.begin(), text.end(), out.begin());
    return out;
}

template <std::size_t n>
std::string unpadded(const std::array<char, n>& text) {
    return {text.begin(), std::find(text.begin(), text.end(), '\0')};
}

template <typename T>
void append(std::string& bytes, const T& value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

Error kept_corrupt(const std::filesystem::path& path, std::string_view what) {
    return Error{ErrorCode::corrupt, fmt::format("{} {}", path.string(), what),
                 "nothing is lost but the first reads: it will be written again"};
}

}  // namespace

void sort_by_value(std::vector<KeptExpert>& experts) {
    std::stable_sort(experts.begin(), experts.end(),
                     [](const KeptExpert& a, const KeptExpert& b) { return a.value > b.value; });
}

std::uint64_t kept_file_bytes(std::uint64_t n_experts) noexcept {
    return sizeof(KeptHeader) + n_experts * sizeof(KeptEntry) + sizeof(Checksum);
}

Status save_kept(const std::filesystem::path& path, const KeptExperts& kept) {
    std::string bytes;
    bytes.reserve(kept_file_bytes(kept.experts.size()));
    append(bytes, KeptHeader{kKeptMagic, kKeptVersion, sizeof(KeptEntry), kept.experts.size(),
                             padded<32>(kept.fingerprint), padded<16>(kept.policy)});
    for (const KeptExpert& expert : kept.experts)
        append(bytes, KeptEntry{expert.key.layer, expert.key.expert, expert.value});
    append(bytes, Checksum{XXH3_64bits(bytes.data(), bytes.size())});
    return storage::replace_file(path, bytes);
}

Result<KeptExperts> load_kept(const std::filesystem::path& path, std::string_view fingerprint,
                              std::string_view policy) {
    ASSIGN_OR_RETURN(const std::string bytes,
                     storage::read_text_file(path, kept_file_bytes(kMostKept)));
    KeptHeader header;
    if (bytes.size() < kept_file_bytes(0))
        return kept_corrupt(path, fmt::format("has {} bytes only", bytes.size()));
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (header.magic != kKeptMagic || header.version != kKeptVersion ||
        header.entry_bytes != sizeof(KeptEntry))
        return kept_corrupt(path, "is no list of kept experts of this version");
    if (header.n_experts > kMostKept || bytes.size() != kept_file_bytes(header.n_experts))
        return kept_corrupt(path, fmt::format("has {} bytes and should hold {} experts",
                                              bytes.size(), header.n_experts));
    Checksum checksum = 0;
    const std::size_t checked = bytes.size() - sizeof(checksum);
    std::memcpy(&checksum, bytes.data() + checked, sizeof(checksum));
    if (checksum != XXH3_64bits(bytes.data(), checked))
        return kept_corrupt(path, "does not have the checksum that it names");

    KeptExperts kept{unpadded(header.fingerprint), unpadded(header.policy), {}};
    if (kept.fingerprint != fingerprint || kept.policy != policy)
        return Error{ErrorCode::incompatible,
                     fmt::format("{} is of checkpoint {} under policy {}, and this is checkpoint "
                                 "{} under policy {}",
                                 path.string(), kept.fingerprint, kept.policy, fingerprint, policy),
                     "give each server and checkpoint a file of its own"};
    kept.experts.resize(header.n_experts);
    for (std::size_t i = 0; i < kept.experts.size(); ++i) {
        KeptEntry entry;
        std::memcpy(&entry, bytes.data() + sizeof(header) + i * sizeof(entry), sizeof(entry));
        if (!std::isfinite(entry.value))
            return kept_corrupt(path, "holds a value that is no number");
        kept.experts[i] = {{entry.layer, entry.expert}, entry.value};
    }
    return kept;
}

}  // namespace k3::experts
