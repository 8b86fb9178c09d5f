// Codec of proto/experts.capnp.

#include "common/transport/messages/experts.h"

#include "common/transport/messages/codec.h"

namespace k3::msg::codec {

void write(BodyBuilder body, const ExpertCall& message) {
    auto out = body.initExperts().initCall();
    out.setLayer(message.layer);
    write_tensor(out.initRows(), message.rows);
    auto picks = out.initPicks(static_cast<unsigned>(message.picks.size()));
    for (unsigned i = 0; i < picks.size(); ++i) {
        auto pick = picks[i];
        pick.setRow(message.picks[i].row);
        pick.setExpert(message.picks[i].expert);
        pick.setWeight(message.picks[i].weight);
        pick.setRank(message.picks[i].rank);
    }
    out.setReplyShm(message.reply_shm);
    out.setHint(message.hint);
}

void write(BodyBuilder body, const PartialSums& message) {
    auto out = body.initExperts().initPartialSums();
    write_tensor(out.initSums(), message.sums);
    out.setComputeNs(message.compute_ns);
    out.setReadNs(message.read_ns);
}

void write(BodyBuilder body, const Prefetch& message) {
    auto out = body.initExperts().initPrefetch();
    out.setLayer(message.layer);
    out.setExperts(as_list(message.experts));
    out.setRanks(as_list(message.ranks));
    out.setNumber(message.number);
}

namespace {

ExpertCall read_call(wire::ExpertCall::Reader in, Checker& check) {
    ExpertCall call;
    call.layer = in.getLayer();
    call.rows = read_tensor(in.getRows(), "ExpertCall.rows", check);
    auto picks = in.getPicks();
    unsigned n = check.count(picks, "ExpertCall.picks", kMaxPicks);
    call.picks.reserve(n);
    for (unsigned i = 0; i < n; ++i) {
        auto pick = picks[i];
        call.picks.push_back({pick.getRow(), pick.getExpert(),
                              check.finite(pick.getWeight(), "ExpertCall.picks.weight"),
                              pick.getRank()});
    }
    call.reply_shm = in.getReplyShm();
    call.hint = in.getHint();
    return call;
}

Prefetch read_prefetch(wire::Prefetch::Reader in, Checker& check) {
    Prefetch out;
    out.layer = in.getLayer();
    out.experts = check.numbers(in.getExperts(), "Prefetch.experts", kMaxPrefetch);
    out.ranks = check.numbers(in.getRanks(), "Prefetch.ranks", kMaxPrefetch);
    if (out.experts.size() != out.ranks.size())
        check.refuse(ErrorCode::invalid_argument,
                     "Prefetch has " + std::to_string(out.experts.size()) + " experts and " +
                         std::to_string(out.ranks.size()) + " ranks",
                     "send one rank with each expert");
    out.number = in.getNumber();
    return out;
}

}  // namespace

Body read(wire::ExpertsMessage::Reader message, Checker& check) {
    switch (message.which()) {
        case wire::ExpertsMessage::CALL:
            return read_call(message.getCall(), check);
        case wire::ExpertsMessage::PARTIAL_SUMS: {
            auto in = message.getPartialSums();
            return PartialSums{read_tensor(in.getSums(), "PartialSums.sums", check),
                               in.getComputeNs(), in.getReadNs()};
        }
        case wire::ExpertsMessage::PREFETCH:
            return read_prefetch(message.getPrefetch(), check);
    }
    check.unknown("experts message", message.which());
    return {};
}

}  // namespace k3::msg::codec
