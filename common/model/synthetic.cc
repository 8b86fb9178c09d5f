#include "common/model/synthetic.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>

#include "common/base/fd.h"
#include "common/base/hash.h"
#include "common/model/synthetic_config.h"
#include "common/model/token_cost.h"
#include "common/model/vision_tensors.h"
#include "common/storage/file.h"
#include "common/storage/safetensors_writer.h"

namespace k3::model {

namespace {

using storage::DType;
namespace fs = std::filesystem;

constexpr std::size_t kChunkBytes = std::size_t{8} << 20U;
// For a tensor's entries in a header and in the index, and room to spare.
constexpr std::uint64_t kEntryBytes = 400;

/// How the eight bytes at a time of a tensor become weights.
struct Recipe {
    enum class Kind { bits, floats } kind = Kind::bits;
    std::uint64_t keep = ~std::uint64_t{0};  // bits: word & keep | set
    std::uint64_t set = 0;
    float low = 0;  // floats: uniform in [low, high)
    float high = 0;
    std::uint64_t n_used = ~std::uint64_t{0};  // floats from here on are 0
};

constexpr std::uint64_t four_times(std::uint16_t word) noexcept {
    return word * 0x0001000100010001ULL;
}

/// Scales that keep a layer's outputs near the size of its inputs: magnitudes of a row of n weights
/// from 2^-k to 2^(2-k) with 2^k about 5 sqrt(n), norm weights from 1 to 1.5, MXFP4 scales 2^-9 to
/// 2^-8, the decay's parameters as the architecture initialises them.
Recipe recipe_of(const TensorSpec& tensor, const ModelConfig& config) {
    const std::string& name = tensor.name;
    Recipe recipe;
    if (tensor.dtype == DType::f32) {
        recipe.kind = Recipe::Kind::floats;
        const auto range = [&](float low, float high) {
            recipe.low = low;
            recipe.high = high;
        };
        if (name.ends_with("A_log")) {
            range(0.0F, 2.77F);
            recipe.n_used = config.kda.n_heads;
        } else if (name.ends_with("dt_bias")) {
            range(-6.0F, -2.0F);
        } else if (name.ends_with("o_norm.weight")) {
            range(1.0F, 1.5F);
        } else if (name.ends_with("e_score_correction_bias")) {
            range(-0.01F, 0.01F);
        } else {
            range(-0.5F, 0.5F);  // taps of the convolution
        }
    } else if (tensor.dtype == DType::u8) {
        if (name.ends_with("scale")) {  // 118 or 119
            recipe.keep = 0x0101010101010101ULL;
            recipe.set = 0x7676767676767676ULL;
        }
    } else if (tensor.shape.size() == 1) {
        recipe.keep = four_times(0x003F);
        recipe.set = four_times(0x3F80);
    } else {
        // The lowest exponent bit stays random, so the lower of two magnitudes has an even field.
        const double rows = 5.0 * std::sqrt(static_cast<double>(tensor.shape.back()));
        const auto field = static_cast<std::uint16_t>(127 - std::lround(std::log2(rows))) & ~1U;
        recipe.keep = four_times(0x80FF);
        recipe.set = four_times(static_cast<std::uint16_t>(field << 7U));
    }
    return recipe;
}

/// Bytes [at, at + out.size()) of a tensor; `at` is a multiple of 8.
void fill(const Recipe& recipe, std::uint64_t key, std::uint64_t at, std::span<std::byte> out) {
    for (std::size_t i = 0; i < out.size(); i += 8) {
        const std::uint64_t index = (at + i) / 8;
        std::uint64_t word = splitmix_finalise(key + index * 0x9e3779b97f4a7c15ULL);
        if (recipe.kind == Recipe::Kind::bits) {
            word = (word & recipe.keep) | recipe.set;
        } else {
            std::uint32_t pair[2];
            for (std::uint32_t half = 0; half < 2; ++half) {
                const auto bits = static_cast<std::uint32_t>(word >> (32 * half)) >> 8U;
                const float unit = static_cast<float>(bits) * 0x1p-24F;
                const bool used = index * 2 + half < recipe.n_used;
                const float value = used ? std::fma(unit, recipe.high - recipe.low, recipe.low) : 0;
                pair[half] = std::bit_cast<std::uint32_t>(value);
            }
            std::memcpy(&word, pair, sizeof(word));
        }
        std::memcpy(out.data() + i, &word, std::min<std::size_t>(8, out.size() - i));
    }
}

std::vector<TensorSpec> layer_shard(const ModelConfig& config, std::uint32_t layer) {
    std::vector<TensorSpec> tensors = trunk_layer_tensors(config, layer);
    if (!config.is_moe(layer)) return tensors;
    for (std::uint32_t expert = 0; expert < config.moe.n_experts; ++expert)
        for (TensorSpec& part : expert_tensors(config, layer, expert))
            tensors.push_back(std::move(part));
    return tensors;
}

/// The order in which the library of the format writes tensors: by the size of an element, largest
/// first, then by name. (The trunk's tensors of a layer are so one run, and each expert's are.)
void sort_as_released(std::vector<TensorSpec>& tensors) {
    std::sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) {
        const std::size_t size_a = storage::size_of(a.dtype);
        const std::size_t size_b = storage::size_of(b.dtype);
        return size_a != size_b ? size_a > size_b : a.name < b.name;
    });
}

