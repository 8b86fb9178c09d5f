// How fast the kernels are, as a share of what this machine can do.
//
// Every operation of tests/kernels/operations.cc that has benchmark shapes, on every variant, with
// one thread and with all. A matrix product of few rows can at best read its weights at the
// memory's speed, one of many rows can at best keep the multiply-add units busy; both limits are
// measured in the same run. Times are the fastest of several runs: on a shared machine the others
// measure the neighbours.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/from_ram.h"
#include "bench/machine.h"
#include "bench/sampling.h"
#include "common/kernels/parallel.h"
#include "tests/kernels/operations.h"

namespace {

using k3::bench::now;
using k3::kernels::KernelTable;
using k3::kernels::KernelTables;

struct Options {
    std::string only;  // operations whose name contains this
    std::string json_file;
    int n_threads = 0;
    double seconds = 0.2;  // per measurement
};

struct Limits {
    int n_threads = 1;
    double read_bytes_per_s = 0;
    std::map<std::string, double> fma_flops_per_s;  // by variant
};

struct Result {
    double fastest_s = 1e30;
    double median_s = 0;
};

Result measure(const k3::test::Call& call, const KernelTable& table, double seconds) {
    call.run(table);  // touches memory, wakes threads
    std::vector<double> times;
    const double end = now() + seconds;
    while (times.size() < 3 || (now() < end && times.size() < 20'000)) {
        const double start = now();
        call.run(table);
        times.push_back(now() - start);
    }
    std::sort(times.begin(), times.end());
    return {times.front(), times[times.size() / 2]};
}

/// The scalar definition calls a library function per multiply-add where the baseline CPU has no
/// instruction for it: it gets a part of the large shapes, and one thread. The rates stay
/// comparable.
k3::test::Shape scalar_part(k3::test::Shape shape) {
    if (shape.c >= 32) shape.c /= 32;
    if (shape.a >= 1024 && shape.b > 8) shape.a /= 32;
    return shape;
}

std::string share(double value, double limit) {
    char text[32];
    std::snprintf(text, sizeof(text), "%5.0f%%", 100 * value / limit);
    return text;
}

class Benchmark {
  public:
    explicit Benchmark(const Options& options) : options_(options) {
        k3::kernels::set_threads(options.n_threads);
        thread_counts_.push_back(1);
        if (k3::kernels::threads() > 1) thread_counts_.push_back(k3::kernels::threads());
    }

    /// False if nothing is called like --only.
    bool run() {
        measure_machine();
        if (options_.only.empty() || options_.only == "ram")
            json_["from_ram"] = k3::bench::measure_from_ram(thread_counts_);
        if (options_.only.empty() || options_.only == "sampling")
            json_["sampling"] = k3::bench::measure_sampling();
        if (options_.only == "ram" || options_.only == "sampling") return true;
        std::printf("\n%-24s %-20s %-7s %3s %10s %8s %6s %9s %6s\n", "operation", "sizes", "isa",
                    "thr", "fastest", "GB/s", "read", "GFLOP/s", "fma");
        bool found = false;
        for (const k3::test::Operation& operation : k3::test::operations()) {
            if (operation.name.find(options_.only) == std::string::npos) continue;
            found = true;
            for (const k3::test::Shape& shape : operation.bench_shapes)
                measure_shape(operation, shape);
        }
        return found;
    }

    bool write_json() const {
        if (options_.json_file.empty()) return true;
        std::ofstream file(options_.json_file);
        file << json_.dump(2) << "\n";
        file.flush();
        return file.good();
    }

  private:
    void measure_machine() {
        json_["cpu"] = k3::bench::cpu_model();
        std::printf("CPU %s\n", k3::bench::cpu_model().c_str());
        for (int n : thread_counts_) {
            Limits limit{n, k3::bench::read_bandwidth(n), {}};
            std::printf("%d thread%s: reads %.1f GB/s; fma peak in GFLOP/s:", n, n == 1 ? "" : "s",
                        limit.read_bytes_per_s / 1e9);
            const KernelTables available = k3::kernels::available_kernels();
            for (std::size_t i = 0; i < available.count; ++i) {
                const char* isa = available.tables[i]->isa;
                const double peak = k3::bench::fma_peak(n, isa);
                std::printf(" %s %.1f", isa, peak / 1e9);
                limit.fma_flops_per_s[isa] = peak;
            }
            std::printf("\n");
            limits_.push_back(limit);
            json_["machine"].push_back({{"threads", limit.n_threads},
                                        {"read_bytes_per_s", limit.read_bytes_per_s},
                                        {"fma_flops_per_s", limit.fma_flops_per_s}});
        }
    }

    void measure_shape(const k3::test::Operation& operation, const k3::test::Shape& full) {
        const KernelTables available = k3::kernels::available_kernels();
        for (std::size_t i = 0; i < available.count; ++i) {
            const bool slow = i == 0 && available.count > 1;
            const k3::test::Shape shape = slow ? scalar_part(full) : full;
            const k3::test::Call call = operation.make(shape, k3::test::Values::ordinary);
            for (const Limits& limit : limits_) {
                // Single vectors are one thread's work in the model, too.
                if (limit.n_threads > 1 && (slow || call.flops == 0)) continue;
                k3::kernels::set_threads(limit.n_threads);
                const Result result = measure(call, *available.tables[i], options_.seconds);
                report(operation, shape, available.tables[i]->isa, limit, call, result);
            }
        }
    }

    void report(const k3::test::Operation& operation, const k3::test::Shape& shape, const char* isa,
                const Limits& limit, const k3::test::Call& call, const Result& result) {
        std::string sizes = std::to_string(shape.a);
        for (std::size_t size : {shape.b, shape.c})
            if (size != 1 || operation.name.starts_with("mat")) sizes += " " + std::to_string(size);
        const double bytes_per_s = call.bytes / result.fastest_s;
        const double flops_per_s = call.flops / result.fastest_s;
        const bool counted = call.flops > 0;
        std::printf("%-24s %-20s %-7s %3d %7.1f us %8.2f %6s %9s %6s\n", operation.name.c_str(),
                    sizes.c_str(), isa, limit.n_threads, result.fastest_s * 1e6, bytes_per_s / 1e9,
                    share(bytes_per_s, limit.read_bytes_per_s).c_str(),
                    counted ? std::to_string(flops_per_s / 1e9).substr(0, 6).c_str() : "-",
                    counted ? share(flops_per_s, limit.fma_flops_per_s.at(isa)).c_str() : "-");
        std::fflush(stdout);
        json_["results"].push_back({{"operation", operation.name},
                                    {"size_names", operation.sizes},
                                    {"sizes", {shape.a, shape.b, shape.c}},
                                    {"isa", isa},
                                    {"threads", limit.n_threads},
                                    {"fastest_s", result.fastest_s},
                                    {"median_s", result.median_s},
                                    {"bytes", call.bytes},
                                    {"flops", call.flops}});
    }

    Options options_;
    std::vector<int> thread_counts_;
    std::vector<Limits> limits_;
    nlohmann::json json_;
};

}  // namespace

int main(int argc, char** argv) {
    CLI::App app{
        "Speed of the kernels as a share of this machine's memory and multiply-add limits."};
    Options options;
    app.add_option("--only", options.only,
                   "only operations whose name contains this text; ram: only products "
                   "with weights that no cache holds; sampling: only the sampler");
    app.add_option("--json", options.json_file, "also write the results to this file");
    app.add_option("--threads", options.n_threads, "threads of the second column (0: all cores)")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--seconds", options.seconds, "time per measurement")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : 2;
    }
    Benchmark benchmark(options);
    if (!benchmark.run()) {
        std::fprintf(stderr,
                     "no operation has '%s' in its name: leave --only out to see them all\n",
                     options.only.c_str());
        return 2;
    }
    if (!benchmark.write_json()) {
        std::fprintf(stderr, "cannot write %s: choose another file\n", options.json_file.c_str());
        return 1;
    }
    return 0;
}
