// Verifying checkpoints and packs: every damage is found and placed, and nothing is read twice.

#include "launcher/verification.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/pack/make_pack.h"
#include "common/pack/pack.h"
#include "launcher/manifest.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;
using namespace k3::test;

namespace {

constexpr const char* kShard = "model-00003-of-000005.safetensors";

/// A copy of tiny-k3 and a place for journals.
struct Checked {
    CheckpointCopy copy{golden_dir() / "tiny-k3"};
    TempDir cache;
    VerifyOptions options() const {
        VerifyOptions options;
        options.journal = cache.path() / "journal";
        options.progress = [](std::uint64_t, std::uint64_t) { return true; };
        return options;
    }
    void record() const {
        auto recorded = record_checkpoint(copy.path(), options());
        REQUIRE_MESSAGE(recorded.has_value(), recorded.error().sentence());
    }
    Error refusal() const {
        auto verified = verify_checkpoint(copy.path(), options());
        REQUIRE_FALSE(verified.has_value());
        return verified.error();
    }
};

/// Three files of one, several and no parts, in a directory of their own.
struct SmallJob {
    TempDir dir;
    DigestJob job;
    SmallJob() {
        const std::vector<std::string> contents = {"abc", std::string(5 * 4096 + 17, 'x'), ""};
        for (std::size_t i = 0; i < contents.size(); ++i) {
            job.files.push_back(dir.path() / std::to_string(i));
            write_file(job.files.back(), contents[i]);
            add_parts(job.parts, i, contents[i].size(), 2 * 4096);
        }
        job.journal = dir.path() / "journal";
    }
};

bool go_on(std::uint64_t /*done*/, std::uint64_t /*total*/) { return true; }
bool stop(std::uint64_t /*done*/, std::uint64_t /*total*/) { return false; }

}  // namespace

TEST_CASE("a checkpoint without a manifest is verified in structure, and says what is unchecked") {
    Checked checked;
    auto verified = verify_checkpoint(checked.copy.path(), checked.options());
    REQUIRE_MESSAGE(verified.has_value(), verified.error().sentence());
    CHECK(contains(verified->what, "4 shards with "));
    CHECK(contains(verified->what, "contents are unchecked"));
    checked.copy.truncate(kShard, std::filesystem::file_size(checked.copy.file(kShard)) - 1);
    CHECK(checked.refusal().code == ErrorCode::corrupt);
    CHECK(contains(checked.refusal().message, kShard));
}

TEST_CASE("one flipped bit anywhere is found against the manifest, with file and place") {
    Checked checked;
    checked.record();
    auto verified = verify_checkpoint(checked.copy.path(), checked.options());
    REQUIRE_MESSAGE(verified.has_value(), verified.error().sentence());
    CHECK(contains(verified->what, "8 files, "));
    CHECK(contains(verified->what, "every checksum of k3pipe.manifest is right"));
    for (const char* name : {kShard, "model-00001-of-000005.safetensors", "tiktoken.model",
                             "config.json", "model.safetensors.index.json"}) {
        CAPTURE(name);
        const std::uint64_t bytes = std::filesystem::file_size(checked.copy.file(name));
        for (const std::uint64_t at : {std::uint64_t{0}, bytes / 2, bytes - 1}) {
            CAPTURE(at);
            checked.copy.flip_byte(name, at, 0x10);
            const Error error = checked.refusal();
            CHECK(error.code == ErrorCode::corrupt);
            CHECK(contains(error.message, "is damaged in 1 place: " + std::string(name) +
                                              " bytes 0 to " + std::to_string(bytes - 1)));
            checked.copy.flip_byte(name, at, 0x10);
        }
    }
    CHECK(verify_checkpoint(checked.copy.path(), checked.options()).has_value());
}

TEST_CASE("files that are absent, cut or longer are named with both sizes") {
    Checked checked;
    checked.record();
    const std::uint64_t bytes = std::filesystem::file_size(checked.copy.file(kShard));
    checked.copy.truncate(kShard, bytes - 10);
    CHECK(contains(checked.refusal().message, std::string(kShard) + " has " +
                                                  std::to_string(bytes - 10) +
                                                  " bytes instead of " + std::to_string(bytes)));
    write_file(checked.copy.file(kShard), std::string(bytes + 1, 'x'));
    CHECK(contains(checked.refusal().message, std::to_string(bytes + 1) + " bytes instead of"));
    checked.copy.remove(kShard);
    checked.copy.remove("tiktoken.model");
    const Error error = checked.refusal();
    CHECK(contains(error.message, "is damaged in 2 places"));
    CHECK(contains(error.message, std::string(kShard) + ": No such file"));
}

TEST_CASE("a manifest is not replaced, and a damaged one is not believed") {
    Checked checked;
    checked.record();
    auto again = record_checkpoint(checked.copy.path(), checked.options());
    REQUIRE_FALSE(again.has_value());
    CHECK(again.error().code == ErrorCode::invalid_argument);
    const std::string name(kManifestName);
    const std::string good = read_file(checked.copy.file(name));
    for (std::size_t at = 0; at < good.size(); ++at) {
        CAPTURE(at);
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ 1);
        write_file(checked.copy.file(name), bad);
        const auto read = read_manifest(checked.copy.file(name));
        REQUIRE_FALSE(read.has_value());
        CHECK(contains(read.error().message, name));
    }
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{10}, good.size() / 2, good.size() - 1}) {
        write_file(checked.copy.file(name), good.substr(0, size));
        CHECK_FALSE(read_manifest(checked.copy.file(name)).has_value());
    }
    std::string newer = good;
    newer.replace(newer.find("manifest 1"), 10, "manifest 2");
    write_file(checked.copy.file(name), newer);
    CHECK(checked.refusal().code == ErrorCode::incompatible);
}

