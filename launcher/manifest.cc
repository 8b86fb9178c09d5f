#include "launcher/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <span>
#include <system_error>
#include <utility>

#include "common/pack/format.h"
#include "common/storage/atomic_file.h"
#include "common/storage/file.h"
#include "launcher/digest_job.h"

namespace k3::launcher {

namespace {

constexpr std::string_view kFirstWords = "k3pipe manifest ";
constexpr std::string_view kFirstLine = "k3pipe manifest 1, XXH3-64 of every 16777216 bytes";
constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 30U;
constexpr std::uint64_t kMaxSumsBytes = std::uint64_t{16} << 20U;

std::string hash_of(std::string_view text) {
    return xxh3_hex(pack::format::hash(std::as_bytes(std::span(text))));
}

bool is_hex(std::string_view text, std::size_t digits) {
    return text.size() == digits && std::ranges::all_of(text, [](char c) {
               return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
           });
}

/// Takes a line off `text`; false at its end. A last line without an end is one, too.
bool next_line(std::string_view& text, std::string_view& line) {
    if (text.empty()) return false;
    const std::size_t end = std::min(text.find('\n'), text.size());
    line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return true;
}

Error damaged(const std::filesystem::path& path, std::string_view what) {
    return Error{ErrorCode::corrupt, fmt::format("{}: {}", path.string(), what),
                 "copy the manifest again, or remove it and record another one when the files are "
                 "known to be right"};
}

/// "file BYTES NAME". The checksum of the manifest is right, so what follows is as we wrote it.
Result<ManifestFile> parse_file(const std::filesystem::path& path, std::string_view line) {
    ManifestFile file;
    constexpr std::string_view kWord = "file ";
    const char* end = line.data() + line.size();
    if (!line.starts_with(kWord)) return damaged(path, fmt::format("'{}' names no file", line));
    const auto [stop, code] = std::from_chars(line.data() + kWord.size(), end, file.bytes);
    if (code != std::errc{} || stop == end || *stop != ' ')
        return damaged(path, fmt::format("'{}' has no size", line));
    file.name.assign(stop + 1, end);
    if (file.name.empty() || file.name.find('/') != std::string::npos)
        return damaged(path, fmt::format("'{}' is no file beside the manifest", file.name));
    return file;
}

std::size_t n_parts(const ManifestFile& file) {
    return std::max<std::size_t>(1, (file.bytes + kManifestPartBytes - 1) / kManifestPartBytes);
}

}  // namespace

Result<Manifest> read_manifest(const std::filesystem::path& path) {
    ASSIGN_OR_RETURN(const std::string text, storage::read_text_file(path, kMaxManifestBytes));
    if (!text.starts_with(kFirstWords)) return damaged(path, "not a manifest of k3pipe");
    std::string_view rest = text;
    std::string_view line;
    next_line(rest, line);
    if (line != kFirstLine)
        return Error{ErrorCode::incompatible,
                     fmt::format("{} begins with '{}', and this build reads '{}'", path.string(),
                                 line, kFirstLine),
                     "record a new manifest with k3pipe verify --record of this build"};
    const std::size_t last = text.rfind("end ");
    if (last == std::string::npos || last == 0 || text[last - 1] != '\n' ||
        text.substr(last) != "end " + hash_of(std::string_view(text).substr(0, last)) + "\n")
        return damaged(path, "its own checksum is wrong or absent");
    rest = std::string_view(text).substr(line.size() + 1, last - line.size() - 1);
    Manifest manifest;
    while (next_line(rest, line)) {
        ASSIGN_OR_RETURN(ManifestFile file, parse_file(path, line));
        for (std::size_t i = n_parts(file); i > 0; --i) {
            if (!next_line(rest, line) || !is_hex(line, 16))
                return damaged(path, fmt::format("checksums of {} are missing", file.name));
            file.parts.emplace_back(line);
        }
        manifest.files.push_back(std::move(file));
    }
    return manifest;
}

Status check_no_manifest(const std::filesystem::path& path) {
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) return Status::ok();
    return Error{ErrorCode::invalid_argument, fmt::format("{} already exists", path.string()),
                 "verify against it, or remove it first if the files were changed on purpose"};
}

Status write_manifest(const Manifest& manifest, const std::filesystem::path& path) {
    RETURN_IF_ERROR(check_no_manifest(path));
    std::string text = std::string(kFirstLine) + "\n";
    for (const ManifestFile& file : manifest.files) {
        text += fmt::format("file {} {}\n", file.bytes, file.name);
        for (const std::string& hex : file.parts) text += hex + "\n";
    }
    text += "end " + hash_of(text) + "\n";
    return storage::replace_file(path, text, 0666);
}

Result<std::vector<Sha256Sum>> read_sha256_sums(const std::filesystem::path& path) {
    ASSIGN_OR_RETURN(const std::string text, storage::read_text_file(path, kMaxSumsBytes));
    std::vector<Sha256Sum> sums;
    std::string_view rest = text;
    std::string_view line;
    while (next_line(rest, line)) {
        if (line.ends_with('\r')) line.remove_suffix(1);
        if (line.empty() || line.starts_with('#')) continue;
        Sha256Sum sum;
        sum.hex = line.substr(0, 64);
        std::ranges::transform(sum.hex, sum.hex.begin(),
                               [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
        // "HEX  NAME", or "HEX *NAME" for one that was read as binary.
        if (!is_hex(sum.hex, 64) || line.size() < 67 || line[64] != ' ' ||
            (line[65] != ' ' && line[65] != '*'))
            return Error{ErrorCode::corrupt,
                         fmt::format("{}: '{}' is not a line of sha256sum", path.string(), line),
                         "give a file with lines of 64 hex digits, two blanks and a name"};
        sum.name = line.substr(66);
        if (sum.name.starts_with("./")) sum.name.erase(0, 2);
        sums.push_back(std::move(sum));
    }
    if (!sums.empty()) return sums;
    return Error{ErrorCode::corrupt, fmt::format("{} holds no sums", path.string()),
                 "give a file with lines of 64 hex digits, two blanks and a name"};
}

}  // namespace k3::launcher
