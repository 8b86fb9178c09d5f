#include "launcher/verification.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <utility>
#include <vector>

#include "common/base/settings.h"
#include "common/model/load.h"
#include "common/model/tensor_names.h"
#include "common/pack/pack.h"
#include "launcher/manifest.h"

namespace k3::launcher {

namespace {

/// Read at a time, of the pieces of a pack.
constexpr std::uint64_t kPackReadBytes = std::uint64_t{4} << 20U;

namespace fs = std::filesystem;

/// Files of a checkpoint besides its shards, where they are there.
constexpr std::string_view kSmallFiles[] = {"config.json", storage::kIndexName,
                                            "generation_config.json", "tiktoken.model",
                                            "tokenizer_config.json"};

/// Damaged parts in one sentence: the first ones by name, the others by number.
class Damage {
  public:
    void add(std::string what) {
        if (++n_ <= kShown) shown_ += (n_ == 1 ? "" : "; ") + std::move(what);
    }
    Status result(const fs::path& path, std::string_view remedy) const {
        if (n_ == 0) return Status::ok();
        std::string text = fmt::format("{} is damaged in {} place{}: {}", path.string(), n_,
                                       n_ == 1 ? "" : "s", shown_);
        if (n_ > kShown) text += fmt::format("; and {} more", n_ - kShown);
        return Error{ErrorCode::corrupt, std::move(text), std::string(remedy)};
    }

  private:
    static constexpr std::size_t kShown = 5;
    std::size_t n_ = 0;
    std::string shown_;
};

constexpr std::string_view kCopyFiles = "copy the named files again from their source";

std::string place_of(const std::string& file, const FilePart& part) {
    return fmt::format("{} bytes {} to {}", file, part.offset, part.offset + part.bytes - 1);
}

DigestJob job_for(const fs::path& path, DigestKind kind, const VerifyOptions& options) {
    DigestJob job;
    job.kind = kind;
    job.journal = options.journal.empty() ? journal_for(path, kind) : options.journal;
    job.n_threads = options.n_threads;
    return job;
}

/// Parts of as many pieces of an entry as are read at a time, and what is to come out.
void add_pieces(const pack::Pack& pack, const pack::Entry& entry, std::vector<FilePart>& parts,
                std::vector<std::uint64_t>& expected) {
    const std::uint64_t most = std::max<std::uint64_t>(1, kPackReadBytes / entry.piece_bytes);
    for (std::uint64_t first = 0; first < entry.n_pieces(); first += most) {
        const std::uint64_t n = std::min(most, entry.n_pieces() - first);
        parts.push_back({0, entry.offset + first * entry.piece_bytes,
                         pack::Pack::bytes_of(entry, {first, n}), entry.piece_bytes});
        std::vector<std::uint64_t> checksums;
        for (std::uint64_t piece = first; piece < first + n; ++piece)
            checksums.push_back(pack.checksum(entry, piece));
        expected.push_back(pack::format::hash(std::as_bytes(std::span(checksums))));
    }
}

/// Sizes, index, headers, and that nothing is missing.
Result<model::Model> check_structure(const fs::path& directory) {
    ASSIGN_OR_RETURN(model::Model model, model::open_model(directory));
    const std::uint32_t n = model.config.n_layers;
    RETURN_IF_ERROR(model::check_trunk_tensors(*model.checkpoint, model.config, 0, n));
    RETURN_IF_ERROR(model::check_expert_tensors(*model.checkpoint, model.config, 0, n));
    return model;
}

std::string structure_of(const model::Model& model) {
    return fmt::format("{} shards with {} tensors: sizes, index and headers are right",
                       model.checkpoint->n_shards(), model.checkpoint->tensors().size());
}

/// What a manifest covers, in a fixed order.
std::vector<std::string> files_of(const model::Model& model) {
    std::vector<std::string> names;
    std::error_code ignored;
    for (const std::string_view name : kSmallFiles)
        if (fs::exists(model.checkpoint->directory() / name, ignored)) names.emplace_back(name);
    for (std::uint32_t i = 0; i < model.checkpoint->n_shards(); ++i)
        names.push_back(model.checkpoint->shard_path(i).filename().string());
    std::ranges::sort(names);
    return names;
}

}  // namespace

Result<Verified> verify_pack(const fs::path& file, const VerifyOptions& options) {
    ASSIGN_OR_RETURN(const auto pack, pack::Pack::open(file));
    DigestJob job = job_for(file, DigestKind::xxh3, options);
    job.files = {file};
    std::vector<std::uint64_t> expected;
    std::vector<std::size_t> first_parts;  // of each entry
    for (const pack::Entry& entry : pack->entries()) {
        first_parts.push_back(job.parts.size());
        add_pieces(*pack, entry, job.parts, expected);
    }
    ASSIGN_OR_RETURN(const Digests digests, run_digests(job, options.progress));
    Damage damage;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const PartDigest& part = digests.parts[i];
        if (part.error) {
            damage.add(part.error->message);
        } else if (part.hex != xxh3_hex(expected[i])) {
            const auto next = std::ranges::upper_bound(first_parts, i);
            const auto entry = static_cast<std::size_t>(next - first_parts.begin()) - 1;
            damage.add(place_of(pack->name_of(pack->entries()[entry].key) + ",", job.parts[i]));
        }
    }
    RETURN_IF_ERROR(damage.result(
        file, "make the pack again with k3pipe pack, or copy it again from where it is right"));
    return Verified{fmt::format("{} pack of {} entries, {}: every checksum is right",
                                pack::to_string(pack->kind()), pack->entries().size(),
                                format_bytes(pack->file_bytes())),
                    digests.resumed_bytes};
}

