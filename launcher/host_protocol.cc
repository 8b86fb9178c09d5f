#include "launcher/host_protocol.h"

#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/model/placement_file.h"
#include "common/transport/curve_keys.h"

namespace k3::launcher {

using nlohmann::json;

namespace {

constexpr std::string_view kMagic = "k3pipe-stage ";
constexpr int kSignalBase = 128;
constexpr int kLastSignal = 64;

Error malformed(const std::string& why) {
    return {ErrorCode::corrupt, "the description of a stage " + why,
            "only a launcher starts this program"};
}

/// The number behind a blank, which it moves past.
std::optional<std::size_t> next_number(std::string_view& rest) {
    if (!rest.starts_with(' ')) return std::nullopt;
    rest.remove_prefix(1);
    std::size_t number = 0;
    auto [stop, bad] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
    if (bad != std::errc{}) return std::nullopt;
    rest.remove_prefix(static_cast<std::size_t>(stop - rest.data()));
    return number;
}

}  // namespace

Result<std::string> encode_description(const StageDescription& description,
                                       DescriptionSizes sizes) {
    json env = json::array();
    for (const auto& [name, value] : description.env) env.push_back({name, value});
    const json root = {{"pipeline", description.pipeline},
                       {"stage", description.stage},
                       {"run_id", description.run_id},
                       {"argv", description.argv},
                       {"n_wrap", description.n_wrap},
                       {"env", std::move(env)},
                       {"own_sessions", description.own_sessions},
                       {"placement", description.placement}};
    std::string body = root.dump(-1, ' ', false, json::error_handler_t::replace);
    std::string text = fmt::format("{}{} {} {} {}\n", kMagic, kHostProtocolVersion, body.size(),
                                   sizes.keys, sizes.placement) +
                       body;
    if (text.size() + sizes.keys <= kMaxDescriptionBytes) return text;
    return Error{ErrorCode::invalid_argument,
                 fmt::format("the command line of {} has {} bytes, and {} can be sent to its box",
                             description.stage, text.size(), kMaxDescriptionBytes),
                 "shorten its settings"};
}

Result<DescriptionSizes> parse_head(std::string_view head) {
    if (!head.starts_with(kMagic)) return malformed("has no head");
    const char* end = head.data() + head.size();
    int version = 0;
    auto [space, bad_version] = std::from_chars(head.data() + kMagic.size(), end, version);
    if (bad_version != std::errc{}) return malformed("names no version");
    if (version != kHostProtocolVersion)
        return Error{ErrorCode::incompatible,
                     fmt::format("the launcher speaks version {} of the conversation with its "
                                 "boxes, and the k3pipe of this box speaks version {}",
                                 version, kHostProtocolVersion),
                     "install the same k3pipe on both, or leave out binary in [hosts]"};
    std::string_view rest(space, static_cast<std::size_t>(end - space));
    const auto body = next_number(rest);
    const auto keys = next_number(rest);
    const auto placement = next_number(rest);
    if (!body.has_value() || !keys.has_value() || !placement.has_value() || !rest.empty())
        return malformed("names no sizes");
    if (*body == 0 || *body > kMaxDescriptionBytes ||
        (*keys != 0 && *keys != transport::CurveKeys::kFileBytes) ||
        *placement > model::kMaxPlacementBytes)
        return malformed("has an impossible size");
    return DescriptionSizes{*body, *keys, *placement};
}

Result<StageDescription> parse_description(std::string_view body) {
    try {
        const json root = json::parse(body);
        StageDescription description;
        description.pipeline = root.at("pipeline");
        description.stage = root.at("stage");
        description.run_id = root.at("run_id");
        description.argv = root.at("argv").get<std::vector<std::string>>();
        description.n_wrap = root.at("n_wrap");
        for (const json& pair : root.at("env"))
            description.env.emplace_back(pair.at(0).get<std::string>(),
                                         pair.at(1).get<std::string>());
        description.own_sessions = root.at("own_sessions");
        description.placement = root.at("placement");
        if (description.n_wrap >= description.argv.size()) return malformed("names no program");
        return description;
    } catch (const json::exception& e) {
        return malformed(fmt::format("cannot be read: {}", e.what()));
    }
}

int relayed_code(const Ending& ending) noexcept {
    if (ending.signalled) return kSignalBase + ending.number;
    return ending.number < kSignalBase ? ending.number : kSignalBase - 1;
}

Ending relayed_ending(int code) noexcept {
    if (code > kSignalBase && code <= kSignalBase + kLastSignal) return {true, code - kSignalBase};
    return {false, code};
}

}  // namespace k3::launcher
