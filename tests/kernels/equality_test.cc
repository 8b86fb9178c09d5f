// Every variant gives the bits of the scalar definition, for every operation, shape and number of
// threads; and where two arguments may be the same, that changes nothing either.

#include <doctest/doctest.h>

#include <cmath>

#include "common/kernels/parallel.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/operations.h"

namespace k3::test {

namespace {

using kernels::KernelTable;
using kernels::KernelTables;

static_assert(sizeof(KernelTable) == 19 * sizeof(void*),
              "a new entry of KernelTable needs an entry in operations.cc");

/// Work from which threads come in (common/kernels/parallel.cc), and the most that is repeated for
/// the scalar variant, whose fma is a library call on older baselines.
constexpr double kThreadedFlops = 2e5;
constexpr double kRepeatedScalarFlops = 5e6;

void check_variants(const Operation& operation, const Shape& shape, Values values) {
    INFO(operation.name << " " << operation.sizes << " = " << shape.a << " " << shape.b << " "
                        << shape.c << ", skew " << shape.skew << ", extreme "
                        << (values == Values::extreme));
    const Call call = operation.make(shape, values);
    const auto run = [&](const KernelTable& table, int n_threads) {
        kernels::set_threads(n_threads);
        call.reset();
        call.run(table);
        return call.result();
    };
    const KernelTables available = kernels::available_kernels();
    const std::vector<std::uint32_t> expected = run(*available.tables[0], 1);
    for (std::size_t i = 0; i < available.count; ++i) {
        for (int n_threads : {1, 2, 4}) {
            if (i == 0 && (n_threads == 1 || call.flops > kRepeatedScalarFlops)) continue;
            if (n_threads > 1 && call.flops < kThreadedFlops) continue;
            INFO("variant " << available.tables[i]->isa << ", threads " << n_threads);
            const bool same = run(*available.tables[i], n_threads) == expected;
            CHECK(same);
        }
    }
    CHECK(call.guards_intact());
}

}  // namespace

TEST_CASE("every variant gives the scalar's bits on ordinary values, on 1, 2 and 4 threads") {
    for (const Operation& operation : operations())
        for (const Shape& shape : operation.test_shapes)
            check_variants(operation, shape, Values::ordinary);
}

TEST_CASE("every variant gives the scalar's bits on zeros, subnormals, infinities and NaNs") {
    for (const Operation& operation : operations())
        for (const Shape& shape : operation.test_shapes)
            if (shape.a * shape.b * shape.c < 100'000)
                check_variants(operation, shape, Values::extreme);
}

TEST_CASE("an output that may be the input gives the same bits") {
    const KernelTables available = kernels::available_kernels();
    for (std::size_t i = 0; i < available.count; ++i) {
        const KernelTable& table = *available.tables[i];
        for (std::size_t n : {1, 3, 16, 31, 64, 97, 200}) {
            INFO(table.isa << ", n = " << n);
            Random random(n);
            const Buffer<float> first = random_floats(n, 1, Values::ordinary, random);
            const Buffer<float> second = random_floats(n, 1, Values::ordinary, random);
            const auto check = [&](const char* what, auto run) {
                INFO(what);
                Buffer<float> apart(n, 1);
                run(first.data(), apart.data());
                Buffer<float> same = first;
                run(same.data(), same.data());
                std::vector<std::uint32_t> bits_apart;
                std::vector<std::uint32_t> bits_same;
                append_bits(apart.all(), bits_apart);
                append_bits(same.all(), bits_same);
                CHECK(bits_apart == bits_same);
            };
            check("rms_norm",
                  [&](const float* x, float* y) { table.rms_norm(x, second.data(), n, 1e-5F, y); });
            check("l2_norm",
                  [&](const float* x, float* y) { table.l2_norm(x, n, 1e-6F, 2.0F, y); });
            check("sigmoid", [&](const float* x, float* y) { table.sigmoid(x, n, y); });
            check("sigmoid_gate",
                  [&](const float* x, float* y) { table.sigmoid_gate(x, second.data(), n, y); });
            check("situ_glu", [&](const float* x, float* y) {
                table.situ_glu(x, second.data(), n, 4.0F, 25.0F, y);
            });
            check("short_conv", [&](const float* x, float* y) {
                std::vector<float> history(3 * n, 0.5F);
                const std::vector<float> taps(4 * n, 0.3F);
                table.short_conv(taps.data(), history.data(), x, n, 4, y);
                for (std::size_t c = 0; c < n; ++c) CHECK(history[2 * n + c] == first.data()[c]);
            });
        }
    }
}

TEST_CASE("a row's bits do not depend on the rows computed with it") {
    const KernelTables available = kernels::available_kernels();
    constexpr std::size_t kOut = 37;
    constexpr std::size_t kIn = 1056;  // beyond two chunks of the tiled path, mxfp4 groups whole
    constexpr std::size_t kRows = 53;
    Random random(7);
    Buffer<float> x = random_floats(kRows * kIn, 0, Values::ordinary, random);
    std::vector<std::uint8_t> bytes(kOut * kIn * 4);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.below(64));
    const std::vector<std::uint8_t> scales(kOut * kIn / 32, 125);
    for (auto type :
         {kernels::WeightType::f32, kernels::WeightType::bf16, kernels::WeightType::mxfp4}) {
        const kernels::Matrix w{type, bytes.data(), scales.data(), kOut, kIn};
        for (std::size_t i = 0; i < available.count; ++i) {
            INFO(available.tables[i]->isa << ", weight type " << static_cast<int>(type));
            std::vector<float> together(kRows * kOut);
            available.tables[i]->matmul(w, x.data(), kIn, kRows, together.data(), kOut);
            std::vector<float> alone(kRows * kOut);
            for (std::size_t r = 0; r < kRows; ++r)
                available.tables[i]->matmul(w, &x[r * kIn], kIn, 1, &alone[r * kOut], kOut);
            CHECK(alone == together);
            // Output rows computed by themselves, as threads and shares of a matrix do.
            std::vector<float> by_output(kRows * kOut);
            for (std::size_t o = 0; o < kOut; ++o)
                available.tables[i]->matmul(w.rows(o, 1), x.data(), kIn, kRows, &by_output[o],
                                            kOut);
            CHECK(by_output == together);
        }
    }
}

}  // namespace k3::test
