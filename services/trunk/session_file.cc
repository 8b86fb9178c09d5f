#include "services/trunk/session_file.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <memory>
#include <utility>

#include "common/base/check.h"
#include "common/storage/atomic_file.h"
#include "common/storage/file.h"

namespace k3::trunk {

namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

constexpr std::array<char, 8> kMagic = {'K', '3', 'S', 'E', 'S', 'S', 'N', '\0'};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kChecksumBytes = sizeof(std::uint64_t);
/// Between a read and the sum over it the bytes are still in the processor's cache.
constexpr std::size_t kPieceBytes = std::size_t{1} << 20U;

/// docs/formats/session.md.
struct Header {
    std::array<char, 8> magic = kMagic;
    std::uint32_t version = kVersion;
    std::uint32_t header_bytes = 0;
    std::uint64_t file_bytes = 0;
    std::uint64_t n_ids = 0;
    std::array<char, 32> fingerprint{};
    std::uint32_t first_layer = 0;
    std::uint32_t n_layers = 0;
    std::uint32_t total_layers = 0;
    std::uint32_t latent_value_bytes = 0;
    float lora_norm_eps = 0;
    std::uint32_t zero = 0;
    std::uint64_t checksum = 0;  // of everything before it
};
static_assert(sizeof(Header) == 96 && offsetof(Header, n_ids) == 24 &&
              offsetof(Header, first_layer) == 64 && offsetof(Header, checksum) == 88);

/// XXH3-64 over bytes that come in pieces.
class Checksum {
  public:
    Checksum() : state_(XXH3_createState()) {
        K3_CHECK(state_ != nullptr, "no memory for a checksum");
        XXH3_64bits_reset(state_.get());
    }
    void add(std::span<const std::byte> bytes) noexcept {
        XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
    }
    std::uint64_t value() const noexcept { return XXH3_64bits_digest(state_.get()); }

