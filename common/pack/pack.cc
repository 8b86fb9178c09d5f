#include "common/pack/pack.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "common/base/check.h"
#include "common/base/memory_block.h"
#include "common/pack/trunk_run.h"

namespace k3::pack {

namespace {

constexpr std::string_view kPackAgain =
    "make the pack again with k3pipe pack, or copy it again from where it is right";

std::uint64_t piece_bytes(const Entry& entry, std::uint64_t piece) noexcept {
    return std::min(entry.piece_bytes, entry.stored_bytes() - piece * entry.piece_bytes);
}

}  // namespace

Result<std::shared_ptr<const Pack>> Pack::open(const std::filesystem::path& path, Mode mode) {
    ASSIGN_OR_RETURN(storage::DirectFile file, storage::DirectFile::open(path, mode));
    std::shared_ptr<Pack> pack(new Pack(std::move(file)));
    ASSIGN_OR_RETURN(const format::Header header, pack->read_header());
    RETURN_IF_ERROR(pack->read_table(header));
    return std::shared_ptr<const Pack>(std::move(pack));
}

Result<std::shared_ptr<const Pack>> Pack::open(const std::filesystem::path& path, Kind kind,
                                               Mode mode) {
    ASSIGN_OR_RETURN(auto pack, open(path, mode));
    RETURN_IF_ERROR(pack->check_kind(kind));
    return pack;
}

Status Pack::check_kind(Kind kind) const {
    if (kind_ == kind) return Status::ok();
    return Error{ErrorCode::incompatible,
                 fmt::format("{} is a pack of kind '{}', and '{}' is needed", path().string(),
                             to_string(kind_), to_string(kind)),
                 fmt::format("make one with k3pipe pack {}", to_string(kind))};
}

Error Pack::corrupt(std::string what) const {
    return Error{ErrorCode::corrupt, fmt::format("{}: {}", path().string(), what),
                 std::string(kPackAgain)};
}

Result<format::Header> Pack::read_header() const {
    if (file_bytes() < storage::kBlockBytes)
        return corrupt(fmt::format("{} bytes are too few for a pack", file_bytes()));
    ASSIGN_OR_RETURN(MemoryBlock block,
                     MemoryBlock::create(storage::kBlockBytes, "the header of a pack"));
    RETURN_IF_ERROR(file_.read(0, block.span()));
    format::Header header;
    std::memcpy(&header, block.data(), sizeof(header));
    if (header.magic != format::kMagic) return corrupt("not a pack: it does not begin with k3pack");
    if (header.version != format::kVersion)
        return Error{ErrorCode::incompatible,
                     fmt::format("{} is a pack of version {}, and this build reads version {}",
                                 path().string(), header.version, format::kVersion),
                     "make the pack again with k3pipe pack of this build"};
    const std::vector<std::byte> expected = format::header_block(header);
    if (!std::ranges::equal(expected, block.span()))
        return corrupt("the checksum of the header is wrong");
    if (header.state != format::State::complete)
        return Error{ErrorCode::corrupt, fmt::format("{} is an unfinished pack", path().string()),
                     "run the k3pipe pack command again that was interrupted: it goes on"};
    if (header.kind != Kind::trunk && header.kind != Kind::experts)
        return corrupt(fmt::format("kind {} is unknown", static_cast<std::uint32_t>(header.kind)));
    if (header.part >= header.n_parts || header.n_parts > format::kMaxParts)
        return corrupt(fmt::format("part {}/{} cannot be", header.part, header.n_parts));
    if (header.file_bytes != file_bytes())
        return corrupt(fmt::format("the file has {} bytes, and its header says {}", file_bytes(),
                                   header.file_bytes));
    return header;
}

Status Pack::read_table(const format::Header& header) {
    kind_ = header.kind;
    part_ = {header.part, header.n_parts};
    origin_.fingerprint.assign(header.fingerprint.begin(), header.fingerprint.end());
    origin_.config_digest.assign(header.config_digest.begin(), header.config_digest.end());
    const std::uint64_t bytes = format::table_bytes(header.n_entries, header.n_pieces);
    if (header.n_entries > format::kMaxEntries || header.n_pieces > format::kMaxPieces ||
        bytes > file_bytes() - format::kTableOffset)
        return corrupt(fmt::format("a table of {} entries and {} checksums does not fit the file",
                                   header.n_entries, header.n_pieces));
    ASSIGN_OR_RETURN(MemoryBlock table, MemoryBlock::create(bytes, "the table of a pack"));
    RETURN_IF_ERROR(file_.read(format::kTableOffset, table.span()));
    if (format::hash(table.span()) != header.table_hash)
        return corrupt("the checksum of the table is wrong");
    entries_.reserve(header.n_entries);
    const std::byte* at = table.data();
    for (std::uint64_t i = 0; i < header.n_entries; ++i, at += sizeof(format::TableEntry)) {
        format::TableEntry raw;
        std::memcpy(&raw, at, sizeof(raw));
        entries_.push_back({raw.key, raw.offset, raw.bytes, raw.piece_bytes, raw.first_piece});
    }
    checksums_.resize(header.n_pieces);
    if (!checksums_.empty())
        std::memcpy(checksums_.data(), at, checksums_.size() * sizeof(std::uint64_t));
    return check_entries();
}

/// The checksums are right, so only a writer that is not ours can have got these wrong.
Status Pack::check_entries() const {
    std::vector<Entry> expected = entries_;
    std::uint64_t left = file_bytes();
    for (const Entry& entry : entries_) {
        if (entry.piece_bytes == 0 || entry.piece_bytes % storage::kBlockBytes != 0 ||
            entry.bytes == 0 || entry.bytes > left)
            return corrupt(fmt::format("{}: {} bytes in pieces of {} cannot be", name_of(entry.key),
                                       entry.bytes, entry.piece_bytes));
        left -= entry.bytes;
    }
    const bool sorted =
        std::ranges::adjacent_find(entries_, std::greater_equal<>(), &Entry::key) == entries_.end();
    std::uint64_t n_pieces = 0;
    for (const Entry& entry : entries_) n_pieces += entry.n_pieces();
    const std::uint64_t end = lay_out(expected);
    const bool same = std::ranges::equal(entries_, expected, [](const Entry& a, const Entry& b) {
        return a.offset == b.offset && a.first_piece == b.first_piece;
    });
    if (!sorted || !same || n_pieces != checksums_.size() || end != file_bytes())
        return corrupt("the entries of the table do not follow one another");
    return Status::ok();
}

const Entry* Pack::find(EntryKey key) const noexcept {
    auto found = std::ranges::lower_bound(entries_, key, {}, &Entry::key);
    return found == entries_.end() || found->key != key ? nullptr : &*found;
}

Pack::Pieces Pack::pieces_of(const Entry& entry, std::uint64_t offset,
                             std::uint64_t bytes) noexcept {
    const std::uint64_t first = offset / entry.piece_bytes;
    const std::uint64_t end = (offset + bytes + entry.piece_bytes - 1) / entry.piece_bytes;
    return {first, end - first};
}

std::uint64_t Pack::bytes_of(const Entry& entry, Pieces pieces) noexcept {
    const std::uint64_t begin = pieces.first * entry.piece_bytes;
    const std::uint64_t end = begin + pieces.count * entry.piece_bytes;
    return std::min(end, entry.stored_bytes()) - begin;
}

Status Pack::read(const Entry& entry, Pieces pieces, std::span<std::byte> dst) const {
    const std::uint64_t offset = entry.offset + pieces.first * entry.piece_bytes;
    Status read = file_.read(offset, dst);
    if (!read) return std::move(read).error().with_context(name_of(entry.key));
    return verify(entry, pieces, dst);
}

Status Pack::read(const Entry& entry, std::span<std::byte> dst) const {
    return read(entry, {0, entry.n_pieces()}, dst);
}

Status Pack::verify(const Entry& entry, Pieces pieces, std::span<const std::byte> bytes) const {
    K3_CHECK(
        pieces.first + pieces.count <= entry.n_pieces() && bytes.size() == bytes_of(entry, pieces),
        fmt::format("{} bytes for pieces {} to {} of {}", bytes.size(), pieces.first,
                    pieces.first + pieces.count, name_of(entry.key)));
    for (std::uint64_t piece = pieces.first; piece < pieces.first + pieces.count; ++piece) {
        const std::uint64_t n = piece_bytes(entry, piece);
        if (format::hash(bytes.first(n)) != checksum(entry, piece))
            return corrupt(fmt::format("{}: the checksum of {} bytes at offset {} is wrong",
                                       name_of(entry.key), n,
                                       entry.offset + piece * entry.piece_bytes));
        bytes = bytes.subspan(n);
    }
    return Status::ok();
}

std::string Pack::name_of(EntryKey key) const {
    if (kind_ == Kind::experts) return fmt::format("layer {} expert {}", key.layer, key.part);
    return run_name(key);
}

}  // namespace k3::pack
