#include "common/kernels/kernel_table.h"

#include <cstdlib>
#include <string>

#include "common/base/check.h"
#include "common/kernels/isa.h"
#include "common/kernels/variants.h"

namespace k3::kernels {

namespace {

KernelTables find_tables() noexcept {
    KernelTables found{};
    found.tables[found.count++] = &scalar_table();
#if defined(K3_HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found.tables[found.count++] = &avx2_table();
#endif
#if defined(K3_HAVE_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.tables[found.count++] = &avx512_table();
#endif
#if defined(K3_HAVE_NEON)
    found.tables[found.count++] = &neon_table();
#endif
    return found;
}

Result<const KernelTable*> choose_table() {
    const KernelTables available = find_tables();
    const char* wanted = std::getenv("K3_ISA");
    if (wanted == nullptr || *wanted == '\0') return available.tables[available.count - 1];
    std::string names;
    for (std::size_t i = 0; i < available.count; ++i) {
        if (std::string(wanted) == available.tables[i]->isa) return available.tables[i];
        names += std::string(i == 0 ? "" : ", ") + available.tables[i]->isa;
    }
    return Error{ErrorCode::invalid_argument,
                 "K3_ISA is '" + std::string(wanted) + "', but this build on this CPU has " + names,
                 "unset K3_ISA to use the best"};
}

}  // namespace

Matrix Matrix::rows(std::size_t first, std::size_t count) const noexcept {
    Matrix part = *this;
    std::size_t row_bytes = 0;
    switch (type) {
        case WeightType::f32:
            row_bytes = n_in * 4;
            break;
        case WeightType::bf16:
            row_bytes = n_in * 2;
            break;
        case WeightType::mxfp4:
            row_bytes = n_in / 2;
            part.scales = scales + first * (n_in / 32);
            break;
    }
    part.data = static_cast<const std::uint8_t*>(data) + first * row_bytes;
    part.n_out = count;
    return part;
}

const KernelTable& kernels() noexcept {
    static const KernelTable& table = []() -> const KernelTable& {
        auto chosen = choose_table();
        K3_CHECK(chosen.has_value(), chosen.error().sentence());
        return **chosen;
    }();
    return table;
}

Status check_isa() {
    auto chosen = choose_table();
    return chosen.has_value() ? Status::ok() : Status(std::move(chosen).error());
}

KernelTables available_kernels() noexcept { return find_tables(); }

}  // namespace k3::kernels
