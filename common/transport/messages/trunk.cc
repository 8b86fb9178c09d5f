// Codec of proto/trunk.capnp.

#include "common/transport/messages/trunk.h"

#include "common/transport/messages/codec.h"

namespace k3::msg::codec {

void write(BodyBuilder body, const OpenSession& message) {
    auto out = body.initTrunk().initOpenSession();
    out.setSession(message.session);
    out.setMaxPositions(message.max_positions);
    if (!message.save_as.empty()) out.setSaveAs(as_text(message.save_as));
}

void write(BodyBuilder body, const ForkSession& message) {
    auto out = body.initTrunk().initForkSession();
    out.setSource(message.source);
    out.setTarget(message.target);
    out.setMaxPositions(message.max_positions);
}

void write(BodyBuilder body, const DropSession& message) {
    body.initTrunk().initDropSession().setSession(message.session);
}

void write(BodyBuilder body, const SaveSession& message) {
    auto out = body.initTrunk().initSaveSession();
    out.setSession(message.session);
    out.setName(as_text(message.name));
    out.setIds(as_list(message.ids));
}

void write(BodyBuilder body, const SavedSession& message) {
    body.initTrunk().initSavedSession().setBytes(message.bytes);
}

void write(BodyBuilder body, const LoadSession& message) {
    auto out = body.initTrunk().initLoadSession();
    out.setSession(message.session);
    out.setMaxPositions(message.max_positions);
    out.setName(as_text(message.name));
    out.setIds(as_list(message.ids));
    if (!message.save_as.empty()) out.setSaveAs(as_text(message.save_as));
}

void write(BodyBuilder body, const LoadedSession& message) {
    auto out = body.initTrunk().initLoadedSession();
    out.setNIds(message.n_ids);
    out.setNAgreed(message.n_agreed);
    out.setPosition(message.position);
}

void write(BodyBuilder body, const Step& message) {
    auto out = body.initTrunk().initStep();
    auto rows = out.initRows(static_cast<unsigned>(message.rows.size()));
    for (unsigned i = 0; i < rows.size(); ++i) {
        rows[i].setSession(message.rows[i].session);
        rows[i].setPosition(message.rows[i].position);
        rows[i].setToken(message.rows[i].token);
    }
    write_tensor(out.initHidden(), message.hidden);
    out.setWant(as_list(message.want));
    out.setReplyShm(message.reply_shm);
}

void write(BodyBuilder body, const StepResult& message) {
    auto out = body.initTrunk().initStepResult();
    write_tensor(out.initOutput(), message.output);
    out.setComputeNs(message.compute_ns);
    out.setExpertWaitNs(message.expert_wait_ns);
}

namespace {

Step read_step(wire::Step::Reader in, Checker& check) {
    Step step;
    auto rows = in.getRows();
    unsigned n = check.count(rows, "Step.rows", kMaxStepRows);
    step.rows.reserve(n);
    for (unsigned i = 0; i < n; ++i) {
        auto row = rows[i];
        step.rows.push_back({row.getSession(), row.getPosition(), row.getToken()});
    }
    step.hidden = read_tensor(in.getHidden(), "Step.hidden", check);
    step.want = check.numbers(in.getWant(), "Step.want", kMaxStepRows);
    step.reply_shm = in.getReplyShm();
    return step;
}

}  // namespace

Body read(wire::TrunkMessage::Reader message, Checker& check) {
    switch (message.which()) {
        case wire::TrunkMessage::OPEN_SESSION: {
            auto in = message.getOpenSession();
            return OpenSession{in.getSession(), in.getMaxPositions(),
                               check.text(in.getSaveAs(), "OpenSession.saveAs", kMaxNameBytes)};
        }
        case wire::TrunkMessage::FORK_SESSION: {
            auto in = message.getForkSession();
            return ForkSession{in.getSource(), in.getTarget(), in.getMaxPositions()};
        }
        case wire::TrunkMessage::DROP_SESSION:
            return DropSession{message.getDropSession().getSession()};
        case wire::TrunkMessage::STEP:
            return read_step(message.getStep(), check);
        case wire::TrunkMessage::STEP_RESULT: {
            auto in = message.getStepResult();
            return StepResult{read_tensor(in.getOutput(), "StepResult.output", check),
                              in.getComputeNs(), in.getExpertWaitNs()};
        }
        case wire::TrunkMessage::SAVE_SESSION: {
            auto in = message.getSaveSession();
            return SaveSession{in.getSession(),
                               check.text(in.getName(), "SaveSession.name", kMaxNameBytes),
                               check.numbers(in.getIds(), "SaveSession.ids", kMaxIds)};
        }
        case wire::TrunkMessage::SAVED_SESSION:
            return SavedSession{message.getSavedSession().getBytes()};
        case wire::TrunkMessage::LOAD_SESSION: {
            auto in = message.getLoadSession();
            return LoadSession{in.getSession(), in.getMaxPositions(),
                               check.text(in.getName(), "LoadSession.name", kMaxNameBytes),
                               check.numbers(in.getIds(), "LoadSession.ids", kMaxIds),
                               check.text(in.getSaveAs(), "LoadSession.saveAs", kMaxNameBytes)};
        }
        case wire::TrunkMessage::LOADED_SESSION: {
            auto in = message.getLoadedSession();
            return LoadedSession{in.getNIds(), in.getNAgreed(), in.getPosition()};
        }
    }
    check.unknown("trunk message", message.which());
    return {};
}

}  // namespace k3::msg::codec