Status check_options(const SyntheticOptions& options) {
    const struct {
        const char* what;
        std::uint32_t value;
        std::uint32_t least;
        std::uint32_t most;
    } ranges[] = {{"layers", options.n_layers, 4, kReleasedSize.n_layers},  // one of each kind
                  {"experts", options.n_experts, 16, kReleasedSize.n_experts},
                  {"vocabulary rows", options.vocab_size, 512, kReleasedSize.vocab_size}};
    for (const auto& range : ranges)
        if (range.value < range.least || range.value > range.most)
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{} {}: the architecture takes {} to {}", range.value,
                                     range.what, range.least, range.most),
                         "choose another number"};
    return Status::ok();
}

/// A directory that is DIR.partial, locked, until it is kept, and disappears if it is not. One that
/// a killed process left is taken over.
class NewDirectory {
  public:
    static Result<NewDirectory> create(const fs::path& directory) {
        std::error_code failure;
        if (fs::exists(directory, failure))
            return Error{ErrorCode::invalid_argument,
                         fmt::format("{} exists already", directory.string()),
                         "choose another directory or remove it"};
        // "a/b/" has an empty file name.
        NewDirectory made(directory.has_filename() ? directory : directory.parent_path());
        fs::path partial = made.final_;
        partial += ".partial";
        if (!fs::create_directory(partial, failure) && failure)
            return Error{ErrorCode::resource_exhausted,
                         fmt::format("cannot create {}: {}", partial.string(), failure.message()),
                         "choose a directory whose parent exists and can be written"};
        made.lock_ = Fd(::open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        if (!made.lock_.valid()) return storage::system_error(errno, "open", partial);
        if (::flock(made.lock_.get(), LOCK_EX | LOCK_NB) != 0)
            return Error{ErrorCode::resource_exhausted,
                         fmt::format("{} is being written by another process", directory.string()),
                         "wait for it, stop it, or choose another directory"};
        made.partial_ = partial;
        for (const fs::directory_entry& left : fs::directory_iterator(partial, failure))
            fs::remove_all(left, failure);
        if (failure) return storage::system_error(failure.value(), "empty", partial);
        return made;
    }
    NewDirectory(NewDirectory&& other) noexcept
        : final_(std::move(other.final_)),
          partial_(std::exchange(other.partial_, {})),
          lock_(std::move(other.lock_)) {}
    NewDirectory(const NewDirectory&) = delete;
    NewDirectory& operator=(const NewDirectory&) = delete;
    NewDirectory& operator=(NewDirectory&&) = delete;
    ~NewDirectory() {
        std::error_code ignored;
        if (!partial_.empty()) fs::remove_all(partial_, ignored);
    }

    const fs::path& path() const noexcept { return partial_; }

    Status keep() {
        std::error_code failure;
        fs::rename(partial_, final_, failure);
        if (failure) return storage::system_error(failure.value(), "rename", partial_);
        partial_.clear();
        return Status::ok();
    }

  private:
    explicit NewDirectory(fs::path directory) : final_(std::move(directory)) {}

    fs::path final_;
    fs::path partial_;
    Fd lock_;
};

Status check_space(const fs::path& directory, std::uint64_t bytes) {
    ASSIGN_OR_RETURN(const std::uint64_t free, storage::free_disk_bytes(directory));
    if (free > bytes) return Status::ok();
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("no room for {} bytes in {}: {} are free", bytes,
                             directory.parent_path().string(), free),
                 "choose another disk, or fewer layers or experts"};
}

Status write_text(const fs::path& path, std::string_view text) {
    Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!fd.valid()) return storage::system_error(errno, "create", path);
    while (!text.empty()) {
        const ssize_t n = ::write(fd.get(), text.data(), text.size());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return storage::system_error(errno, "write", path);
        text.remove_prefix(static_cast<std::size_t>(n));
    }
    if (::fsync(fd.get()) != 0) return storage::system_error(errno, "write", path);
    return Status::ok();
}

std::string index_json(const SyntheticPlan& plan) {
    std::map<std::string_view, std::string_view> shard_of;
    for (const SyntheticShard& shard : plan.shards)
        for (const TensorSpec& tensor : shard.tensors) shard_of[tensor.name] = shard.file;
    std::string json =
        fmt::format("{{\"metadata\":{{\"total_size\":{}}},\"weight_map\":{{", plan.bytes);
    for (const auto& [tensor, file] : shard_of)
        json += fmt::format("{}\"{}\":\"{}\"", json.ends_with('{') ? "" : ",", tensor, file);
    return json + "}}\n";
}

