#include "launcher/pod_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <utility>

namespace k3::launcher {

using msg::ServiceKind;

namespace {

/// "experts-" of the server "experts-3" with number 3; nothing for another name.
std::optional<std::string> stem(const StageSpec& stage, std::size_t number) {
    const std::string tail = std::to_string(number);
    if (!stage.name.ends_with("-" + tail)) return std::nullopt;
    return stage.name.substr(0, stage.name.size() - tail.size());
}

/// Values of a setting without what only the server's number makes of them.
std::vector<std::string> plain_values(const ServiceSetting& setting, const std::string& name,
                                      std::size_t number) {
    std::vector<std::string> values = setting.values;
    if (setting.name == "share")
        for (std::string& value : values) value = numbered_share(value, name, number, "");
    return values;
}

/// Whether two servers differ in nothing but their number.
bool are_alike(const StageSpec& a, std::size_t a_number, const StageSpec& b, std::size_t b_number) {
    if (!stem(a, a_number) || stem(a, a_number) != stem(b, b_number)) return false;
    if (a.binary != b.binary || a.wrap != b.wrap || a.model != b.model || a.env != b.env)
        return false;
    return std::ranges::equal(
        a.settings, b.settings, [&](const ServiceSetting& x, const ServiceSetting& y) {
            return x.name == y.name &&
                   plain_values(x, a.name, a_number) == plain_values(y, b.name, b_number);
        });
}

bool is_last_trunk(const PipelineSpec& spec, std::size_t place) {
    return std::none_of(spec.stages.begin() + static_cast<std::ptrdiff_t>(place) + 1,
                        spec.stages.end(),
                        [](const StageSpec& stage) { return stage.kind == ServiceKind::trunk; });
}

/// A set of one is called as its stage is, one of several as what they have in common.
void name_group(const PipelineSpec& spec, PodGroup* group) {
    const StageSpec& first = spec.stages[group->stages.front()];
    if (group->stages.size() == 1) {
        group->name = first.name;
        group->is_numbered = false;
        group->first_ordinal = 0;
        return;
    }
    const std::string common = *stem(first, group->first_ordinal);
    group->name = group->first_ordinal == 0
                      ? common.substr(0, common.size() - 1)
                      : fmt::format("{}from-{}", common, group->first_ordinal);
}

}  // namespace

std::vector<PodGroup> make_pod_groups(const PipelineSpec& spec) {
    std::vector<PodGroup> groups;
    PodGroup front{"gateway", {}, false, 0};
    std::size_t n_experts = 0;
    for (std::size_t i = 0; i < spec.stages.size(); ++i) {
        const StageSpec& stage = spec.stages[i];
        const bool is_expert = stage.kind == ServiceKind::experts;
        const std::size_t number = is_expert ? n_experts++ : 0;
        if (stage.attached()) continue;
        if (!is_expert && (stage.kind != ServiceKind::trunk || is_last_trunk(spec, i))) {
            front.stages.push_back(i);
            continue;
        }
        PodGroup* last = groups.empty() || !groups.back().is_numbered ? nullptr : &groups.back();
        const std::size_t expected =
            last == nullptr ? 0 : last->first_ordinal + last->stages.size();
        if (is_expert && last != nullptr && number == expected &&
            are_alike(spec.stages[last->stages.back()], number - 1, stage, number))
            last->stages.push_back(i);
        else
            groups.push_back({"", {i}, is_expert && stem(stage, number).has_value(), number});
    }
    for (PodGroup& group : groups) name_group(spec, &group);
    groups.push_back(std::move(front));
    return groups;
}

std::string numbered_share(const std::string& share, const std::string& name, std::size_t number,
                           std::string_view variable) {
    const std::string digits = std::to_string(number);
    if (share.starts_with(digits + "/"))
        return fmt::format("{}{}", variable, share.substr(digits.size()));
    if (share.starts_with('@') && share.ends_with("#" + name))
        return fmt::format("{}{}", share.substr(0, share.size() - digits.size()), variable);
    return share;
}

std::string dns_name(std::string_view name) {
    std::string out;
    for (char c : name) out += c == '_' ? '-' : static_cast<char>(std::tolower(c));
    while (!out.empty() && out.back() == '-') out.pop_back();
    return out;
}

}  // namespace k3::launcher
