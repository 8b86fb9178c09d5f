#include "bench/from_ram.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/machine.h"
#include "bench/memory.h"
#include "common/kernels/kernel_table.h"
#include "common/kernels/parallel.h"

namespace k3::bench {

namespace {

using kernels::KernelTable;
using kernels::Matrix;
using kernels::WeightType;

constexpr std::size_t kHidden = 7168;
constexpr std::size_t kHeads = 12288;  // 96 heads of 128
constexpr std::size_t kLatent = 3584;
constexpr std::size_t kInner = 3072;
constexpr std::size_t kMatrices = 4;  // 705 MB of bf16
constexpr std::size_t kExperts = 40;  // 702 MB of MXFP4
constexpr int kRounds = 9;
constexpr int kRowRounds = 5;  // a pass of several rows takes seconds

/// Weights in a piece of memory, and one pass over all of them.
struct Work {
    const char* name;
    std::size_t bytes;
    std::vector<Matrix> matrices;
};

/// Random bits with what a format cannot hold taken out.
void fill(std::span<std::uint8_t> bytes, std::uint8_t keep, std::uint8_t set) {
    std::uint64_t state = 88172645463325252ULL;
    for (std::uint8_t& byte : bytes) {
        state ^= state << 13U;
        state ^= state >> 7U;
        state ^= state << 17U;
        byte = static_cast<std::uint8_t>((state & keep) | set);
    }
}

Work bf16_matrices(const Memory& memory) {
    const std::size_t one = kHidden * kHeads * 2;
    fill(memory.bytes().first(one * kMatrices), 0xBF, 0x20);  // exponents in the lower half
    Work work{"bf16 [12288, 7168]", one * kMatrices, {}};
    for (std::size_t i = 0; i < kMatrices; ++i)
        work.matrices.push_back(
            {WeightType::bf16, memory.bytes().data() + i * one, nullptr, kHeads, kHidden});
    return work;
}

Work mxfp4_experts(const Memory& memory) {
    const std::size_t packed = kLatent * kInner / 2;
    const std::size_t scales = kLatent * kInner / 32;
    const std::size_t one = 3 * (packed + scales);
    Work work{"MXFP4 expert, as shipped", one * kExperts, {}};
    for (std::size_t e = 0; e < kExperts; ++e) {
        std::uint8_t* at = memory.bytes().data() + e * one;
        fill({at, one}, 0x0F, 0x70);  // any code below 16; scales from 2^-15 to 1
        for (std::size_t i = 0; i < 3; ++i) {
            const bool down = i == 2;
            work.matrices.push_back({WeightType::mxfp4, at, at + packed, down ? kLatent : kInner,
                                     down ? kInner : kLatent});
            fill({at, packed}, 0xFF, 0);
            at += packed + scales;
        }
    }
    return work;
}

double product_pass(const Work& work, const KernelTable& table, std::size_t n_rows, const float* x,
                    float* y) {
    const double start = now();
    for (const Matrix& w : work.matrices) kernels::matmul(table, w, x, w.n_in, n_rows, y, w.n_out);
    return now() - start;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void measure(const Memory& memory, const Work& work, int n_threads, nlohmann::json& results) {
    kernels::set_threads(n_threads);
    const kernels::KernelTables available = kernels::available_kernels();
    const std::size_t first = available.count > 1 ? 1 : 0;  // the definition is not made for speed
    std::vector<float> x(kHeads, 0.5F);
    std::vector<float> y(kHeads);
    std::vector<double> read;
    std::vector<std::vector<double>> times(available.count);
    std::vector<std::vector<double>> shares(available.count);
    for (int round = -1; round < kRounds; ++round) {  // round -1 wakes threads and clocks
        const double reading = read_pass(memory.bytes().first(work.bytes), n_threads);
        if (round >= 0) read.push_back(reading);
        for (std::size_t i = first; i < available.count; ++i) {
            const double product = product_pass(work, *available.tables[i], 1, x.data(), y.data());
            if (round < 0) continue;
            times[i].push_back(product);
            shares[i].push_back(reading / product);
        }
    }
    const auto size = static_cast<double>(work.bytes);
    for (std::size_t i = first; i < available.count; ++i) {
        const char* isa = available.tables[i]->isa;
        std::printf("%-28s %-7s %3d %10.1f %10.1f %6.2f\n", work.name, isa, n_threads,
                    size / median(times[i]) / 1e9, size / median(read) / 1e9, median(shares[i]));
        std::fflush(stdout);
        results.push_back({{"weights", work.name},
                           {"isa", isa},
                           {"threads", n_threads},
                           {"bytes", work.bytes},
                           {"median_s", median(times[i])},
                           {"read_median_s", median(read)},
                           {"share_of_read", median(shares[i])}});
    }
}

/// The same of several rows at a time, against the multiply-adds of the variant.
void measure_rows(const Work& work, std::size_t n_rows, int n_threads, nlohmann::json& results) {
    kernels::set_threads(n_threads);
    const kernels::KernelTables available = kernels::available_kernels();
    const std::vector<float> x(n_rows * kHeads, 0.5F);
    std::vector<float> y(n_rows * kHeads);
    double n_flops = 0;
    for (const Matrix& w : work.matrices)
        n_flops += 2.0 * static_cast<double>(w.n_out * w.n_in * n_rows);
    for (std::size_t i = available.count > 1 ? 1 : 0; i < available.count; ++i) {
        const KernelTable& table = *available.tables[i];
        std::vector<double> times;
        std::vector<double> shares;
        for (int round = -1; round < kRowRounds; ++round) {
            const double peak = fma_peak(n_threads, table.isa);
            const double product = product_pass(work, table, n_rows, x.data(), y.data());
            if (round < 0) continue;
            times.push_back(product);
            shares.push_back(n_flops / product / peak);
        }
        std::printf("%-28s %4zu %-7s %3d %10.1f %6.2f\n", work.name, n_rows, table.isa, n_threads,
                    n_flops / median(times) / 1e9, median(shares));
        std::fflush(stdout);
        results.push_back({{"weights", work.name},
                           {"rows", n_rows},
                           {"isa", table.isa},
                           {"threads", n_threads},
                           {"flops", n_flops},
                           {"median_s", median(times)},
                           {"share_of_fma_peak", median(shares)}});
    }
}

}  // namespace

nlohmann::json measure_from_ram(const std::vector<int>& thread_counts) {
    nlohmann::json results = nlohmann::json::array();
    std::printf("\n%-28s %-7s %3s %10s %10s %6s\n", "one row, weights from RAM", "isa", "thr",
                "GB/s", "read GB/s", "share");
    const Memory memory(
        std::max(kHidden * kHeads * 2 * kMatrices, 3 * kLatent * kInner * 17 / 32 * kExperts));
    for (const auto make : {bf16_matrices, mxfp4_experts}) {
        const Work work = make(memory);
        for (const int n_threads : thread_counts) measure(memory, work, n_threads, results);
    }
    std::printf("\n%-28s %4s %-7s %3s %10s %6s\n", "several rows, from RAM", "rows", "isa", "thr",
                "GFLOP/s", "fma");
    // In a prefill of 64 rows each of 64 experts gets 16 of them.
    for (const auto& [make, n_rows] :
         {std::pair{&bf16_matrices, std::size_t{64}}, {&mxfp4_experts, 16}}) {
        const Work work = make(memory);
        for (const int n_threads : thread_counts) measure_rows(work, n_rows, n_threads, results);
    }
    return results;
}

}  // namespace k3::bench
