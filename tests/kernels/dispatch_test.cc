// Which table a process gets, parts of matrices, and the split over threads.

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/kernels/isa.h"
#include "common/kernels/kernel_table.h"
#include "common/kernels/parallel.h"

namespace k3::kernels {

namespace {

struct ChildResult {
    int status = 0;       // as waitpid gives it
    std::string message;  // stderr
};

/// Calls kernels() with K3_ISA set in a child: a process chooses once, and no case of this program
/// may call kernels() itself. Exits with 0 if the child got
/// the table `expected`.
ChildResult choose_in_child(const char* isa, const char* expected) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);  // doctest's handler would print a report
        setenv("K3_ISA", isa, 1);
        _exit(std::strcmp(kernels().isa, expected) == 0 ? 0 : 1);
    }
    close(ends[1]);
    ChildResult result;
    char buffer[512];
    for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof(buffer))) > 0;)
        result.message.append(buffer, static_cast<std::size_t>(n));
    close(ends[0]);
    REQUIRE(waitpid(child, &result.status, 0) == child);
    return result;
}

}  // namespace

TEST_CASE("the scalar table comes first and every table has all its entries") {
    const KernelTables available = available_kernels();
    REQUIRE(available.count >= 1);
    CHECK(std::string(available.tables[0]->isa) == "scalar");
    for (std::size_t i = 0; i < available.count; ++i) {
        const void* entries[sizeof(KernelTable) / sizeof(void*)];
        std::memcpy(entries, available.tables[i], sizeof(KernelTable));
        for (const void* entry : entries) CHECK(entry != nullptr);
    }
}

TEST_CASE("K3_ISA caps the instruction set; without it the best is taken") {
    const KernelTables available = available_kernels();
    for (std::size_t i = 0; i < available.count; ++i) {
        const char* isa = available.tables[i]->isa;
        INFO(isa);
        CHECK(choose_in_child(isa, isa).status == 0);
    }
    CHECK(choose_in_child("", available.tables[available.count - 1]->isa).status == 0);
}

TEST_CASE("an unknown K3_ISA aborts with a sentence that names what there is") {
    const ChildResult result = choose_in_child("sse9", "");
    CHECK(WIFSIGNALED(result.status));
    CHECK(result.message.find("K3_ISA is 'sse9'") != std::string::npos);
    CHECK(result.message.find("scalar") != std::string::npos);
}

TEST_CASE("check_isa refuses the same in one sentence") {
    const char* before = std::getenv("K3_ISA");
    const std::string kept = before == nullptr ? "" : before;
    setenv("K3_ISA", "sse9", 1);
    const Status refused = check_isa();
    setenv("K3_ISA", "scalar", 1);
    const Status fine = check_isa();
    setenv("K3_ISA", kept.c_str(), 1);  // empty: the best
    CHECK(fine.has_value());
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::invalid_argument);
    CHECK(refused.error().sentence().find("K3_ISA is 'sse9'") != std::string::npos);
    CHECK(refused.error().sentence().find("scalar") != std::string::npos);
}

TEST_CASE("rows of a matrix start at the right byte and scale") {
    std::uint8_t data[4096] = {};
    std::uint8_t scales[64] = {};
    const auto* base = static_cast<const std::uint8_t*>(data);
    const Matrix f32 = Matrix{WeightType::f32, data, nullptr, 8, 5}.rows(3, 2);
    CHECK(f32.data == base + 3 * 5 * 4);
    CHECK(f32.n_out == 2);
    CHECK(f32.n_in == 5);
    const Matrix bf16 = Matrix{WeightType::bf16, data, nullptr, 8, 5}.rows(3, 5);
    CHECK(bf16.data == base + 3 * 5 * 2);
    const Matrix mxfp4 = Matrix{WeightType::mxfp4, data, scales, 8, 96}.rows(2, 1);
    CHECK(mxfp4.data == base + 2 * 48);
    CHECK(mxfp4.scales == scales + 2 * 3);
}

TEST_CASE("parallel_for calls every index once, with little and with much to do") {
    for (int n_threads : {1, 2, 4}) {
        set_threads(n_threads);
        CHECK(threads() == n_threads);
        for (std::size_t n : {0, 1, 2, 3, 100}) {
            std::vector<std::atomic<int>> calls(n);
            parallel_for(n, [&](std::size_t i) { calls[i].fetch_add(1); });
            for (std::size_t work : {std::size_t{1}, kMinParallelWork})
                parallel_for(n, work, [&](std::size_t i) { calls[i].fetch_add(1); });
            for (const std::atomic<int>& count : calls) CHECK(count.load() == 3);
        }
    }
}

TEST_CASE("zero threads means one per core that the process may use") {
    set_threads(0);
    CHECK(threads() >= 1);
    CHECK(threads() <= static_cast<int>(sysconf(_SC_NPROCESSORS_CONF)));
}

}  // namespace k3::kernels