  private:
    struct Free {
        void operator()(XXH3_state_t* state) const noexcept { XXH3_freeState(state); }
    };
    std::unique_ptr<XXH3_state_t, Free> state_;
};

std::uint64_t checksum_of(const Header& header) {
    return XXH3_64bits(&header, offsetof(Header, checksum));
}

std::string layers_text(std::uint32_t first, std::uint32_t n, std::uint32_t total) {
    return std::to_string(first) + "-" + std::to_string(std::uint64_t{first} + n - 1) + " of " +
           std::to_string(total);
}

std::string epsilon_text(float epsilon) {
    std::array<char, 32> text{};
    const auto end = std::to_chars(text.data(), text.data() + text.size(), epsilon).ptr;
    return {text.data(), end};
}

std::string cache_text(std::uint32_t value_bytes) {
    for (const model::MlaCache cache : {model::MlaCache::f32, model::MlaCache::bf16})
        if (value_bytes == model::value_bytes(cache)) return std::string(to_string(cache));
    return "values of " + std::to_string(value_bytes) + " bytes";
}

Status check_going_on(const GiveUp& give_up, const std::filesystem::path& path) {
    if (!give_up || !give_up()) return Status::ok();
    return Error{ErrorCode::cancelled, "work on " + path.string() + " was given up",
                 "ask again when the trunk runs"};
}

Status append_section(storage::AtomicFile& file, const std::filesystem::path& path,
                      std::span<const std::byte> first, std::span<const std::byte> second,
                      const GiveUp& give_up) {
    Checksum checksum;
    for (const std::span<const std::byte> part : {first, second}) {
        for (std::size_t at = 0; at < part.size(); at += kPieceBytes) {
            const auto piece = part.subspan(at, std::min(kPieceBytes, part.size() - at));
            checksum.add(piece);
            RETURN_IF_ERROR(check_going_on(give_up, path));
            RETURN_IF_ERROR(file.append(piece));
        }
    }
    const std::uint64_t sum = checksum.value();
    return file.append(std::as_bytes(std::span(&sum, 1)));
}

Error damaged(const std::filesystem::path& path, const std::string& what) {
    return Error{ErrorCode::corrupt, path.string() + " " + what,
                 "remove the file and save the session again"};
}

/// Fills both parts from `offset` on; `what` names the section in an error.
Status read_section(int fd, const std::filesystem::path& path, std::uint64_t offset,
                    std::span<std::byte> first, std::span<std::byte> second,
                    const std::string& what, const GiveUp& give_up) {
    Checksum checksum;
    for (const std::span<std::byte> part : {first, second}) {
        for (std::size_t at = 0; at < part.size(); at += kPieceBytes) {
            const auto piece = part.subspan(at, std::min(kPieceBytes, part.size() - at));
            RETURN_IF_ERROR(check_going_on(give_up, path));
            RETURN_IF_ERROR(storage::read_exactly(fd, offset, piece, path));
            checksum.add(piece);
            offset += piece.size();
        }
    }
    std::uint64_t saved = 0;
    RETURN_IF_ERROR(
        storage::read_exactly(fd, offset, std::as_writable_bytes(std::span(&saved, 1)), path));
    if (saved == checksum.value()) return Status::ok();
    return damaged(path, "is damaged: the checksum of " + what + " does not match");
}

Status check_header(const Header& header, const std::filesystem::path& path,
                    std::uint64_t actual_bytes) {
    if (header.magic != kMagic)
        return Error{ErrorCode::corrupt, path.string() + " is not a saved session",
                     "give the name that a session was saved under"};
    if (header.version != kVersion)
        return Error{ErrorCode::unsupported,
                     path.string() + " has version " + std::to_string(header.version) +
                         " of the session format, this program reads version " +
                         std::to_string(kVersion),
                     "save the session again with this program"};
    if (header.checksum != checksum_of(header) || header.header_bytes != sizeof(Header))
        return damaged(path, "is damaged: the checksum of its header does not match");
    if (header.file_bytes != actual_bytes)
        return damaged(path, "has " + std::to_string(actual_bytes) + " bytes instead of " +
                                 std::to_string(header.file_bytes));
    return Status::ok();
}

Status check_origin(const Header& header, const std::filesystem::path& path,
                    const SessionOrigin& origin) {
    const std::string fingerprint(header.fingerprint.begin(), header.fingerprint.end());
    auto differs = [&](const std::string& what, const std::string& remedy) {
        return Error{ErrorCode::incompatible, path.string() + " was saved " + what, remedy};
    };
    if (fingerprint != origin.fingerprint)
        return differs("from checkpoint " + fingerprint + ", this stage serves checkpoint " +
                           origin.fingerprint,
                       "use the checkpoint it was saved from");
    if (header.first_layer != origin.range.first || header.n_layers != origin.range.count)
        return differs("by a stage of layers " +
                           layers_text(header.first_layer, header.n_layers, header.total_layers) +
                           ", this stage has layers " +
                           layers_text(origin.range.first, origin.range.count, origin.total_layers),
                       "cut the layers into stages as they were when it was saved");
    if (header.latent_value_bytes != model::value_bytes(origin.cache))
        return differs("with MLA latents in " + cache_text(header.latent_value_bytes) +
                           ", this stage keeps them in " + std::string(to_string(origin.cache)),
                       "start every k3-trunk with the --mla-cache that it was saved with, or save "
                       "the session again");
    if (header.lora_norm_eps != origin.lora_norm_eps)
        return differs("with --mla-norm-eps " + epsilon_text(header.lora_norm_eps) +
                           ", this stage has " + epsilon_text(origin.lora_norm_eps),
                       "start k3-trunk with the same --mla-norm-eps");
    return Status::ok();
}

}  // namespace

/// Header, ids, layers, each but the header followed by its checksum.
std::uint64_t session_file_bytes(const SessionLayout& layout, std::uint64_t n_ids) {
    std::uint64_t bytes = sizeof(Header) + n_ids * sizeof(std::uint32_t) + kChecksumBytes;
    for (std::uint32_t layer = layout.range().first; layer < layout.range().end(); ++layer)
        bytes += layout.layer_bytes(layer, n_ids) + kChecksumBytes;
    return bytes;
}

