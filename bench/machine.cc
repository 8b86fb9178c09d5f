#include "bench/machine.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <vector>

#include "bench/memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace k3::bench {

namespace {

/// Runs `body` on every thread at once, several times, and returns the seconds of the fastest run.
/// Runs are short (about a millisecond), so that on a shared machine some of them go undisturbed.
template <typename Body>
double fastest_run(int n_threads, int runs, const Body& body) {
    double fastest = 1e30;
    for (int run = 0; run < runs; ++run) {
        const double start = now();
#pragma omp parallel num_threads(n_threads)
        body(omp_get_thread_num());
        fastest = std::min(fastest, now() - start);
    }
    return fastest;
}

volatile double g_sink = 0;  // keeps the compiler from dropping the measured work

// Twelve independent chains, more than latency times throughput of any current core.
constexpr int kChains = 12;
constexpr std::int64_t kRounds = 100'000;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float fma_chains_avx512() {
    __m512 sums[kChains];
    const __m512 factor = _mm512_set1_ps(0.999F);
    const __m512 term = _mm512_set1_ps(0.5F);
    for (__m512& sum : sums) sum = term;
    for (std::int64_t i = 0; i < kRounds; ++i) {
        // Unrolled, so that the sums stay in registers.
#pragma GCC unroll 12
        for (int c = 0; c < kChains; ++c) sums[c] = _mm512_fmadd_ps(sums[c], factor, term);
    }
    __m512 total = _mm512_setzero_ps();
    for (const __m512& sum : sums) total = _mm512_add_ps(total, sum);
    alignas(64) float lanes[16];
    _mm512_store_ps(lanes, total);
    return lanes[0];
}

__attribute__((target("avx2,fma"))) float fma_chains_avx2() {
    __m256 sums[kChains];
    const __m256 factor = _mm256_set1_ps(0.999F);
    const __m256 term = _mm256_set1_ps(0.5F);
    for (__m256& sum : sums) sum = term;
    for (std::int64_t i = 0; i < kRounds; ++i) {
        // Unrolled, so that the sums stay in registers.
#pragma GCC unroll 12
        for (int c = 0; c < kChains; ++c) sums[c] = _mm256_fmadd_ps(sums[c], factor, term);
    }
    __m256 total = _mm256_setzero_ps();
    for (const __m256& sum : sums) total = _mm256_add_ps(total, sum);
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, total);
    return lanes[0];
}
#elif defined(__aarch64__)
/// Two registers per chain: four units of four cycles want more than twelve.
float fma_chains_neon() {
    constexpr int kSums = 2 * kChains;
    float32x4_t sums[kSums];
    const float32x4_t factor = vdupq_n_f32(0.999F);
    const float32x4_t term = vdupq_n_f32(0.5F);
    for (float32x4_t& sum : sums) sum = term;
    for (std::int64_t i = 0; i < kRounds; ++i) {
        // Unrolled, like the last loop, so that the sums stay in registers.
#pragma GCC unroll 24
        for (int c = 0; c < kSums; ++c) sums[c] = vfmaq_f32(sums[c], factor, term);
    }
    float32x4_t total = vdupq_n_f32(0.0F);
#pragma GCC unroll 24
    for (int c = 0; c < kSums; ++c) total = vaddq_f32(total, sums[c]);
    return vgetq_lane_f32(total, 0);
}
#endif

/// Four lanes per chain: what a baseline register holds. Without an fma instruction in the baseline
/// this multiplies and adds.
float fma_chains_baseline() {
    float sums[kChains][4];
    for (auto& chain : sums) std::fill(std::begin(chain), std::end(chain), 0.5F);
    for (std::int64_t i = 0; i < kRounds; ++i)
        for (auto& chain : sums)
            for (float& sum : chain) sum = sum * 0.999F + 0.5F;
    return std::accumulate(&sums[0][0], &sums[0][0] + std::size_t{kChains} * 4, 0.0F);
}

struct FmaLoop {
    int width;
    float (*run)();
};

FmaLoop fma_loop(std::string_view isa) {
#if defined(__x86_64__)
    if (isa == "avx512") return {16, fma_chains_avx512};
    if (isa == "avx2") return {8, fma_chains_avx2};
#elif defined(__aarch64__)
    if (isa == "neon") return {8, fma_chains_neon};
#endif
    return {4, fma_chains_baseline};
}

}  // namespace

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

std::string cpu_model() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("model name") && line.find(": ") != std::string::npos)
            return line.substr(line.find(": ") + 2);
    return "unknown";
}

double read_bandwidth(int n_threads) {
    // Pieces of a buffer beyond any cache in turn, each small enough for an undisturbed reading.
    constexpr std::size_t kPieces = 32;
    constexpr std::size_t kPiece = std::size_t{16} << 20U;
    const Memory memory(kPieces * kPiece);
    double fastest = 1e30;
    for (std::size_t run = 0; run < 150; ++run)
        fastest = std::min(
            fastest, read_pass(memory.bytes().subspan(run % kPieces * kPiece, kPiece), n_threads));
    return static_cast<double>(kPiece) / fastest;
}

double fma_peak(int n_threads, std::string_view isa) {
    const FmaLoop loop = fma_loop(isa);
    const double seconds =
        fastest_run(n_threads, 300, [&](int) { g_sink = static_cast<double>(loop.run()); });
    return 2.0 * kChains * loop.width * static_cast<double>(kRounds) * n_threads / seconds;
}

}  // namespace k3::bench