TEST_CASE("sums of sha256sum are compared, whatever their form") {
    SmallJob files;
    const std::string sums = (files.dir.path() / "sums").string();
    const std::string abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    const std::string none = "E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B855";
    VerifyOptions options;
    options.journal = files.job.journal;
    options.progress = go_on;
    write_file(sums, "# released\n" + abc + "  ./0\r\n\n" + none + " *2");
    auto verified = verify_sha256(files.dir.path(), sums, options);
    REQUIRE_MESSAGE(verified.has_value(), verified.error().sentence());
    CHECK(contains(verified->what, "2 files, 3 B: every SHA-256"));
    write_file(files.job.files[0], "abd");
    auto refused = verify_sha256(files.dir.path(), sums, options);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::corrupt);
    CHECK(contains(refused.error().message, "the SHA-256 of 0 is "));
    CHECK(contains(refused.error().message, "instead of " + abc));
    for (const std::string& bad : {std::string("nonsense"), abc, abc + " x", std::string()}) {
        CAPTURE(bad);
        write_file(sums, bad);
        CHECK(read_sha256_sums(sums).error().code == ErrorCode::corrupt);
    }
    write_file(sums, abc + "  absent\n");
    CHECK(verify_sha256(files.dir.path(), sums, options).error().code == ErrorCode::not_found);
}

TEST_CASE("every piece of a pack is verified, and damage is named by entry") {
    const auto model = model::open_model(golden_dir() / "tiny-k3").value();
    TempDir dir;
    const auto file = dir.path() / "pack";
    REQUIRE(pack::make_trunk_pack(model, 0, 13, file, go_on).has_value());
    VerifyOptions options;
    options.journal = dir.path() / "journal";
    options.progress = go_on;
    auto verified = verify_pack(file, options);
    REQUIRE_MESSAGE(verified.has_value(), verified.error().sentence());
    CHECK(contains(verified->what, "trunk pack of 15 entries"));
    std::string bytes = read_file(file);
    const auto pack = pack::Pack::open(file).value();
    for (const pack::EntryKey key : {pack::EntryKey{4, 0}, pack::EntryKey{0, 1}})
        bytes[pack->find(key)->offset + 100] ^= 1;
    const pack::Entry& layer = *pack->find({5, 0});
    CHECK(layer.n_pieces() > 3);
    bytes[layer.offset + layer.stored_bytes() - 1] ^= 1;  // in its last piece
    write_file(file, bytes);
    auto refused = verify_pack(file, options);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::corrupt);
    CHECK(contains(refused.error().message, "is damaged in 3 places: the embedding, bytes "));
    CHECK(contains(refused.error().message, "; layer 4, bytes "));
    CHECK(contains(refused.error().message, "; layer 5, bytes "));
}

TEST_CASE("what a journal of the same files holds is not read again, and a torn line is") {
    SmallJob small;
    const Digests all = run_digests(small.job, go_on).value();
    CHECK(all.resumed_bytes == 0);
    CHECK_FALSE(std::filesystem::exists(small.job.journal));  // all done
    REQUIRE(all.parts.size() == 5);

    auto stopped = run_digests(small.job, stop);
    REQUIRE_FALSE(stopped.has_value());
    CHECK(stopped.error().code == ErrorCode::cancelled);
    const std::string journal = read_file(small.job.journal);
    const std::string identity = journal.substr(0, journal.find('\n') + 1);
    // Other digests than the files have: what comes back shows where it comes from.
    const std::string noted(16, 'a');
    write_file(small.job.journal, identity + "1 " + noted + "\n3 " + noted.substr(0, 9));
    const Digests resumed = run_digests(small.job, go_on).value();
    CHECK(resumed.resumed_bytes == 2 * 4096);
    for (std::size_t i = 0; i < 5; ++i)
        CHECK(resumed.parts[i].hex == (i == 1 ? noted : all.parts[i].hex));

    SUBCASE("files that were changed since are read again") {
        write_file(small.job.files[1], std::string(5 * 4096 + 17, 'y'));
        write_file(small.job.journal, identity + "1 " + noted + "\n");
    }
    SUBCASE("and so are those of another job") {
        write_file(small.job.journal, "0123456789abcdef\n1 " + noted + "\n");
    }
    SUBCASE("a line that cannot be ends the journal") {
        write_file(small.job.journal, identity + "9 " + noted + "\n1 " + noted + "\n");
    }
    CHECK(run_digests(small.job, go_on)->resumed_bytes == 0);
}

TEST_CASE("two at a time do not share a journal; without one nothing is kept") {
    SmallJob small;
    const Fd other(::open(small.job.journal.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    REQUIRE(::flock(other.get(), LOCK_EX) == 0);
    auto refused = run_digests(small.job, go_on);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::resource_exhausted);
    small.job.journal.clear();
    CHECK(run_digests(small.job, go_on).has_value());
}
