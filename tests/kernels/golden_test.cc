// Every operator fixture of tests/golden/ops, on every variant that this CPU can run.

#include <doctest/doctest.h>

#include <bit>
#include <fstream>

#include "tests/kernels/golden_case.h"

namespace k3::test {

Array GoldenCase::array(const std::string& file) const {
    for (const char* group : {"inputs", "outputs"})
        if (manifest.at(group).contains(file))
            return load_npy("ops/" + manifest.at(group).at(file).get<std::string>());
    FAIL("case " << name << " has no array " << file);
    return {};
}

void check_close(const std::string& what, std::span<const float> actual,
                 std::span<const double> expected, double tolerance) {
    INFO(what);
    CHECK(relative_error(actual, expected) <= tolerance);
}

kernels::Matrix f32_matrix(std::span<const float> weights, std::size_t n_out, std::size_t n_in) {
    REQUIRE(weights.size() == n_out * n_in);
    return {kernels::WeightType::f32, weights.data(), nullptr, n_out, n_in};
}

std::vector<std::uint16_t> as_bf16(std::span<const float> weights) {
    std::vector<std::uint16_t> stored;
    for (float weight : weights) {
        const auto bits = std::bit_cast<std::uint32_t>(weight);
        REQUIRE((bits & 0xFFFFU) == 0);
        stored.push_back(static_cast<std::uint16_t>(bits >> 16U));
    }
    return stored;
}

TEST_CASE("every operator fixture has a test and passes it on every variant") {
    GoldenTests tests;
    add_mxfp4_tests(tests);
    add_vector_tests(tests);
    add_attention_tests(tests);
    add_moe_tests(tests);

    std::ifstream file(golden_dir() / "ops" / "manifest.json");
    const nlohmann::json manifest = nlohmann::json::parse(file);
    const nlohmann::json& cases = manifest.at("cases");
    REQUIRE(cases.size() == 25);
    for (const auto& item : cases.items()) {
        const std::string& name = item.key();
        const nlohmann::json& description = item.value();
        INFO(name << ": " << description.at("what").get<std::string>());
        REQUIRE(tests.contains(name));
        const kernels::KernelTables available = kernels::available_kernels();
        for (std::size_t i = 0; i < available.count; ++i) {
            INFO("variant " << available.tables[i]->isa);
            tests.at(name)({name, description}, *available.tables[i]);
        }
    }
}

}  // namespace k3::test
