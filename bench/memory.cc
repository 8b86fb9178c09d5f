#include "bench/memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "bench/machine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace k3::bench {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20U;
constexpr std::size_t kStreams = 8;
constexpr std::size_t kStreamBytes = 16384;  // a bf16 row of 8,192 columns
constexpr std::size_t kBlock = kStreams * kStreamBytes;

volatile std::uint64_t g_read_sink = 0;  // keeps the compiler from dropping the reads

#if defined(__x86_64__)
__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::uint8_t* from,
                                                             std::size_t size) {
    __m512i sums[kStreams];
    for (__m512i& sum : sums) sum = _mm512_setzero_si512();
    for (std::size_t at = 0; at + kBlock <= size; at += kBlock)
        for (std::size_t i = 0; i < kStreamBytes; i += 64)
#pragma GCC unroll 8
            for (std::size_t s = 0; s < kStreams; ++s) {
                const std::uint8_t* p = from + at + s * kStreamBytes + i;
                __builtin_prefetch(p + kBlock);
                sums[s] = _mm512_add_epi64(sums[s], _mm512_loadu_si512(p));
            }
    __m512i total = sums[0];
    for (std::size_t s = 1; s < kStreams; ++s) total = _mm512_add_epi64(total, sums[s]);
    alignas(64) std::uint64_t words[8];
    _mm512_store_si512(words, total);
    return words[0] + words[7];
}

__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::uint8_t* from,
                                                        std::size_t size) {
    __m256i sums[kStreams];
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    for (std::size_t at = 0; at + kBlock <= size; at += kBlock)
        for (std::size_t i = 0; i < kStreamBytes; i += 64)
#pragma GCC unroll 8
            for (std::size_t s = 0; s < kStreams; ++s) {
                const std::uint8_t* p = from + at + s * kStreamBytes + i;
                __builtin_prefetch(p + kBlock);
                const auto* words = reinterpret_cast<const __m256i*>(p);
                sums[s] = _mm256_add_epi64(sums[s], _mm256_loadu_si256(words));
                sums[s] = _mm256_add_epi64(sums[s], _mm256_loadu_si256(words + 1));
            }
    __m256i total = sums[0];
    for (std::size_t s = 1; s < kStreams; ++s) total = _mm256_add_epi64(total, sums[s]);
    alignas(32) std::uint64_t words[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), total);
    return words[0] + words[3];
}
#endif

std::uint64_t read_baseline(const std::uint8_t* from, std::size_t size) {
    std::uint64_t sums[kStreams] = {};
    for (std::size_t at = 0; at + kBlock <= size; at += kBlock)
        for (std::size_t i = 0; i < kStreamBytes; i += sizeof(std::uint64_t))
            for (std::size_t s = 0; s < kStreams; ++s) {
                std::uint64_t word = 0;
                __builtin_memcpy(&word, from + at + s * kStreamBytes + i, sizeof(word));
                sums[s] += word;
            }
    std::uint64_t total = 0;
    for (const std::uint64_t sum : sums) total += sum;
    return total;
}

std::uint64_t read_all(const std::uint8_t* from, std::size_t size) {
#if defined(__x86_64__)
    static const bool has_avx512 = __builtin_cpu_supports("avx512f") != 0;
    static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
    if (has_avx512) return read_avx512(from, size);
    if (has_avx2) return read_avx2(from, size);
#endif
    return read_baseline(from, size);
}

}  // namespace

Memory::Memory(std::size_t bytes) : size_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    void* at = aligned_alloc(kHugePage, size_);
    if (at == nullptr) {
        std::fprintf(stderr, "no memory for %zu bytes: close other programs\n", size_);
        std::exit(4);
    }
    madvise(at, size_, MADV_HUGEPAGE);
    data_ = static_cast<std::uint8_t*>(at);
    for (std::size_t i = 0; i < size_; i += 4096) data_[i] = 1;
}

Memory::~Memory() { std::free(data_); }

double read_pass(std::span<const std::uint8_t> bytes, int n_threads) {
    const std::size_t n_blocks = bytes.size() / kBlock;
    const auto parts = static_cast<std::size_t>(n_threads);
    const double start = now();
#pragma omp parallel for schedule(static) num_threads(n_threads)
    for (std::size_t part = 0; part < parts; ++part) {
        const std::size_t first = part * n_blocks / parts * kBlock;
        const std::size_t last = (part + 1) * n_blocks / parts * kBlock;
        g_read_sink = read_all(bytes.data() + first, last - first);
    }
    return now() - start;
}

}  // namespace k3::bench
