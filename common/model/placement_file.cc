#include "common/model/placement_file.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <optional>
#include <set>

#include "common/storage/file.h"
#include "common/transport/messages/control.h"

namespace k3::model {

namespace {

constexpr std::string_view kFirstLine = "k3pipe placement 1";
static_assert(kFirstLine.starts_with(kPlacementMagic));
constexpr std::size_t kMaxNameBytes = 200;

std::string checksum_of(std::string_view text) {
    return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
}

/// Cuts the first word, or line, off.
std::string_view take_until(std::string_view& text, char separator) {
    const std::size_t end = std::min(text.find(separator), text.size());
    const std::string_view taken = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return taken;
}

std::optional<std::uint32_t> take_number(std::string_view& line) {
    const std::string_view word = take_until(line, ' ');
    std::uint32_t number = 0;
    const auto [end, code] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (code != std::errc() || end != word.data() + word.size()) return std::nullopt;
    return number;
}

/// Reads the lines behind the checksum's verification; false from a method: the line is wrong.
class PlacementReader {
  public:
    PlacementReader(const ModelConfig& config, PlacementFile& out) : config_(config), out_(out) {}

    bool read(std::string_view line) {
        const std::string_view word = take_until(line, ' ');
        if (word == "fingerprint") {
            out_.fingerprint = line;
            return out_.servers.empty() && !line.empty();
        }
        if (word == "experts") {
            n_experts_ = take_number(line).value_or(0);
            return line.empty() && out_.servers.empty();
        }
        if (word == "server") return read_server(line);
        if (word == "layer") return read_layer(line);
        return false;
    }

    std::uint32_t n_experts() const { return n_experts_; }

  private:
    bool read_server(std::string_view line) {
        const std::string name(take_until(line, ' '));
        const bool has_weight = take_until(line, ' ') == "weight";
        const std::uint32_t weight = take_number(line).value_or(0);
        if (name.empty() || name.size() > kMaxNameBytes || !has_weight || weight == 0 ||
            weight > msg::kMaxExpertWeight || !line.empty() || !names_.insert(name).second)
            return false;
        out_.servers.push_back({name, weight, Placement(config_.n_layers, config_.moe.n_experts)});
        return true;
    }

    bool read_layer(std::string_view line) {
        const std::optional<std::uint32_t> layer = take_number(line);
        if (out_.servers.empty() || !layer || *layer >= config_.n_layers ||
            !config_.is_moe(*layer) || line.size() != (config_.moe.n_experts + 7) / 8 * 2)
            return false;
        for (std::uint32_t expert = 0; expert < line.size() * 4; ++expert) {
            unsigned byte = 0;
            const char* digits = line.data() + expert / 8 * 2;
            const auto [end, code] = std::from_chars(digits, digits + 2, byte, 16);
            if (code != std::errc() || end != digits + 2) return false;
            if (((byte >> (expert % 8)) & 1U) == 0) continue;
            if (expert >= config_.moe.n_experts) return false;
            out_.servers.back().held.add(*layer, expert);
        }
        return true;
    }

