// Codec of proto/gateway.capnp.

#include "common/transport/messages/gateway.h"

#include "common/transport/messages/codec.h"

namespace k3::msg {

std::string_view to_string(FinishReason reason) noexcept {
    switch (reason) {
        case FinishReason::stop_id:
            return "stop_id";
        case FinishReason::stop_string:
            return "stop_string";
        case FinishReason::max_tokens:
            return "max_tokens";
        case FinishReason::context_full:
            return "context_full";
        case FinishReason::cancelled:
            return "cancelled";
    }
    return "unknown";
}

namespace codec {

void write(BodyBuilder body, const Submit& message) {
    auto out = body.initGateway().initSubmit();
    if (const auto* text = std::get_if<TextInput>(&message.input))
        out.getInput().setText(as_data(text->text));
    else if (const auto* ids = std::get_if<IdsInput>(&message.input))
        out.getInput().setIds(as_list(ids->ids));
    else
        out.getInput().setChatJson(as_data(std::get<ChatInput>(message.input).json));
    out.setRecogniseSpecials(message.recognise_specials);
    write_params(out.initParams(), message.params);
    out.setMaxTokens(message.max_tokens);
    auto stops = out.initStopStrings(static_cast<unsigned>(message.stop_strings.size()));
    for (unsigned i = 0; i < stops.size(); ++i) stops.set(i, as_text(message.stop_strings[i]));
    out.setStopIds(as_list(message.stop_ids));
    out.setIgnoreEos(message.ignore_eos);
    out.setNLogprobs(message.n_logprobs);
    out.setWantLogits(static_cast<wire::WantLogits>(message.want_logits));
    out.setSkipSpecials(message.skip_specials);
    if (!message.load_session.empty()) out.setLoadSession(as_text(message.load_session));
    if (!message.save_session.empty()) out.setSaveSession(as_text(message.save_session));
}

void write(BodyBuilder body, const Accepted& message) {
    auto out = body.initGateway().initAccepted();
    out.setRequest(message.request);
    out.setPromptIds(as_list(message.prompt_ids));
}

void write(BodyBuilder body, const PrefillProgress& message) {
    auto out = body.initGateway().initProgress();
    out.setPromptDone(message.prompt_done);
    out.setPromptTotal(message.prompt_total);
}

void write(BodyBuilder body, const TokenEvent& message) {
    auto out = body.initGateway().initTokens();
    out.setIds(as_list(message.ids));
    out.setText(as_data(message.text));
    auto rows = out.initLogprobs(static_cast<unsigned>(message.logprobs.size()));
    for (unsigned i = 0; i < rows.size(); ++i) write_sampled_row(rows[i], message.logprobs[i]);
    write_tensor(out.initLogits(), message.logits);
}

void write(BodyBuilder body, const Finished& message) {
    auto out = body.initGateway().initFinished();
    out.setReason(static_cast<wire::FinishReason>(message.reason));
    out.setNPrompt(message.n_prompt);
    out.setNGenerated(message.n_generated);
    out.setStopId(message.stop_id);
    out.setStopString(as_text(message.stop_string));
    out.setPrefillNs(message.prefill_ns);
    out.setDecodeNs(message.decode_ns);
}

void write(BodyBuilder body, const SessionLoaded& message) {
    auto out = body.initGateway().initSessionLoaded();
    out.setNIds(message.n_ids);
    out.setNAgreed(message.n_agreed);
    out.setNReused(message.n_reused);
}

void write(BodyBuilder body, const SessionSaved& message) {
    auto out = body.initGateway().initSessionSaved();
    out.setNIds(message.n_ids);
    out.setBytes(message.bytes);
    if (message.failure.has_value()) write_failure(out.initError(), *message.failure);
}

void write(BodyBuilder body, const Cancel& message) {
    body.initGateway().initCancel().setRequest(message.request);
}

namespace {

void read_input(wire::Submit::Input::Reader in, Submit& out, Checker& check) {
    switch (in.which()) {
        case wire::Submit::Input::TEXT:
            out.input = TextInput{check.data(in.getText(), "Submit.text", kMaxTextBytes)};
            return;
        case wire::Submit::Input::IDS:
            out.input = IdsInput{check.numbers(in.getIds(), "Submit.ids", kMaxIds)};
            return;
        case wire::Submit::Input::CHAT_JSON:
            out.input = ChatInput{check.data(in.getChatJson(), "Submit.chatJson", kMaxTextBytes)};
            return;
    }
    check.unknown("kind of input", in.which());
}

Submit read_submit(wire::Submit::Reader in, Checker& check) {
    Submit out;
    read_input(in.getInput(), out, check);
    out.recognise_specials = in.getRecogniseSpecials();
    out.params = read_params(in.getParams(), check);
    out.max_tokens = in.getMaxTokens();
    auto stops = in.getStopStrings();
    unsigned n = check.count(stops, "Submit.stopStrings", kMaxStopStrings);
    for (unsigned i = 0; i < n; ++i)
        out.stop_strings.push_back(
            check.text(stops[i], "Submit.stopStrings element", kMaxStopStringBytes));
    out.stop_ids = check.numbers(in.getStopIds(), "Submit.stopIds", kMaxStopIds);
    out.ignore_eos = in.getIgnoreEos();
    out.n_logprobs = in.getNLogprobs();
    if (out.n_logprobs > kMaxLogprobs)
        check.refuse(ErrorCode::invalid_argument,
                     "Submit.nLogprobs is " + std::to_string(out.n_logprobs) + ", the limit is " +
                         std::to_string(kMaxLogprobs),
                     "ask for fewer alternatives");
    out.want_logits = check.enumerant(in.getWantLogits(), WantLogits::all, "choice of logits");
    out.skip_specials = in.getSkipSpecials();
    out.load_session = check.text(in.getLoadSession(), "Submit.loadSession", kMaxNameBytes);
    out.save_session = check.text(in.getSaveSession(), "Submit.saveSession", kMaxNameBytes);
    return out;
}

TokenEvent read_tokens(wire::TokenEvent::Reader in, Checker& check) {
    TokenEvent out;
    out.ids = check.numbers(in.getIds(), "TokenEvent.ids", kMaxIds);
    out.text = check.data(in.getText(), "TokenEvent.text", kMaxTextBytes);
    auto rows = in.getLogprobs();
    unsigned n = check.count(rows, "TokenEvent.logprobs", kMaxStepRows);
    for (unsigned i = 0; i < n; ++i) out.logprobs.push_back(read_sampled_row(rows[i], check));
    out.logits = read_tensor(in.getLogits(), "TokenEvent.logits", check);
    return out;
}

Finished read_finished(wire::Finished::Reader in, Checker& check) {
    Finished out;
    out.reason = check.enumerant(in.getReason(), FinishReason::cancelled, "finish reason");
    out.n_prompt = in.getNPrompt();
    out.n_generated = in.getNGenerated();
    out.stop_id = in.getStopId();
    out.stop_string = check.text(in.getStopString(), "Finished.stopString", kMaxStopStringBytes);
    out.prefill_ns = in.getPrefillNs();
    out.decode_ns = in.getDecodeNs();
    return out;
}

}  // namespace

Body read(wire::GatewayMessage::Reader message, Checker& check) {
    switch (message.which()) {
        case wire::GatewayMessage::SUBMIT:
            return read_submit(message.getSubmit(), check);
        case wire::GatewayMessage::ACCEPTED: {
            auto in = message.getAccepted();
            return Accepted{in.getRequest(),
                            check.numbers(in.getPromptIds(), "Accepted.promptIds", kMaxIds)};
        }
        case wire::GatewayMessage::PROGRESS: {
            auto in = message.getProgress();
            return PrefillProgress{in.getPromptDone(), in.getPromptTotal()};
        }
        case wire::GatewayMessage::TOKENS:
            return read_tokens(message.getTokens(), check);
        case wire::GatewayMessage::FINISHED:
            return read_finished(message.getFinished(), check);
        case wire::GatewayMessage::CANCEL:
            return Cancel{message.getCancel().getRequest()};
        case wire::GatewayMessage::SESSION_LOADED: {
            auto in = message.getSessionLoaded();
            return SessionLoaded{in.getNIds(), in.getNAgreed(), in.getNReused()};
        }
        case wire::GatewayMessage::SESSION_SAVED: {
            auto in = message.getSessionSaved();
            SessionSaved saved{in.getNIds(), in.getBytes(), {}};
            if (in.hasError()) saved.failure = read_failure(in.getError(), check);
            return saved;
        }
    }
    check.unknown("gateway message", message.which());
    return {};
}

}  // namespace codec
}  // namespace k3::msg
