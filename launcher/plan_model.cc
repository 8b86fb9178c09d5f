#include "launcher/plan_model.h"

#include <fmt/format.h>

#include <iterator>

#include "common/model/model_sizes.h"
#include "common/model/tensor_names.h"

namespace k3::launcher {

namespace {

using model::ModelSizes;
using model::PartSize;

/// Rows of name, parameters and bytes.
class SizeTable {
  public:
    void heading(std::string_view text) {
        fmt::format_to(std::back_inserter(text_), "\n  {:<36}{:>19}{:>22}\n", text, "parameters",
                       "bytes");
    }
    void row(std::string_view name, const PartSize& size, std::string_view note = "") {
        line(name, grouped(size.parameters), grouped(size.bytes), note);
    }
    void bytes(std::string_view name, std::uint64_t bytes, std::string_view note = "") {
        line(name, "", grouped(bytes), note);
    }
    std::string take() { return std::move(text_); }

  private:
    void line(std::string_view name, const std::string& parameters, const std::string& bytes,
              std::string_view note) {
        fmt::format_to(std::back_inserter(text_), "  {:<36}{:>19}{:>22}{}{}\n", name, parameters,
                       bytes, note.empty() ? "" : "  ", note);
    }
    std::string text_;
};

void add_expert_rows(const ModelSizes& sizes, SizeTable& table) {
    const auto matrix = [](const model::PackedMatrixSize& size) {
        return fmt::format("packed {}, scales {}", grouped(size.packed), grouped(size.scales));
    };
    table.row("one routed expert", sizes.expert,
              matrix({sizes.w1.packed + sizes.w2.packed + sizes.w3.packed,
                      sizes.w1.scales + sizes.w2.scales + sizes.w3.scales}));
    table.bytes("  w1 or w3", sizes.w1.packed + sizes.w1.scales, matrix(sizes.w1));
    table.bytes("  w2", sizes.w2.packed + sizes.w2.scales, matrix(sizes.w2));
    table.row("experts of one layer", sizes.layer_experts);
    table.row(fmt::format("all {} experts", grouped(sizes.n_experts)), sizes.all_experts);
}

/// A layer of each kind, as far as the model has them.
void add_layer_rows(const model::ModelConfig& config, SizeTable& table) {
    bool shown_kda = false;
    bool shown_mla = false;
    bool shown_moe = false;
    for (std::uint32_t layer = 0; layer < config.n_layers; ++layer) {
        const model::TrunkLayerSize size = model::trunk_layer_size(config, layer);
        const bool is_kda = config.layer_kinds[layer] == model::LayerKind::kda;
        if (layer == 0) {
            table.row("trunk run of layer 0", size.total());
            table.row("  norms, attention residuals", size.vectors);
            if (!config.is_moe(layer)) table.row("  dense FFN", size.dense);
        }
        bool& shown = is_kda ? shown_kda : shown_mla;
        if (!config.is_moe(layer) || shown) continue;
        shown = true;
        table.row(fmt::format("trunk run, {} with experts", is_kda ? "KDA" : "MLA"), size.total());
        table.row(fmt::format("  {} attention", is_kda ? "KDA" : "MLA"), size.attention);
        if (shown_moe) continue;
        shown_moe = true;
        table.row("  MoE without routed experts", size.moe(),
                  fmt::format("shared {}, latent {}, router {}", grouped(size.shared.bytes),
                              grouped(size.latent.bytes), grouped(size.router.bytes)));
    }
}

void add_total_rows(const ModelSizes& sizes, SizeTable& table) {
    table.row("trunk", sizes.trunk, "read in full for every step");
    table.row(fmt::format("  attention of {} KDA layers", sizes.n_kda), sizes.kda);
    table.row(fmt::format("  attention of {} MLA layers", sizes.n_mla), sizes.mla);
    table.row("  shared experts", sizes.shared);
    table.row("  latent projections", sizes.latent);
    table.row("  routers", sizes.router);
    table.row("  dense FFN", sizes.dense);
    table.row("  norms, attention residuals", sizes.vectors);
    table.row("embedding", sizes.embedding);
    table.row("output head", sizes.head);
    table.row("both, and the model's vectors", sizes.ends);
    table.row("trunk and these", sizes.resident);
    table.row("text model", sizes.text);
}

void add_token_rows(const ModelSizes& sizes, SizeTable& table) {
    table.heading("of one token");
    table.bytes(fmt::format("{} picked experts", grouped(sizes.picks)), sizes.picked_bytes,
                "less what the caches hold");
    table.bytes("trunk", sizes.trunk.bytes);
    table.bytes("output head", sizes.head.bytes);
    table.row("read per token, at most", {sizes.used_parameters, sizes.touched_bytes});
}

}  // namespace

std::string grouped(std::uint64_t number) {
    std::string text = std::to_string(number);
    for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, 1, ',');
    return text;
}

Status check_complete(const model::Model& model) {
    RETURN_IF_ERROR(
        model::check_trunk_tensors(*model.checkpoint, model.config, 0, model.config.n_layers));
    return model::check_expert_tensors(*model.checkpoint, model.config, 0, model.config.n_layers);
}

std::vector<std::filesystem::path> shard_paths(const storage::Checkpoint& checkpoint) {
    std::vector<std::filesystem::path> paths;
    for (std::uint32_t shard = 0; shard < checkpoint.n_shards(); ++shard)
        paths.push_back(checkpoint.shard_path(shard));
    return paths;
}

std::string model_table(const model::Model& model) {
    const model::ModelConfig& config = model.config;
    const ModelSizes sizes = model::model_sizes(config);
    SizeTable table;
    table.heading("as stored");
    add_expert_rows(sizes, table);
    add_layer_rows(config, table);
    add_total_rows(sizes, table);
    add_token_rows(sizes, table);
    const std::string found =
        model.checkpoint == nullptr
            ? "no shards here: sizes are those that config.json calls for"
            : fmt::format(
                  "complete: {} tensors in {} files, each of the type and shape that "
                  "config.json calls for",
                  grouped(model.checkpoint->tensors().size()), model.checkpoint->n_shards());
    return fmt::format(
        "model {}: {} layers ({} with experts), context {} positions, fingerprint {}\n  {}\n{}",
        config.name, config.n_layers, sizes.n_moe, grouped(config.max_positions),
        model.fingerprint.empty() ? "unknown" : model.fingerprint, found, table.take());
}

}  // namespace k3::launcher
