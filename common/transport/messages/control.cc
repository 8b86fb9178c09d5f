// Codec of proto/control.capnp.

#include "common/transport/messages/control.h"

#include <algorithm>

#include "common/transport/messages/codec.h"

namespace k3::msg {

std::string_view to_string(ServiceKind kind) noexcept {
    switch (kind) {
        case ServiceKind::unknown:
            return "unknown";
        case ServiceKind::gateway:
            return "gateway";
        case ServiceKind::tokenizer:
            return "tokenizer";
        case ServiceKind::trunk:
            return "trunk";
        case ServiceKind::experts:
            return "experts";
        case ServiceKind::sampler:
            return "sampler";
    }
    return "unknown";
}

std::string_view to_string(State state) noexcept {
    switch (state) {
        case State::loading:
            return "loading";
        case State::ready:
            return "ready";
        case State::stopping:
            return "stopping";
        case State::failed:
            return "failed";
    }
    return "unknown";
}

namespace codec {

namespace {

using FactsBuilder = wire::Announcement::Facts::Builder;

void write_facts(FactsBuilder out, const std::monostate&) { out.setNone(); }

void write_facts(FactsBuilder out, const GatewayFacts& facts) {
    auto to = out.initGateway();
    to.setModelName(as_text(facts.model_name));
    to.setMaxPositions(facts.max_positions);
    to.setVocabSize(facts.vocab_size);
    to.setMaxRequests(facts.max_requests);
    to.setMlaBf16(facts.mla_bf16);
}

void write_facts(FactsBuilder out, const TokenizerFacts& facts) {
    auto to = out.initTokenizer();
    to.setVocabSize(facts.vocab_size);
    to.setNRanks(facts.n_ranks);
    to.setStopIds(as_list(facts.stop_ids));
}

void write_facts(FactsBuilder out, const TrunkFacts& facts) {
    auto to = out.initTrunk();
    auto layers = to.initLayers();
    layers.setFirst(facts.first_layer);
    layers.setCount(facts.n_layers);
    to.setTotalLayers(facts.total_layers);
    to.setHiddenSize(facts.hidden_size);
    to.setVocabSize(facts.vocab_size);
    to.setMaxPositions(facts.max_positions);
    to.setMaxStepRows(facts.max_step_rows);
    to.setMaxSessions(facts.max_sessions);
    to.setInVectors(facts.in_vectors);
    to.setOutVectors(facts.out_vectors);
    to.setMlaBf16(facts.mla_bf16);
}

void write_facts(FactsBuilder out, const ExpertFacts& facts) {
    auto to = out.initExperts();
    to.setNExperts(facts.n_experts);
    to.setLatentSize(facts.latent_size);
    to.setMaxCallRows(facts.max_call_rows);
    to.setWeight(facts.weight);
    auto holdings = to.initHoldings(static_cast<unsigned>(facts.holdings.size()));
    for (unsigned i = 0; i < holdings.size(); ++i) {
        const ExpertHolding& holding = facts.holdings[i];
        holdings[i].setLayer(holding.layer);
        holdings[i].setExperts(
            kj::ArrayPtr<const std::uint8_t>(holding.experts.data(), holding.experts.size()));
    }
}

void write_facts(FactsBuilder out, const SamplerFacts& facts) {
    out.initSampler().setMaxRows(facts.max_rows);
}

GatewayFacts read_facts(wire::GatewayFacts::Reader in, Checker& check) {
    GatewayFacts facts;
    facts.model_name = check.text(in.getModelName(), "GatewayFacts.modelName", kMaxNameBytes);
    facts.max_positions = in.getMaxPositions();
    facts.vocab_size = in.getVocabSize();
    facts.max_requests = in.getMaxRequests();
    facts.mla_bf16 = in.getMlaBf16();
    return facts;
}

TokenizerFacts read_facts(wire::TokenizerFacts::Reader in, Checker& check) {
    TokenizerFacts facts;
    facts.vocab_size = in.getVocabSize();
    facts.n_ranks = in.getNRanks();
    facts.stop_ids = check.numbers(in.getStopIds(), "TokenizerFacts.stopIds", kMaxStopIds);
    return facts;
}

TrunkFacts read_facts(wire::TrunkFacts::Reader in) {
    TrunkFacts facts;
    auto layers = in.getLayers();
    facts.first_layer = layers.getFirst();
    facts.n_layers = layers.getCount();
    facts.total_layers = in.getTotalLayers();
    facts.hidden_size = in.getHiddenSize();
    facts.vocab_size = in.getVocabSize();
    facts.max_positions = in.getMaxPositions();
    facts.max_step_rows = in.getMaxStepRows();
    facts.max_sessions = in.getMaxSessions();
    facts.in_vectors = in.getInVectors();
    facts.out_vectors = in.getOutVectors();
    facts.mla_bf16 = in.getMlaBf16();
    return facts;
}

ExpertFacts read_facts(wire::ExpertFacts::Reader in, Checker& check) {
    ExpertFacts facts;
    facts.n_experts = in.getNExperts();
    facts.latent_size = in.getLatentSize();
    facts.max_call_rows = in.getMaxCallRows();
    facts.weight = std::clamp<std::uint32_t>(in.getWeight(), 1, kMaxExpertWeight);
    auto holdings = in.getHoldings();
    unsigned n = check.count(holdings, "ExpertFacts.holdings", kMaxHoldings);
    for (unsigned i = 0; i < n; ++i) {
        std::string bits =
            check.data(holdings[i].getExperts(), "ExpertHolding.experts", kMaxHoldingBytes);
        facts.holdings.push_back({holdings[i].getLayer(), {bits.begin(), bits.end()}});
    }
    return facts;
}

LaneOffer read_lane(wire::LaneOffer::Reader in, Checker& check) {
    return {in.getPid(),
            in.getFd(),
            in.getNonce(),
            in.getIndex(),
            in.getToken(),
            in.getComputeThreads(),
            check.text(in.getCores(), "LaneOffer.cores", kMaxNameBytes)};
}

Announcement read_announcement(wire::Announcement::Reader in, Checker& check) {
    Announcement out;
    out.kind = check.enumerant(in.getKind(), ServiceKind::sampler, "service kind");
    out.name = check.text(in.getName(), "Announcement.name", kMaxNameBytes);
    out.version = check.text(in.getVersion(), "Announcement.version", kMaxNameBytes);
    out.instance = in.getInstance();
    out.state = check.enumerant(in.getState(), State::failed, "service state");
    out.fingerprint = check.text(in.getFingerprint(), "Announcement.fingerprint", kMaxNameBytes);
    out.arena = read_probe(in.getArena(), check);
    auto probes = in.getProbes();
    unsigned n = check.count(probes, "Announcement.probes", kMaxProbes);
    for (unsigned i = 0; i < n; ++i) out.probes.push_back(probes[i]);
    out.lane = read_lane(in.getLane(), check);
    out.build = check.text(in.getBuild(), "Announcement.build", kMaxNameBytes);
    auto facts = in.getFacts();
    switch (facts.which()) {
        case wire::Announcement::Facts::NONE:
            return out;
        case wire::Announcement::Facts::GATEWAY:
            out.facts = read_facts(facts.getGateway(), check);
            return out;
        case wire::Announcement::Facts::TOKENIZER:
            out.facts = read_facts(facts.getTokenizer(), check);
            return out;
        case wire::Announcement::Facts::TRUNK:
            out.facts = read_facts(facts.getTrunk());
            return out;
        case wire::Announcement::Facts::EXPERTS:
            out.facts = read_facts(facts.getExperts(), check);
            return out;
        case wire::Announcement::Facts::SAMPLER:
            out.facts = SamplerFacts{facts.getSampler().getMaxRows()};
            return out;
    }
    check.unknown("kind of facts", facts.which());
    return out;
}

Statistics read_statistics(wire::Statistics::Reader in, Checker& check) {
    Statistics out;
    out.uptime_ms = in.getUptimeMs();
    out.resident_bytes = in.getResidentBytes();
    out.queued = in.getQueued();
    auto counters = in.getCounters();
    unsigned n = check.count(counters, "Statistics.counters", kMaxCounters);
    for (unsigned i = 0; i < n; ++i)
        out.counters.push_back({check.text(counters[i].getName(), "Counter.name", kMaxNameBytes),
                                counters[i].getValue()});
    return out;
}

}  // namespace

void write(BodyBuilder body, const Hello& message) {
    auto out = body.initControl().initHello();
    out.setLaneKey(message.lane_key);
    auto probes = out.initProbes(static_cast<unsigned>(message.probes.size()));
    for (unsigned i = 0; i < probes.size(); ++i) write_probe(probes[i], message.probes[i]);
}

void write(BodyBuilder body, const Announcement& message) {
    auto out = body.initControl().initAnnouncement();
    out.setKind(static_cast<wire::ServiceKind>(message.kind));
    out.setName(as_text(message.name));
    out.setVersion(as_text(message.version));
    out.setInstance(message.instance);
    out.setState(static_cast<wire::State>(message.state));
    out.setFingerprint(as_text(message.fingerprint));
    write_probe(out.initArena(), message.arena);
    auto probes = out.initProbes(static_cast<unsigned>(message.probes.size()));
    for (unsigned i = 0; i < probes.size(); ++i) probes.set(i, message.probes[i]);
    std::visit([&](const auto& facts) { write_facts(out.initFacts(), facts); }, message.facts);
    out.setBuild(as_text(message.build));
    if (message.lane.pid == 0) return;
    auto lane = out.initLane();
    lane.setPid(message.lane.pid);
    lane.setFd(message.lane.fd);
    lane.setNonce(message.lane.nonce);
    lane.setIndex(message.lane.index);
    lane.setToken(message.lane.token);
    lane.setComputeThreads(message.lane.compute_threads);
    // A longer list is of odd cores of a very large box: unknown, the caller then does not spin.
    if (message.lane.cores.size() <= kMaxNameBytes) lane.setCores(as_text(message.lane.cores));
}

void write(BodyBuilder body, const Ping&) { body.initControl().setPing(); }

void write(BodyBuilder body, const Pong& message) {
    auto out = body.initControl().initPong();
    out.setInstance(message.instance);
    out.setState(static_cast<wire::State>(message.state));
    out.setProgressPermille(message.progress_permille);
    out.setDetail(as_text(message.detail));
    out.setWork(message.work);
    out.setWaitsForReads(message.waits_for_reads);
    out.setWaitingFor(as_text(message.waiting_for));
}

void write(BodyBuilder body, const GetStatistics&) { body.initControl().setGetStatistics(); }

void write(BodyBuilder body, const Statistics& message) {
    auto out = body.initControl().initStatistics();
    out.setUptimeMs(message.uptime_ms);
    out.setResidentBytes(message.resident_bytes);
    out.setQueued(message.queued);
    auto counters = out.initCounters(static_cast<unsigned>(message.counters.size()));
    for (unsigned i = 0; i < counters.size(); ++i) {
        counters[i].setName(as_text(message.counters[i].name));
        counters[i].setValue(message.counters[i].value);
    }
}

void write(BodyBuilder body, const Shutdown&) { body.initControl().setShutdown(); }
void write(BodyBuilder body, const Done&) { body.initControl().setDone(); }

Body read(wire::ControlMessage::Reader in, Checker& check) {
    switch (in.which()) {
        case wire::ControlMessage::HELLO: {
            Hello hello;
            auto probes = in.getHello().getProbes();
            unsigned n = check.count(probes, "Hello.probes", kMaxProbes);
            for (unsigned i = 0; i < n; ++i) hello.probes.push_back(read_probe(probes[i], check));
            hello.lane_key = in.getHello().getLaneKey();
            return hello;
        }
        case wire::ControlMessage::ANNOUNCEMENT:
            return read_announcement(in.getAnnouncement(), check);
        case wire::ControlMessage::PING:
            return Ping{};
        case wire::ControlMessage::PONG: {
            auto pong = in.getPong();
            return Pong{pong.getInstance(),
                        check.enumerant(pong.getState(), State::failed, "service state"),
                        pong.getProgressPermille(),
                        check.text(pong.getDetail(), "Pong.detail", kMaxErrorBytes),
                        pong.getWork(),
                        pong.getWaitsForReads(),
                        check.text(pong.getWaitingFor(), "Pong.waitingFor", kMaxErrorBytes)};
        }
        case wire::ControlMessage::GET_STATISTICS:
            return GetStatistics{};
        case wire::ControlMessage::STATISTICS:
            return read_statistics(in.getStatistics(), check);
        case wire::ControlMessage::SHUTDOWN:
            return Shutdown{};
        case wire::ControlMessage::DONE:
            return Done{};
    }
    check.unknown("control message", in.which());
    return {};
}

}  // namespace codec
}  // namespace k3::msg
