// MLA latents kept in bf16: other logits than those of fp32, and then the same bits whatever the
// chunk, the threads, the instruction set, the cut into stages or the way through a file.

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "services/trunk/session_file.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"
#include "tests/unit/services/trunk/harness.h"

namespace k3::test {

namespace {

using model::MlaCache;

constexpr std::uint32_t kMlaLayer = 3;  // the first one

/// Longer than two attention blocks.
const std::vector<std::uint32_t>& long_prompt() {
    static const std::vector<std::uint32_t> ids = [] {
        std::vector<std::uint32_t> made;
        for (std::uint32_t i = 0; i < 150; ++i) made.push_back(i * 37 % 700);
        return made;
    }();
    return ids;
}

Harness::Options bf16() {
    Harness::Options options;
    options.cache = MlaCache::bf16;
    return options;
}

std::vector<float> logits_of(const Harness::Options& options, std::size_t chunk) {
    Harness trunk(tiny_model(), options);
    trunk.open(1);
    return trunk.feed(1, long_prompt(), chunk);
}

/// In one step, as the definition computes it.
const std::vector<float>& defined_logits() {
    static const std::vector<float> logits = [] {
        Harness::Options options = bf16();
        options.table = kernels::available_kernels().tables[0];
        options.n_threads = 1;
        return logits_of(options, long_prompt().size());
    }();
    return logits;
}

bool has_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <typename T>
std::vector<T> values_at(const std::byte* first, std::size_t n) {
    std::vector<T> values(n);
    std::memcpy(values.data(), first, n * sizeof(T));
    return values;
}

trunk::SessionOrigin origin_of_all(MlaCache cache) {
    const model::ModelConfig& config = tiny_model().config;
    return {tiny_model().fingerprint,
            {0, config.n_layers},
            config.n_layers,
            config.mla.lora_norm_eps,
            cache};
}

trunk::SessionLayout layout_of(MlaCache cache) {
    model::ModelConfig config = tiny_model().config;
    config.mla.cache = cache;
    return {config, {0, config.n_layers}, 1};
}

}  // namespace

TEST_CASE("bf16 latents are those of fp32 rounded to nearest even, and take half the memory") {
    const model::MlaConfig& mla = tiny_model().config.mla;
    Harness exact(tiny_model());
    Harness rounded(tiny_model(), bf16());
    for (Harness* trunk : {&exact, &rounded}) {
        trunk->open(1);
        trunk->feed(1, long_prompt(), 64);
    }
    // What enters the first MLA layer is the same in both.
    const trunk::MlaState wide = exact.session(1, kMlaLayer).mla(kMlaLayer);
    const trunk::MlaState narrow = rounded.session(1, kMlaLayer).mla(kMlaLayer);
    const auto check = [](const std::byte* floats, const std::byte* halves, std::size_t n) {
        const auto expected = values_at<float>(floats, n);
        std::vector<std::uint16_t> bits(n);
        kernels::available_kernels().tables[0]->round_to_bf16(expected.data(), n, bits.data());
        CHECK(bits == values_at<std::uint16_t>(halves, n));
    };
    check(wide.latent, narrow.latent, long_prompt().size() * mla.kv_lora_rank);
    check(wide.rope, narrow.rope, long_prompt().size() * mla.qk_rope_head_dim);
    for (const std::uint64_t n : {1, 150})
        CHECK(2 * layout_of(MlaCache::bf16).layer_bytes(kMlaLayer, n) ==
              layout_of(MlaCache::f32).layer_bytes(kMlaLayer, n));
    CHECK(layout_of(MlaCache::bf16).bytes(4096) < layout_of(MlaCache::f32).bytes(4096));
}

TEST_CASE("the output with bf16 latents is close to that of fp32 and another one") {
    const std::vector<float> exact = logits_of({}, 64);
    const std::vector<float>& rounded = defined_logits();
    REQUIRE(exact.size() == rounded.size());
    CHECK_FALSE(has_bits(exact, rounded));
    double error = 0;
    double size = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        error += (double{exact[i]} - rounded[i]) * (double{exact[i]} - rounded[i]);
        size += double{exact[i]} * exact[i];
    }
    // Picks of experts that are nearly equal change places, in a model of random weights often.
    CHECK(error < size * 0.1);
}

