#include "tests/allocations/counter.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define K3_HAS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define K3_HAS_SANITIZER
#endif
#endif

namespace {

std::atomic<std::size_t> g_allocations{0};

void count() noexcept { g_allocations.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

namespace k3::test {

std::size_t n_allocations() noexcept { return g_allocations.load(std::memory_order_relaxed); }

}  // namespace k3::test

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): names of the C library
extern "C" {

#ifdef K3_HAS_SANITIZER

// The sanitizers bring an allocator of their own, which calls this one if the program has it.
void __sanitizer_malloc_hook(const volatile void*, std::size_t) { count(); }

#else

// In front of glibc's own, for everything that is linked; `new` ends here as well. free() stays
// glibc's.
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t n, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) {
    count();
    return __libc_malloc(bytes);
}

void* calloc(std::size_t n, std::size_t bytes) {
    count();
    return __libc_calloc(n, bytes);
}

void* realloc(void* memory, std::size_t bytes) {
    count();
    return __libc_realloc(memory, bytes);
}

void* memalign(std::size_t alignment, std::size_t bytes) {
    count();
    return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    *memory = memalign(alignment, bytes);
    return *memory == nullptr ? ENOMEM : 0;
}

#endif
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