class ShardWriter {
  public:
    ShardWriter(const SyntheticPlan& plan,
                const std::function<bool(std::uint64_t, std::uint64_t)>& progress)
        : plan_(plan), progress_(progress), chunk_(kChunkBytes) {}

    Status write(const SyntheticShard& shard, const fs::path& directory) {
        ASSIGN_OR_RETURN(auto file,
                         storage::SafetensorsWriter::create(directory / shard.file, shard.tensors));
        if (plan_.options.sparse) {
            RETURN_IF_ERROR(file->leave_hole());
            RETURN_IF_ERROR(report(shard.bytes));
        } else {
            for (const TensorSpec& tensor : shard.tensors) RETURN_IF_ERROR(write(tensor, *file));
        }
        return file->finish();
    }

  private:
    Status report(std::uint64_t bytes) {
        done_ += bytes;
        if (progress_(done_, plan_.bytes)) return Status::ok();
        return Error{ErrorCode::cancelled, "interrupted; nothing is left behind", ""};
    }

    Status write(const TensorSpec& tensor, storage::SafetensorsWriter& file) {
        const Recipe recipe = recipe_of(tensor, plan_.config);
        const std::uint64_t key =
            XXH3_64bits_withSeed(tensor.name.data(), tensor.name.size(), plan_.options.seed);
        const std::uint64_t bytes = tensor.bytes();
        for (std::uint64_t at = 0; at < bytes; at += kChunkBytes) {
            const std::span<std::byte> chunk =
                std::span(chunk_).first(std::min<std::uint64_t>(kChunkBytes, bytes - at));
            fill(recipe, key, at, chunk);
            RETURN_IF_ERROR(file.append(chunk));
            RETURN_IF_ERROR(report(chunk.size()));
        }
        return Status::ok();
    }

    const SyntheticPlan& plan_;
    const std::function<bool(std::uint64_t, std::uint64_t)>& progress_;
    std::vector<std::byte> chunk_;
    std::uint64_t done_ = 0;
};

}  // namespace

Result<SyntheticPlan> plan_synthetic(const SyntheticOptions& options) {
    RETURN_IF_ERROR(check_options(options));
    SyntheticPlan plan;
    plan.options = options;
    plan.config_json =
        synthetic_config_json(options.n_layers, options.n_experts, options.vocab_size);
    ASSIGN_OR_RETURN(plan.config, parse_config(plan.config_json, "config.json"));
    std::vector<std::vector<TensorSpec>> shards;
    for (std::uint32_t layer = 0; layer < options.n_layers; ++layer)
        shards.push_back(layer_shard(plan.config, layer));
    shards.push_back(model_level_tensors(plan.config));
    if (options.sparse) {
        shards.push_back(vision_projector_tensors());
        shards.push_back(vision_tower_tensors());
        for (std::vector<TensorSpec>& tensors : shards) sort_as_released(tensors);
    }
    for (std::vector<TensorSpec>& tensors : shards) {
        SyntheticShard shard;
        shard.file =
            fmt::format("model-{:05}-of-{:06}.safetensors", plan.shards.size() + 1, shards.size());
        shard.tensors = std::move(tensors);
        shard.bytes = storage::total_bytes(shard.tensors);
        plan.bytes += shard.bytes;
        plan.n_tensors += shard.tensors.size();
        plan.shards.push_back(std::move(shard));
    }
    const TokenCost cost = token_cost(plan.config);
    plan.bytes_per_token = cost.trunk_bytes + cost.expert_bytes;
    return plan;
}

Status write_synthetic(const SyntheticPlan& plan, const fs::path& directory,
                       const std::function<bool(std::uint64_t, std::uint64_t)>& progress) {
    ASSIGN_OR_RETURN(NewDirectory target, NewDirectory::create(directory));
    RETURN_IF_ERROR(check_space(target.path(),
                                plan.options.sparse ? plan.n_tensors * kEntryBytes : plan.bytes));
    ShardWriter writer(plan, progress);
    for (const SyntheticShard& shard : plan.shards)
        RETURN_IF_ERROR(writer.write(shard, target.path()));
    const std::uint32_t vocab_size = plan.options.vocab_size;
    RETURN_IF_ERROR(write_text(target.path() / "config.json", plan.config_json));
    RETURN_IF_ERROR(write_text(target.path() / "model.safetensors.index.json", index_json(plan)));
    RETURN_IF_ERROR(write_text(target.path() / "tiktoken.model", synthetic_ranks(vocab_size)));
    RETURN_IF_ERROR(write_text(target.path() / "tokenizer_config.json",
                               synthetic_tokenizer_config(vocab_size)));
    return target.keep();
}

}  // namespace k3::model