TEST_CASE("with bf16 latents chunks, threads, instruction sets and stages change no bit") {
    for (const std::size_t chunk : {1, 65}) {
        CAPTURE(chunk);
        CHECK(has_bits(logits_of(bf16(), chunk), defined_logits()));
    }
    const kernels::KernelTables available = kernels::available_kernels();
    for (std::size_t i = 0; i < available.count; ++i) {
        for (const int n_threads : {1, 4}) {
            if (i == 0 && n_threads == 1) continue;  // the definition
            CAPTURE(available.tables[i]->isa);
            CAPTURE(n_threads);
            Harness::Options options = bf16();
            options.table = available.tables[i];
            options.n_threads = n_threads;
            CHECK(has_bits(logits_of(options, 50), defined_logits()));
        }
    }
    for (const std::vector<std::uint32_t>& cuts : {std::vector<std::uint32_t>{3}, {5, 7}}) {
        Harness::Options options = bf16();
        options.cuts = cuts;
        CHECK(has_bits(logits_of(options, 40), defined_logits()));
    }
}

TEST_CASE("with bf16 latents a session in company, and a fork of it, give the same bits") {
    Harness trunk(tiny_model(), bf16());
    const std::vector<std::uint32_t>& ids = long_prompt();
    trunk.open(1, 160);
    trunk.open(2, 400);
    for (std::size_t i = 0; i < 100; ++i)
        REQUIRE(trunk.step({{1, ids[i]}, {2, ids[i] + 1}, {2, 5}}, {0}).has_value());
    trunk.fork(1, 3, 151);  // an odd number of positions
    const std::vector<std::uint32_t> rest(ids.begin() + 100, ids.end());
    const std::vector<float> expected(
        defined_logits().end() - static_cast<std::ptrdiff_t>(rest.size() * trunk.vocab_size()),
        defined_logits().end());
    CHECK(has_bits(trunk.feed(3, rest, 20), expected));
    CHECK(has_bits(trunk.feed(1, rest, 1), expected));
}

TEST_CASE("a saved session with bf16 latents goes on with the same bits; the other kind refuses") {
    TempDir dir;
    const std::vector<std::uint32_t>& ids = long_prompt();
    const std::vector<std::uint32_t> head(ids.begin(), ids.begin() + 77);
    const std::vector<std::uint32_t> rest(ids.begin() + 77, ids.end());
    for (const MlaCache cache : {MlaCache::bf16, MlaCache::f32}) {
        const MlaCache other = cache == MlaCache::f32 ? MlaCache::bf16 : MlaCache::f32;
        CAPTURE(std::string(to_string(cache)));
        const auto path = dir.path() / std::string(to_string(cache));
        const trunk::SessionLayout layout = layout_of(cache);
        Harness::Options options;
        options.cache = cache;
        Harness trunk(tiny_model(), options);
        trunk.open(1);
        trunk.feed(1, head, 77);
        REQUIRE(
            trunk::write_session_file(path, origin_of_all(cache), layout, head, trunk.session(1, 0))
                .has_value());
        auto file = trunk::SessionFile::open(path, origin_of_all(cache), layout, 4096);
        REQUIRE_MESSAGE(file.has_value(), file.error().sentence());
        trunk.open(2, 301);
        REQUIRE(file->read_into(trunk.session(2, 0)).has_value());
        CHECK(has_bits(trunk.feed(2, rest, 9), trunk.feed(1, rest, 10)));

        const Error error =
            trunk::SessionFile::open(path, origin_of_all(other), layout_of(other), 4096).error();
        CHECK(error.code == ErrorCode::incompatible);
        CHECK_MESSAGE(contains(error.message,
                               "with MLA latents in " + std::string(to_string(cache)) +
                                   ", this stage keeps them in " + std::string(to_string(other))),
                      error.message);
        CHECK(contains(error.remedy, "--mla-cache"));
    }
}

}  // namespace k3::test
