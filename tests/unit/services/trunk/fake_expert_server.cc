#include "tests/unit/services/trunk/fake_expert_server.h"

#include <poll.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "common/model/placement.h"
#include "common/transport/tensor_io.h"
#include "tests/support/local_experts.h"

namespace k3::test {

namespace {

template <typename T>
T must(Result<T> result) {
    if (result.has_value()) return std::move(result).value();
    std::fprintf(stderr, "fake expert server: %s\n", result.error().sentence().c_str());
    std::exit(99);
}

}  // namespace

FakeExpertServer::FakeExpertServer(const model::Model& model, Options options)
    : model_(model), options_(std::move(options)) {
    if (options_.use_shm)
        arena_ = must(transport::Arena::create(
            {transport::segment_name(1, options_.name + "-" + std::to_string(std::rand())),
             256 * model.config.moe.latent_size * 8, 4}));
    transport::Server::Options server;
    server.endpoint = options_.endpoint;
    server.announcement.kind = msg::ServiceKind::experts;
    server.announcement.name = options_.name;
    if (options_.lane_bytes > 0) {
        transport::LaneHost::Options lanes;
        lanes.sizes = {2, options_.lane_bytes, options_.lane_bytes};
        server.lanes = must(transport::LaneHost::create(lanes));
    }
    server_ = must(transport::Server::create(std::move(server)));
    if (!options_.starts_loading) set_ready();
    thread_ = std::thread([this] { serve(); });
}

FakeExpertServer::~FakeExpertServer() {
    stop_ = true;
    server_->request_stop();
    thread_.join();
}

void FakeExpertServer::set_ready() {
    msg::Announcement announcement;
    announcement.fingerprint =
        options_.fingerprint.empty() ? model_.fingerprint : options_.fingerprint;
    msg::ExpertFacts facts;
    facts.n_experts = model_.config.moe.n_experts;
    facts.latent_size = model_.config.moe.latent_size;
    facts.max_call_rows = options_.max_call_rows;
    facts.weight = options_.weight;
    facts.holdings = must(model::parse_share(options_.share, model_.config)).holdings();
    announcement.facts = std::move(facts);
    announcement.build = options_.build;
    if (arena_) announcement.arena = arena_->probe();
    server_->set_ready(std::move(announcement));
}

void FakeExpertServer::serve() {
    while (!stop_ && !server_->stopping()) {
        auto request = server_->next(Deadline::after_ms(200));
        if (!request.has_value()) continue;
        if (const auto* hint = std::get_if<msg::Prefetch>(&request->envelope.body)) {
            ++n_prefetches;
            if (on_hint) on_hint(*hint);
        }
        const auto* call = std::get_if<msg::ExpertCall>(&request->envelope.body);
        if (call != nullptr) {
            const msg::ExpertCall copy = *call;
            answer(std::move(*request), copy);
        }
    }
}

void FakeExpertServer::answer(transport::Request request, const msg::ExpertCall& call) {
    const Fault kind = fault ? fault(n_calls) : Fault::none;
    ++n_calls;
    if (kind == Fault::late) ::poll(nullptr, 0, kLateMs);
    while (kind == Fault::stuck && !stop_) ::poll(nullptr, 0, 10);
    if (kind == Fault::stuck) return;
    if (on_call) on_call(call);
    if (std::holds_alternative<msg::ShmPayload>(call.rows.payload)) ++n_shm_calls;
    const std::size_t latent = model_.config.moe.latent_size;
    const std::uint64_t shape[] = {0, latent};
    Result<msg::Bytes> taken =
        transport::take_tensor(call.rows, "rows", msg::DType::f32, shape, request.frames, reader_);
    // Nobody waits any more for a call that comes so late: its rows have been overwritten.
    if (!taken.has_value() && taken.error().code == ErrorCode::stale) {
        request.responder.send_error(taken.error());
        return;
    }
    const msg::Bytes rows = must(std::move(taken));
    switch (kind) {
        case Fault::drop:
            return;
        case Fault::corrupt:
            request.responder.send_error(
                {ErrorCode::corrupt, "layer 3 expert 5 in shard x: scale byte 255", "restore it"});
            return;
        case Fault::stale_error:
            request.responder.send_error({ErrorCode::stale, "the slot was reused", ""});
            return;
        case Fault::wrong_body:
            request.responder.send(msg::Done{});
            return;
        default:
            break;
    }
    std::vector<std::int64_t> sums = must(compute(call, transport::view_as<float>(rows)));
    msg::PartialSums reply;
    std::vector<msg::Bytes> frames;
    std::vector<std::uint64_t> reply_shape = {call.rows.shape[0], latent};
    if (kind == Fault::bad_shape) {
        reply_shape[0] += 1;
        sums.resize(sums.size() + latent);
    }
    reply.sums = transport::put_tensor(msg::DType::i64, reply_shape, std::as_bytes(std::span(sums)),
                                       arena_.get(), call.reply_shm, frames);
    if (auto* place = std::get_if<msg::ShmPayload>(&reply.sums.payload)) {
        ++n_shm_replies;
        if (kind == Fault::stale_slot) place->generation -= 2;
    }
    request.responder.send(std::move(reply), std::move(frames));
}

/// One row of top_k 1 for each pick, added up by row.
Result<std::vector<std::int64_t>> FakeExpertServer::compute(const msg::ExpertCall& call,
                                                            std::span<const float> rows) {
    const std::size_t latent = model_.config.moe.latent_size;
    const std::size_t n = call.picks.size();
    std::vector<float> inputs;
    std::vector<std::uint32_t> ids;
    std::vector<float> weights;
    for (const msg::Pick& pick : call.picks) {
        const auto row = rows.subspan(pick.row * latent, latent);
        inputs.insert(inputs.end(), row.begin(), row.end());
        ids.push_back(pick.expert);
        weights.push_back(pick.weight);
    }
    LocalExperts experts(model_, kernels::kernels());
    std::vector<std::int64_t> terms(n * latent);
    RETURN_IF_ERROR(experts.start({call.layer, n, 1, ids.data(), weights.data()}, inputs));
    RETURN_IF_ERROR(experts.finish(terms));
    std::vector<std::int64_t> sums(rows.size());
    for (std::size_t i = 0; i < n; ++i)
        for (std::size_t d = 0; d < latent; ++d)
            sums[call.picks[i].row * latent + d] += terms[i * latent + d];
    return sums;
}

}  // namespace k3::test