    const ModelConfig& config_;
    PlacementFile& out_;
    std::uint32_t n_experts_ = 0;
    std::set<std::string> names_;
};

Status check_coverage(const PlacementFile& placement, std::string_view source,
                      const ModelConfig& config) {
    std::uint64_t n_missing = 0;
    std::string first;
    for (std::uint32_t layer = config.first_k_dense; layer < config.n_layers; ++layer)
        for (std::uint32_t expert = 0; expert < config.moe.n_experts; ++expert) {
            const bool is_held =
                std::any_of(placement.servers.begin(), placement.servers.end(),
                            [&](const ServerPlacement& s) { return s.held.holds(layer, expert); });
            if (!is_held && n_missing++ == 0)
                first = fmt::format("layer {} expert {}", layer, expert);
        }
    if (n_missing == 0) return Status::ok();
    return Error{
        ErrorCode::incompatible,
        fmt::format("{}: {} experts are on no server, the first is {}", source, n_missing, first),
        "make the file again with k3pipe placement"};
}

}  // namespace

std::string format_placement(const PlacementFile& placement) {
    std::string text =
        fmt::format("{}\nfingerprint {}\nexperts {}\n", kFirstLine, placement.fingerprint,
                    placement.servers.empty() ? 0 : placement.servers.front().held.n_experts());
    for (const ServerPlacement& server : placement.servers) {
        fmt::format_to(std::back_inserter(text), "server {} weight {}\n", server.name,
                       server.weight);
        for (const msg::ExpertHolding& holding : server.held.holdings())
            fmt::format_to(std::back_inserter(text), "layer {} {:02x}\n", holding.layer,
                           fmt::join(holding.experts, ""));
    }
    return text + fmt::format("checksum {}\n", checksum_of(text));
}

Result<PlacementFile> parse_placement(std::string_view text, std::string_view source,
                                      const ModelConfig& config, std::string_view fingerprint) {
    const auto corrupt = [&](std::string what) {
        return Error{ErrorCode::corrupt, fmt::format("{} {}", source, what),
                     "make it again with k3pipe placement --out"};
    };
    std::string_view rest = text;
    if (take_until(rest, '\n') != kFirstLine)
        return corrupt(fmt::format("does not begin with '{}'", kFirstLine));
    const std::size_t last = text.rfind("checksum ");
    if (last == std::string_view::npos ||
        text.substr(last) != fmt::format("checksum {}\n", checksum_of(text.substr(0, last))))
        return corrupt("is damaged or cut off: its checksum is not that of its text");

    PlacementFile placement;
    PlacementReader reader(config, placement);
    rest = rest.substr(0, rest.size() - (text.size() - last));
    for (std::size_t number = 2; !rest.empty(); ++number) {
        const std::string_view line = take_until(rest, '\n');
        const bool is_understood = reader.read(line);
        // Before anything else that can be wrong: lines of another model are no lines of this one.
        if (!placement.fingerprint.empty() && placement.fingerprint != fingerprint)
            return Error{ErrorCode::incompatible,
                         fmt::format("{} places the experts of the checkpoint with fingerprint {}, "
                                     "and this one has {}",
                                     source, placement.fingerprint, fingerprint),
                         "make a placement of this checkpoint with k3pipe placement --out"};
        if (!is_understood) return corrupt(fmt::format("has a wrong line {}", number));
    }
    if (placement.fingerprint.empty() || reader.n_experts() != config.moe.n_experts)
        return corrupt(fmt::format("names no checkpoint, or {} experts of a layer instead of {}",
                                   reader.n_experts(), config.moe.n_experts));
    RETURN_IF_ERROR(check_coverage(placement, source, config));
    return placement;
}

Result<PlacementFile> read_placement(const std::filesystem::path& path, const Model& model) {
    ASSIGN_OR_RETURN(const std::string text, storage::read_text_file(path, kMaxPlacementBytes));
    return parse_placement(text, path.string(), model.config, model.fingerprint);
}

Result<const ServerPlacement*> find_server(const PlacementFile& placement, std::string_view name,
                                           std::string_view source) {
    std::string names;
    for (const ServerPlacement& server : placement.servers) {
        if (server.name == name) return &server;
        names += (names.empty() ? "" : ", ") + server.name;
    }
    return Error{ErrorCode::not_found,
                 fmt::format("{} has no server '{}', but {}", source, name, names),
                 "call the server so, or make the placement again with k3pipe placement --out"};
}

Result<Share> read_share(std::string_view share, const Model& model) {
    if (!share.starts_with('@')) {
        ASSIGN_OR_RETURN(Placement held, parse_share(share, model.config));
        return Share{std::move(held)};
    }
    const std::size_t mark = share.rfind('#');
    if (mark == std::string_view::npos || mark + 1 == share.size())
        return Error{ErrorCode::invalid_argument,
                     fmt::format("share '{}' names no server of its placement file", share),
                     "write @FILE#NAME, NAME being that of the server in the file"};
    const std::filesystem::path path(share.substr(1, mark - 1));
    ASSIGN_OR_RETURN(const PlacementFile placement, read_placement(path, model));
    ASSIGN_OR_RETURN(const ServerPlacement* server,
                     find_server(placement, share.substr(mark + 1), path.string()));
    return Share{server->held, server->weight};
}

std::string share_in_file(const std::filesystem::path& file, std::string_view name) {
    return fmt::format("@{}#{}", file.string(), name);
}

}  // namespace k3::model