Result<std::uint64_t> write_session_file(const std::filesystem::path& path,
                                         const SessionOrigin& origin, const SessionLayout& layout,
                                         std::span<const std::uint32_t> ids, Session& session,
                                         const GiveUp& give_up) {
    K3_CHECK(ids.size() == session.position(), std::to_string(ids.size()));
    Header header;
    K3_CHECK(origin.fingerprint.size() == header.fingerprint.size(), origin.fingerprint);
    header.header_bytes = sizeof(Header);
    header.file_bytes = session_file_bytes(layout, ids.size());
    header.n_ids = ids.size();
    std::copy(origin.fingerprint.begin(), origin.fingerprint.end(), header.fingerprint.begin());
    header.first_layer = origin.range.first;
    header.n_layers = origin.range.count;
    header.total_layers = origin.total_layers;
    header.latent_value_bytes = model::value_bytes(origin.cache);
    header.lora_norm_eps = origin.lora_norm_eps;
    header.checksum = checksum_of(header);

    ASSIGN_OR_RETURN(storage::AtomicFile file,
                     storage::AtomicFile::create(path, header.file_bytes));
    RETURN_IF_ERROR(file.append(std::as_bytes(std::span(&header, 1))));
    RETURN_IF_ERROR(append_section(file, path, std::as_bytes(ids), {}, give_up));
    for (std::uint32_t layer = origin.range.first; layer < origin.range.end(); ++layer) {
        const LayerState state = session.layer_state(layer, ids.size());
        RETURN_IF_ERROR(append_section(file, path, state.first, state.second, give_up));
    }
    RETURN_IF_ERROR(file.commit());
    return header.file_bytes;
}

bool is_session_file(const std::filesystem::path& path) {
    auto file = storage::open_regular(path);
    std::array<char, kMagic.size()> magic{};
    return file.has_value() && file->bytes >= magic.size() &&
           storage::read_exactly(file->fd.get(), 0, std::as_writable_bytes(std::span(magic)), path)
               .has_value() &&
           magic == kMagic;
}

Result<SessionFile> SessionFile::open(const std::filesystem::path& path,
                                      const SessionOrigin& origin, const SessionLayout& layout,
                                      std::uint64_t max_positions) {
    ASSIGN_OR_RETURN(storage::OpenFile opened, storage::open_regular(path));
    ::flock(opened.fd.get(), LOCK_SH | LOCK_NB);
    Header header;
    if (opened.bytes < sizeof(header))
        return damaged(path, "is not a saved session: it has " + std::to_string(opened.bytes) +
                                 " bytes, less than the " + std::to_string(sizeof(header)) +
                                 " of a header");
    RETURN_IF_ERROR(storage::read_exactly(opened.fd.get(), 0,
                                          std::as_writable_bytes(std::span(&header, 1)), path));
    RETURN_IF_ERROR(check_header(header, path, opened.bytes));
    RETURN_IF_ERROR(check_origin(header, path, origin));
    // The checksum is right, so these are what a program wrote; it need not have been a sound one.
    if (header.n_ids == 0 || header.n_ids > max_positions)
        return damaged(path, "holds " + std::to_string(header.n_ids) + " positions, 1 to " +
                                 std::to_string(max_positions) + " are possible");
    if (header.file_bytes != session_file_bytes(layout, header.n_ids))
        return damaged(path, "has " + std::to_string(header.file_bytes) + " bytes, " +
                                 std::to_string(header.n_ids) + " positions take " +
                                 std::to_string(session_file_bytes(layout, header.n_ids)));
    // A directory that may only be read has no limit to be removed by either.
    ::futimens(opened.fd.get(), nullptr);
    SessionFile file(path, std::move(opened.fd), layout);
    RETURN_IF_ERROR(file.read_ids(header.n_ids));
    return file;
}

Status SessionFile::read_ids(std::uint64_t n_ids) {
    ids_.resize(n_ids);
    return read_section(fd_.get(), path_, sizeof(Header), std::as_writable_bytes(std::span(ids_)),
                        {}, "its ids", {});
}

Status SessionFile::read_into(Session& session, const GiveUp& give_up) const {
    K3_CHECK(ids_.size() <= session.max_positions(), std::to_string(ids_.size()));
    std::uint64_t offset = sizeof(Header) + ids_.size() * sizeof(std::uint32_t) + kChecksumBytes;
    for (std::uint32_t layer = layout_.range().first; layer < layout_.range().end(); ++layer) {
        const LayerState state = session.layer_state(layer, ids_.size());
        RETURN_IF_ERROR(read_section(fd_.get(), path_, offset, state.first, state.second,
                                     "layer " + std::to_string(layer), give_up));
        offset += layout_.layer_bytes(layer, ids_.size()) + kChecksumBytes;
    }
    session.set_position(ids_.size());
    return Status::ok();
}

}  // namespace k3::trunk
