// expert_reads: how fast experts come from a checkpoint, and what that costs the CPU.
//
//     build/bench/expert_reads --model DIR [--disk-cache DIR]
//
// Every expert is read once, in the order of the layers, by several threads as in an expert server:
// past the page cache, past it and then copied to the beginning of a slot, and through the page
// cache (emptied of the checkpoint before). Then what it costs to compute with records that begin
// where the blocks of the disk have them.

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bench/machine.h"
#include "bench/settings_main.h"
#include "common/base/settings.h"
#include "common/kernels/kernel_table.h"
#include "common/kernels/parallel.h"
#include "common/model/load.h"
#include "services/experts/disk_cache_store.h"
#include "services/experts/expert_store.h"
#include "services/experts/slot_memory.h"

namespace {

using namespace k3;
using Mode = storage::DirectFile::Mode;

struct BenchSettings {
    std::string model;
    std::int64_t read_threads = 4;
    std::int64_t experts = 128;
    std::string disk_cache;
};

Result<Settings::Action> read_settings(int argc, const char* const* argv, BenchSettings& out) {
    Settings settings("expert_reads", "Reads experts of a checkpoint in every way there is.");
    settings.add_text("model", &out.model, "directory of the checkpoint", true);
    settings.add_integer("read_threads", &out.read_threads, 1, 64, "reads going on at a time");
    settings.add_integer("experts", &out.experts, 1, 100'000, "so many of them, at most");
    settings.add_text("disk_cache", &out.disk_cache,
                      "directory to fill with them, and to read them from, checksums compared");
    return settings.parse(argc, argv);
}

/// User and system time of the process.
double cpu_seconds() {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    const auto seconds = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void empty_page_cache(const storage::Checkpoint& checkpoint) {
    for (std::uint32_t shard = 0; shard < checkpoint.n_shards(); ++shard) {
        const Fd fd(::open(checkpoint.shard_path(shard).c_str(), O_RDONLY | O_CLOEXEC));
        if (fd.valid()) ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
}

/// Two slots for each thread: one is read into, the other one would be computed with.
Status read_all(experts::ExpertStore& store, const std::vector<experts::ExpertKey>& keys,
                std::size_t n_threads, bool copy, const char* how) {
    ASSIGN_OR_RETURN(experts::SlotMemory memory,
                     experts::SlotMemory::map(2 * n_threads, store.slot_bytes()));
    for (std::size_t i = 0; i < 2 * n_threads; ++i)
        std::memset(memory.slot(i).data(), 0, memory.slot(i).size());
    const experts::StoreCounts before = store.counts();
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::optional<Error> failure;
    const double start = bench::now();
    const double cpu_start = cpu_seconds();
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < n_threads; ++t)
        threads.emplace_back([&, t] {
            for (std::size_t i = next++; i < keys.size(); i = next++) {
                const auto read = store.read(keys[i], memory.slot(2 * t));
                if (read.has_value() && copy)
                    std::memcpy(memory.slot(2 * t + 1).data(), read->data(), read->size());
                if (read.has_value()) continue;
                const std::lock_guard lock(mutex);
                failure = read.error();
            }
        });
    threads.clear();
    const double seconds = bench::now() - start;
    const double cpu = cpu_seconds() - cpu_start;
    if (failure.has_value()) return *failure;
    const experts::StoreCounts after = store.counts();
    const auto bytes = static_cast<double>(after.read_bytes - before.read_bytes);
    fmt::print("{},{},{},{:.0f},{},{:.2f},{:.2f},{:.3f}\n", how, n_threads, keys.size(), bytes,
               after.rounding_bytes - before.rounding_bytes, seconds, bytes / seconds / 1e9,
               cpu / (bytes / (1U << 30U)));
    return Status::ok();
}

/// One row through records that no cache holds, on one thread: milliseconds of the quickest, by
/// where in a block a record begins.
Status compute_all(experts::ExpertStore& store, const experts::ExpertRecord& layout,
                   const std::vector<experts::ExpertKey>& keys) {
    constexpr std::size_t kRecords = 16;
    ASSIGN_OR_RETURN(experts::SlotMemory memory,
                     experts::SlotMemory::map(kRecords + 1, store.slot_bytes()));
    const std::vector<float> x(std::max(layout.latent_size(), layout.inner_size()), 0.01F);
    std::vector<float> y(x.size());
    const std::size_t latent = layout.latent_size();
    const std::size_t inner = layout.inner_size();
    fmt::print("begins_at,ms_per_expert\n");
    kernels::set_threads(1);
    for (const std::size_t begin : {0, 1, 8, 32, 0, 1, 8, 32}) {
        for (std::size_t i = 0; i < kRecords; ++i) {
            ASSIGN_OR_RETURN(const auto record,
                             store.read(keys[i % keys.size()], memory.slot(kRecords)));
            std::memcpy(memory.slot(i).data() + begin, record.data(), record.size());
        }
        double quickest = 1e9;
        for (std::size_t i = 0; i < kRecords; ++i) {
            const double start = bench::now();
            const auto record = memory.slot(i).subspan(begin, store.record_bytes());
            const kernels::KernelTable& table = kernels::kernels();
            kernels::matmul(table, layout.gate(record), x.data(), latent, 1, y.data(), inner);
            kernels::matmul(table, layout.up(record), x.data(), latent, 1, y.data(), inner);
            kernels::matmul(table, layout.down(record), x.data(), inner, 1, y.data(), latent);
            quickest = std::min(quickest, bench::now() - start);
        }
        fmt::print("{},{:.2f}\n", begin, quickest * 1000);
    }
    return Status::ok();
}

/// Fills a disk cache, one expert at a time so that each is written, and reads it.
Status read_disk_cache(const BenchSettings& settings, const model::Model& model,
                       experts::ExpertStore& origin, const std::vector<experts::ExpertKey>& keys,
                       std::size_t n_threads) {
    experts::DiskCacheStore::Options options;
    options.directory = settings.disk_cache;
    options.fingerprint = model.fingerprint;
    options.n_layers = model.config.n_layers;
    options.n_experts = model.config.moe.n_experts;
    options.budget_bytes =
        experts::DiskCacheStore::disk_bytes(options, origin.record_bytes(), keys.size());
    ASSIGN_OR_RETURN(auto store, experts::DiskCacheStore::create(options, origin));
    ASSIGN_OR_RETURN(experts::SlotMemory memory, experts::SlotMemory::map(1, store->slot_bytes()));
    const double start = bench::now();
    const double cpu_start = cpu_seconds();
    for (const experts::ExpertKey key : keys) {
        RETURN_IF_ERROR(store->read(key, memory.slot(0)));
        store->wait_until_written();
    }
    fmt::print("# filling the disk cache: {} writes, {:.2f} s, {:.2f} CPU s\n",
               store->disk_counts().writes, bench::now() - start, cpu_seconds() - cpu_start);
    for (int round = 0; round < 2; ++round)
        RETURN_IF_ERROR(read_all(*store, keys, n_threads, false, "disk cache"));
    return Status::ok();
}

Status run(const BenchSettings& settings) {
    ASSIGN_OR_RETURN(const model::Model model, model::open_model(settings.model));
    ASSIGN_OR_RETURN(const model::Placement held, model::parse_share("all", model.config));
    std::vector<experts::ExpertKey> keys;
    for (std::uint32_t layer = 0; layer < held.n_layers(); ++layer)
        for (std::uint32_t expert = 0; expert < held.n_experts(); ++expert)
            if (held.holds(layer, expert)) keys.push_back({layer, expert});
    keys.resize(std::min(keys.size(), static_cast<std::size_t>(settings.experts)));
    const auto n_threads = static_cast<std::size_t>(settings.read_threads);

    ASSIGN_OR_RETURN(auto direct, experts::CheckpointStore::create(model, held));
    ASSIGN_OR_RETURN(auto buffered, experts::CheckpointStore::create(model, held, Mode::buffered));
    fmt::print("# machine: {}\n", bench::cpu_model());
    fmt::print("# model: {}; experts of {} bytes\n", settings.model, direct->record_bytes());
    if (!direct->why_buffered().empty())
        fmt::print("# not all of it is direct: {}\n", direct->why_buffered());
    fmt::print("how,threads,experts,read_bytes,rounding_bytes,seconds,gb_per_s,cpu_s_per_gib\n");
    for (int round = 0; round < 2; ++round) {
        empty_page_cache(*model.checkpoint);
        RETURN_IF_ERROR(read_all(*direct, keys, n_threads, false, "direct"));
        RETURN_IF_ERROR(read_all(*direct, keys, n_threads, true, "direct and copied"));
        RETURN_IF_ERROR(read_all(*buffered, keys, n_threads, false, "buffered"));
    }
    if (!settings.disk_cache.empty())
        RETURN_IF_ERROR(read_disk_cache(settings, model, *direct, keys, n_threads));
    return compute_all(*direct, direct->record(), keys);
}

}  // namespace

int main(int argc, char** argv) {
    return bench::settings_main<BenchSettings>(argc, argv, read_settings, run);
}
