#include "services/gateway/compatibility.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace k3::gateway {

namespace {

Error incompatible(std::string message, std::string remedy) {
    return Error{ErrorCode::incompatible, std::move(message), std::move(remedy)};
}

std::string shown(const std::string& fingerprint) {
    return fingerprint.empty() ? "none" : fingerprint;
}

template <typename Facts>
Result<Facts> facts_of(const msg::Announcement& stage, msg::ServiceKind expected) {
    const Facts* facts = std::get_if<Facts>(&stage.facts);
    if (stage.kind == expected && facts != nullptr) return *facts;
    return incompatible(
        fmt::format("the endpoint given for the {} is served by '{}', a {}",
                    msg::to_string(expected), stage.name, msg::to_string(stage.kind)),
        "check the endpoints in the gateway's settings");
}

std::string layers(const msg::TrunkFacts& facts) {
    return fmt::format("{}-{} of {}", facts.first_layer,
                       std::uint64_t{facts.first_layer} + facts.n_layers - 1, facts.total_layers);
}

/// Two neighbouring stages of the trunk.
Status check_neighbours(const msg::Announcement& before, const msg::TrunkFacts& a,
                        const msg::Announcement& after, const msg::TrunkFacts& b) {
    if (std::uint64_t{a.first_layer} + a.n_layers != b.first_layer)
        return incompatible(
            fmt::format("'{}' serves layers {} and '{}' after it layers {}: they do not follow "
                        "each other",
                        before.name, layers(a), after.name, layers(b)),
            "give the trunk stages in order, each beginning where the one before it ends");
    if (before.fingerprint != after.fingerprint)
        return incompatible(
            fmt::format("'{}' serves checkpoint {} and '{}' checkpoint {}", before.name,
                        shown(before.fingerprint), after.name, shown(after.fingerprint)),
            "start all stages on the same checkpoint");
    if (a.total_layers != b.total_layers || a.hidden_size != b.hidden_size ||
        a.vocab_size != b.vocab_size)
        return incompatible(
            fmt::format("'{}' has {} layers, hidden size {}, vocabulary {}; '{}' has {} layers, "
                        "hidden size {}, vocabulary {}",
                        before.name, a.total_layers, a.hidden_size, a.vocab_size, after.name,
                        b.total_layers, b.hidden_size, b.vocab_size),
            "start all stages on the same checkpoint");
    if (a.out_vectors != b.in_vectors || a.out_vectors == 0)
        return incompatible(fmt::format("rows leave '{}' with {} vectors and enter '{}' with {}",
                                        before.name, a.out_vectors, after.name, b.in_vectors),
                            "use the same program version for both stages");
    if (a.mla_bf16 != b.mla_bf16)
        return incompatible(
            fmt::format("'{}' keeps MLA latents in {} and '{}' in {}", before.name,
                        a.mla_bf16 ? "bf16" : "fp32", after.name, b.mla_bf16 ? "bf16" : "fp32"),
            "start all trunk stages with the same --mla-cache");
    return Status::ok();
}

Status check_ends(const msg::Announcement& first, const msg::TrunkFacts& a,
                  const msg::Announcement& last, const msg::TrunkFacts& b) {
    if (a.first_layer != 0 || a.in_vectors != 0)
        return incompatible(
            fmt::format("the first trunk stage '{}' begins at layer {} of {}, not at layer 0",
                        first.name, a.first_layer, a.total_layers),
            "add the stage that serves the layers before it");
    if (std::uint64_t{b.first_layer} + b.n_layers != b.total_layers || b.out_vectors != 0)
        return incompatible(
            fmt::format("the last trunk stage '{}' serves layers {}: layers up to {} are missing",
                        last.name, layers(b), b.total_layers - 1),
            "add the stage that serves the layers after it");
    return Status::ok();
}

}  // namespace

Result<PipelineFacts> check_stages(const msg::Announcement& tokenizer,
                                   std::span<const msg::Announcement> trunk,
                                   const msg::Announcement& sampler) {
    if (trunk.empty())
        return Error{ErrorCode::invalid_argument, "the pipeline has no trunk stage",
                     "give at least one trunk endpoint"};
    ASSIGN_OR_RETURN(const auto tokenizer_facts,
                     facts_of<msg::TokenizerFacts>(tokenizer, msg::ServiceKind::tokenizer));
    ASSIGN_OR_RETURN(const auto sampler_facts,
                     facts_of<msg::SamplerFacts>(sampler, msg::ServiceKind::sampler));
    PipelineFacts out;
    out.max_positions = std::numeric_limits<std::uint64_t>::max();
    out.max_step_rows = out.max_sessions = std::numeric_limits<std::uint32_t>::max();
    std::vector<msg::TrunkFacts> facts;
    for (const msg::Announcement& stage : trunk) {
        ASSIGN_OR_RETURN(const auto own, facts_of<msg::TrunkFacts>(stage, msg::ServiceKind::trunk));
        if (own.n_layers == 0 || own.vocab_size == 0 || own.max_positions == 0 ||
            own.max_step_rows == 0 || own.max_sessions == 0)
            return incompatible(
                fmt::format("'{}' announces {} layers, vocabulary {}, {} positions, {} rows a step "
                            "and {} sessions; none may be 0",
                            stage.name, own.n_layers, own.vocab_size, own.max_positions,
                            own.max_step_rows, own.max_sessions),
                "correct the stage's settings");
        if (!facts.empty())
            RETURN_IF_ERROR(check_neighbours(trunk[facts.size() - 1], facts.back(), stage, own));
        out.max_positions = std::min(out.max_positions, own.max_positions);
        out.max_step_rows = std::min(out.max_step_rows, own.max_step_rows);
        out.max_sessions = std::min(out.max_sessions, own.max_sessions);
        facts.push_back(own);
    }
    RETURN_IF_ERROR(check_ends(trunk.front(), facts.front(), trunk.back(), facts.back()));
    if (tokenizer_facts.vocab_size != facts.front().vocab_size)
        return incompatible(
            fmt::format("'{}' has a vocabulary of {} and '{}' one of {}", tokenizer.name,
                        tokenizer_facts.vocab_size, trunk.front().name, facts.front().vocab_size),
            "start both on the same checkpoint");
    if (!tokenizer.fingerprint.empty() && tokenizer.fingerprint != trunk.front().fingerprint)
        return incompatible(fmt::format("'{}' serves checkpoint {} and '{}' checkpoint {}",
                                        tokenizer.name, tokenizer.fingerprint, trunk.front().name,
                                        shown(trunk.front().fingerprint)),
                            "start all stages on the same checkpoint");
    if (sampler_facts.max_rows == 0)
        return incompatible(fmt::format("'{}' takes 0 rows a call", sampler.name),
                            "start it with --max-rows of at least 1");
    out.fingerprint = trunk.front().fingerprint;
    out.vocab_size = facts.front().vocab_size;
    out.hidden_size = facts.front().hidden_size;
    out.mla_bf16 = facts.front().mla_bf16;
    out.max_sample_rows = sampler_facts.max_rows;
    out.stop_ids = tokenizer_facts.stop_ids;
    return out;
}

}  // namespace k3::gateway