Result<Verified> verify_checkpoint(const fs::path& directory, const VerifyOptions& options) {
    const fs::path path = directory / kManifestName;
    Manifest manifest;
    std::error_code ignored;
    const bool recorded = fs::exists(path, ignored);
    if (recorded) {
        ASSIGN_OR_RETURN(manifest, read_manifest(path));
    }
    // Before the structure: of a truncated shard the manifest knows more than its header.
    Damage damage;
    DigestJob job = job_for(directory, DigestKind::xxh3, options);
    std::vector<const std::string*> expected;
    std::uint64_t total = 0;
    for (const ManifestFile& file : manifest.files) {
        std::error_code failure;
        const std::uint64_t bytes = fs::file_size(directory / file.name, failure);
        if (failure)
            damage.add(fmt::format("{}: {}", file.name, failure.message()));
        else if (bytes != file.bytes)
            damage.add(fmt::format("{} has {} bytes instead of {}", file.name, bytes, file.bytes));
        else {
            add_parts(job.parts, job.files.size(), bytes, kManifestPartBytes);
            job.files.push_back(directory / file.name);
            for (const std::string& hex : file.parts) expected.push_back(&hex);
            total += bytes;
        }
    }
    Verified verified;
    if (recorded) {
        ASSIGN_OR_RETURN(const Digests digests, run_digests(job, options.progress));
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const PartDigest& part = digests.parts[i];
            const std::string name = job.files[job.parts[i].file].filename().string();
            if (part.error)
                damage.add(part.error->message);
            else if (part.hex != *expected[i])
                damage.add(place_of(name, job.parts[i]));
        }
        verified.resumed_bytes = digests.resumed_bytes;
    }
    RETURN_IF_ERROR(damage.result(directory, kCopyFiles));
    ASSIGN_OR_RETURN(const model::Model model, check_structure(directory));
    verified.what = structure_of(model);
    if (recorded)
        verified.what += fmt::format("; {} files, {}: every checksum of {} is right",
                                     manifest.files.size(), format_bytes(total), kManifestName);
    else
        verified.what += fmt::format(
            "; contents are unchecked, as there is no {} (k3pipe verify "
            "--record writes one)",
            kManifestName);
    return verified;
}

Result<Verified> verify_sha256(const fs::path& directory, const fs::path& sums,
                               const VerifyOptions& options) {
    ASSIGN_OR_RETURN(const std::vector<Sha256Sum> expected, read_sha256_sums(sums));
    DigestJob job = job_for(directory, DigestKind::sha256, options);
    std::uint64_t total = 0;
    for (const Sha256Sum& sum : expected) {
        const fs::path file = directory / sum.name;
        ASSIGN_OR_RETURN(const storage::OpenFile opened, storage::open_regular(file));
        job.parts.push_back({job.files.size(), 0, opened.bytes});
        job.files.push_back(file);
        total += opened.bytes;
    }
    ASSIGN_OR_RETURN(const Digests digests, run_digests(job, options.progress));
    Damage damage;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const PartDigest& part = digests.parts[i];
        if (part.error)
            damage.add(part.error->message);
        else if (part.hex != expected[i].hex)
            damage.add(fmt::format("the SHA-256 of {} is {} instead of {}", expected[i].name,
                                   part.hex, expected[i].hex));
    }
    RETURN_IF_ERROR(damage.result(directory, kCopyFiles));
    return Verified{fmt::format("{} files, {}: every SHA-256 of {} is right", expected.size(),
                                format_bytes(total), sums.string()),
                    digests.resumed_bytes};
}

Result<Verified> record_checkpoint(const fs::path& directory, const VerifyOptions& options) {
    const fs::path path = directory / kManifestName;
    RETURN_IF_ERROR(check_no_manifest(path));
    ASSIGN_OR_RETURN(const model::Model model, check_structure(directory));
    DigestJob job = job_for(directory, DigestKind::xxh3, options);
    Manifest manifest;
    std::uint64_t total = 0;
    for (const std::string& name : files_of(model)) {
        ASSIGN_OR_RETURN(const storage::OpenFile opened, storage::open_regular(directory / name));
        add_parts(job.parts, job.files.size(), opened.bytes, kManifestPartBytes);
        job.files.push_back(directory / name);
        manifest.files.push_back({name, opened.bytes, {}});
        total += opened.bytes;
    }
    ASSIGN_OR_RETURN(Digests digests, run_digests(job, options.progress));
    for (std::size_t i = 0; i < job.parts.size(); ++i) {
        if (digests.parts[i].error) return *std::move(digests.parts[i].error);
        manifest.files[job.parts[i].file].parts.push_back(std::move(digests.parts[i].hex));
    }
    RETURN_IF_ERROR(write_manifest(manifest, path));
    return Verified{fmt::format("{}; {} files, {} are recorded in {}", structure_of(model),
                                manifest.files.size(), format_bytes(total), kManifestName),
                    digests.resumed_bytes};
}

}  // namespace k3::launcher
