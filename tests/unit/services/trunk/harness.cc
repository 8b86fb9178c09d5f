#include "tests/unit/services/trunk/harness.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/kernels/parallel.h"
#include "tests/support/golden.h"

namespace k3::test {

namespace {

template <typename T>
T must(Result<T> result) {
    if (result.has_value()) return std::move(result).value();
    std::fprintf(stderr, "harness: %s\n", result.error().sentence().c_str());
    std::exit(99);
}

}  // namespace

const model::Model& tiny_model() {
    static const model::Model model = must(model::open_model(golden_dir() / "tiny-k3"));
    return model;
}

const model::Model& demo_model() {
    static const model::Model model = must(model::open_model(demo_model_dir()));
    return model;
}

Harness::Harness(const model::Model& model, Options options) : config_(model.config) {
    config_.mla.cache = options.cache;
    const kernels::KernelTable& table =
        options.table != nullptr ? *options.table : kernels::kernels();
    kernels::set_threads(options.n_threads);
    experts_ = std::make_unique<LocalExperts>(model, table);
    trunk::ExpertBackend& experts = options.experts != nullptr ? *options.experts : *experts_;
    std::vector<std::uint32_t> bounds = options.cuts;
    bounds.insert(bounds.begin(), 0);
    bounds.push_back(config_.n_layers);
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
        const trunk::LayerRange range{bounds[i], bounds[i + 1] - bounds[i]};
        Part part;
        if (options.weights)
            part.weights = options.weights(range);
        else
            part.weights =
                must(trunk::RamWeights::load(*model.checkpoint, config_, range, nullptr));
        part.sessions = std::make_unique<trunk::SessionTable>(
            config_, range, options.n_threads,
            trunk::SessionTable::Options{1024, std::uint64_t{1} << 34U, config_.max_positions});
        part.stage = must(trunk::Stage::create(
            config_, *part.weights, experts, table,
            trunk::Stage::Options{range, options.max_step_rows, options.n_threads}));
        parts_.push_back(std::move(part));
    }
}

void Harness::open(std::uint64_t session, std::uint64_t max_positions) {
    for (Part& part : parts_) must(part.sessions->open(session, max_positions));
}

void Harness::fork(std::uint64_t source, std::uint64_t target, std::uint64_t max_positions) {
    for (Part& part : parts_) {
        Status forked = part.sessions->fork(source, target, max_positions);
        K3_CHECK(forked.has_value(), forked.error().message);
    }
}

void Harness::drop(std::uint64_t session) {
    for (Part& part : parts_) part.sessions->drop(session);
}

Result<std::vector<float>> Harness::step(const std::vector<TokenRow>& rows,
                                         const std::vector<std::uint32_t>& wanted) {
    std::vector<float> carried;
    for (Part& part : parts_) {
        std::map<std::uint64_t, std::uint64_t> next;
        std::vector<trunk::StepRow> step_rows;
        for (const TokenRow& row : rows) {
            ASSIGN_OR_RETURN(trunk::Session * session, part.sessions->find(row.session));
            const std::uint64_t position =
                next.try_emplace(row.session, session->position()).first->second++;
            step_rows.push_back({session, position, row.token});
        }
        ASSIGN_OR_RETURN(std::span<const float> out,
                         part.stage->step({step_rows, carried, wanted}));
        carried.assign(out.begin(), out.end());
    }
    return carried;
}

std::vector<float> Harness::feed(std::uint64_t session, const std::vector<std::uint32_t>& ids,
                                 std::size_t chunk) {
    std::vector<float> all;
    for (std::size_t first = 0; first < ids.size(); first += chunk) {
        std::vector<TokenRow> rows;
        std::vector<std::uint32_t> wanted;
        for (std::size_t i = first; i < std::min(first + chunk, ids.size()); ++i) {
            wanted.push_back(static_cast<std::uint32_t>(rows.size()));
            rows.push_back({session, ids[i]});
        }
        std::vector<float> logits = must(step(rows, wanted));
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

std::vector<std::uint32_t> Harness::greedy(std::uint64_t session,
                                           const std::vector<std::uint32_t>& ids, std::size_t n,
                                           const std::vector<std::uint32_t>& stop_ids) {
    std::vector<float> logits = feed(session, ids, ids.size());
    std::vector<std::uint32_t> out;
    while (true) {
        out.push_back(argmax(row_of(logits, logits.size() / vocab_size() - 1, vocab_size())));
        const bool stopped =
            std::find(stop_ids.begin(), stop_ids.end(), out.back()) != stop_ids.end();
        if (out.size() == n || stopped) return out;
        logits = feed(session, {out.back()}, 1);
    }
}

void Harness::set_observer(trunk::StepObserver* observer) {
    for (Part& part : parts_) part.stage->set_observer(observer);
}

trunk::Session& Harness::session(std::uint64_t id, std::uint32_t layer) {
    for (Part& part : parts_)
        if (layer < part.stage->range().end()) return *must(part.sessions->find(id));
    std::exit(99);
}

std::uint32_t argmax(std::span<const float> values) {
    return static_cast<std::uint32_t>(
        std::distance(values.begin(), std::max_element(values.begin(), values.end())));
}

std::vector<GoldenPrompt> golden_prompts() {
    std::ifstream file(golden_dir() / "expected" / "manifest.json");
    const nlohmann::json manifest = nlohmann::json::parse(file);
    std::vector<GoldenPrompt> prompts;
    for (const auto& [name, prompt] : manifest["prompts"].items())
        prompts.push_back({name, prompt["ids"].get<std::vector<std::uint32_t>>(),
                           prompt["greedy"].get<std::vector<std::uint32_t>>()});
    return prompts;
}

}  // namespace k3::test
