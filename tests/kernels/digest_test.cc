// The scalar definition gives the same bits on every CPU and from every compiler: digests of its
// results. equality_test.cc compares the variants of one build with it; stages on boxes of
// different kinds need this as well.

#include <doctest/doctest.h>

#include <bit>
#include <map>
#include <string>
#include <vector>

#include "common/kernels/math.h"
#include "common/kernels/parallel.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/operations.h"

namespace k3::test {

namespace {

/// FNV-1a over 32-bit words.
class Digest {
  public:
    void add(std::uint32_t word) { value_ = (value_ ^ word) * 0x100000001B3U; }
    void add(std::uint64_t word) {
        add(static_cast<std::uint32_t>(word));
        add(static_cast<std::uint32_t>(word >> 32U));
    }
    std::uint64_t value() const { return value_; }

  private:
    std::uint64_t value_ = 0xCBF29CE484222325U;
};

/// Not an operation's own test shapes: a further one of those must not change a digest.
std::vector<Shape> digest_shapes(const Operation& operation) {
    if (operation.sizes == "n") return {{31, 1, 1, 1}, {1000}};
    if (operation.name == "short_conv") return {{31, 4, 1, 1}, {200, 3}};
    return {{31, 96, 5, 1}, {29, 320, 2, 3}};
}

// An operation's line stays as it is: other bits mean that old and new stages disagree about text.
const std::map<std::string, std::uint64_t>& expected_digests() {
    static const std::map<std::string, std::uint64_t> digests = {
        {"matmul bf16", 0xA09CB762190D7094U},
        {"matmul mxfp4", 0x57F46C7E64C41C05U},
        {"matmul f32", 0xBE00F8FF001FB8D7U},
        {"matvec_transposed bf16", 0xAD358C7B52BC7043U},
        {"matvec_transposed f32", 0xD173AF756A7F31DAU},
        {"dot", 0x43110CF76A3DA3D7U},
        {"rms_norm", 0xB7D4E91B1B4F6982U},
        {"l2_norm", 0xFF3690CF5BF2B768U},
        {"situ_glu", 0x86AA4C2ED84C7088U},
        {"sigmoid", 0x5B41846C4695000CU},
        {"sigmoid_gate", 0xD5724DD85174B12FU},
        {"kda_decay", 0x18155CB18089707DU},
        {"add", 0xCE35F4737A3C3499U},
        {"accumulate_fixed", 0xBBC53A334075D3A8U},
        {"fixed_to_float", 0x9664804C20630B6DU},
        {"short_conv", 0x41A12A69AD5766F6U},
        {"kda_step", 0x4D39D73A1CFB5AACU},
        {"mla_attend", 0xF826A509304C6396U},
        {"attn_res_mix", 0x06174B0D22A173CCU},
        {"round_to_bf16", 0xBE44265639847C0FU},
        {"mla_attend_bf16", 0x867E57C4686A5396U},
    };
    return digests;
}

}  // namespace

TEST_CASE("the scalar definition of every operation gives the same bits on every kind of CPU") {
    kernels::set_threads(1);
    const kernels::KernelTable& scalar = *kernels::available_kernels().tables[0];
    for (const Operation& operation : operations()) {
        Digest digest;
        for (const Shape& shape : digest_shapes(operation)) {
            for (Values values : {Values::ordinary, Values::extreme}) {
                const Call call = operation.make(shape, values);
                call.reset();
                call.run(scalar);
                for (std::uint32_t word : call.result()) digest.add(word);
            }
        }
        INFO(operation.name);
        const auto expected = expected_digests().find(operation.name);
        CHECK(digest.value() == (expected == expected_digests().end() ? 0 : expected->second));
    }
}

TEST_CASE("exp, log, sigmoid and tanh give the same bits on every kind of CPU") {
    Digest digest;
    for (int i = -20'000; i <= 20'000; ++i) {
        const double x = i * (1.0 / 128);
        const float narrow = static_cast<float>(x);
        for (float y : {kernels::exp_f32(narrow), kernels::sigmoid_f32(narrow),
                        kernels::tanh_f32(narrow / 16)})
            digest.add(std::bit_cast<std::uint32_t>(y));
        digest.add(std::bit_cast<std::uint64_t>(kernels::exp_f64(x * 4.5)));
        digest.add(std::bit_cast<std::uint64_t>(kernels::log_f64(x * x + 1e-3)));
    }
    CHECK(digest.value() == 0x76466BAAD08E302AU);
}

}  // namespace k3::test
