// Codec of proto/tokenizer.capnp.

#include "common/transport/messages/tokenizer.h"

#include "common/transport/messages/codec.h"

namespace k3::msg::codec {

void write(BodyBuilder body, const Encode& message) {
    auto out = body.initTokenizer().initEncode();
    out.setText(as_data(message.text));
    out.setRecogniseSpecials(message.recognise_specials);
    out.setKeepInvalidBytes(message.keep_invalid_bytes);
}

void write(BodyBuilder body, const Encoded& message) {
    body.initTokenizer().initEncoded().setIds(as_list(message.ids));
}

void write(BodyBuilder body, const RenderChat& message) {
    body.initTokenizer().initRenderChat().setJson(as_data(message.json));
}

void write(BodyBuilder body, const RenderedChat& message) {
    auto out = body.initTokenizer().initRenderedChat();
    out.setIds(as_list(message.ids));
    out.setChannel(as_text(message.channel));
}

void write(BodyBuilder body, const Decode& message) {
    auto out = body.initTokenizer().initDecode();
    out.setIds(as_list(message.ids));
    out.setPending(as_data(message.pending));
    out.setFinal(message.final);
    out.setSkipSpecials(message.skip_specials);
}

void write(BodyBuilder body, const Decoded& message) {
    auto out = body.initTokenizer().initDecoded();
    out.setText(as_data(message.text));
    out.setPending(as_data(message.pending));
}

Body read(wire::TokenizerMessage::Reader message, Checker& check) {
    switch (message.which()) {
        case wire::TokenizerMessage::ENCODE: {
            auto in = message.getEncode();
            return Encode{check.data(in.getText(), "Encode.text", kMaxTextBytes),
                          in.getRecogniseSpecials(), in.getKeepInvalidBytes()};
        }
        case wire::TokenizerMessage::ENCODED:
            return Encoded{check.numbers(message.getEncoded().getIds(), "Encoded.ids", kMaxIds)};
        case wire::TokenizerMessage::RENDER_CHAT:
            return RenderChat{
                check.data(message.getRenderChat().getJson(), "RenderChat.json", kMaxTextBytes)};
        case wire::TokenizerMessage::RENDERED_CHAT: {
            auto in = message.getRenderedChat();
            return RenderedChat{check.numbers(in.getIds(), "RenderedChat.ids", kMaxIds),
                                check.text(in.getChannel(), "RenderedChat.channel", kMaxNameBytes)};
        }
        case wire::TokenizerMessage::DECODE: {
            auto in = message.getDecode();
            return Decode{check.numbers(in.getIds(), "Decode.ids", kMaxIds),
                          check.data(in.getPending(), "Decode.pending", kMaxPendingBytes),
                          in.getFinal(), in.getSkipSpecials()};
        }
        case wire::TokenizerMessage::DECODED: {
            // Special tokens are longer than their ids, so the text has a larger limit of its own.
            auto in = message.getDecoded();
            return Decoded{check.data(in.getText(), "Decoded.text", kMaxEnvelopeBytes),
                           check.data(in.getPending(), "Decoded.pending", kMaxPendingBytes)};
        }
    }
    check.unknown("tokenizer message", message.which());
    return {};
}

}  // namespace k3::msg::codec
