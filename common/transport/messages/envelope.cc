// The envelope: framing, version, and the choice of the conversation's codec.

#include "common/transport/messages/envelope.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>
#include <kj/io.h>

#include <array>
#include <cstring>

#include "common/transport/messages/codec.h"

namespace k3::msg {

namespace {

constexpr std::size_t kWordBytes = sizeof(capnp::word);
constexpr std::size_t kMinFrameBytes = 16;  // an empty frame would read as an all-default message

constexpr std::array<std::string_view, std::variant_size_v<BodyVariant>> kNames = {
    "Failure",       "Hello",         "Announcement",
    "Ping",          "Pong",          "GetStatistics",
    "Statistics",    "Shutdown",      "Done",
    "Encode",        "Encoded",       "RenderChat",
    "RenderedChat",  "Decode",        "Decoded",
    "OpenSession",   "ForkSession",   "DropSession",
    "SaveSession",   "SavedSession",  "LoadSession",
    "LoadedSession", "Step",          "StepResult",
    "ExpertCall",    "PartialSums",   "Prefetch",
    "Sample",        "Sampled",       "Submit",
    "Accepted",      "SessionLoaded", "PrefillProgress",
    "TokenEvent",    "SessionSaved",  "Finished",
    "Cancel"};

Error malformed(std::string detail) {
    return {ErrorCode::invalid_argument, "not a message of this protocol: " + std::move(detail),
            "check that the peer speaks k3pipe's protocol (proto/README.md)"};
}

Bytes serialised(capnp::MessageBuilder& builder) {
    Bytes out(capnp::computeSerializedSizeInWords(builder) * sizeof(capnp::word));
    kj::ArrayOutputStream stream(
        kj::ArrayPtr<kj::byte>(reinterpret_cast<kj::byte*>(out.data()), out.size()));
    capnp::writeMessage(stream, builder);
    return out;
}

Error too_large(std::string message, std::size_t bytes, std::size_t limit, ErrorCode code) {
    return {code,
            std::move(message) + " of " + std::to_string(bytes) + " bytes is over the limit of " +
                std::to_string(limit),
            "send less at a time"};
}

/// Errors: resource_exhausted (larger than its kind may be), or if Cap'n Proto refuses to build it
/// (a list of over half a billion elements).
Result<Bytes> try_encode(const Envelope& envelope) {
    try {
        capnp::MallocMessageBuilder builder;
        auto root = builder.initRoot<wire::Envelope>();
        root.setVersion(kProtocolVersion);
        root.setRunId(envelope.run_id);
        root.setCallId(envelope.call_id);
        std::visit([&](const auto& body) { codec::write(root.getBody(), body); }, envelope.body);
        const std::size_t limit = codec::max_frame_bytes(root.getBody().asReader());
        const std::size_t bytes = capnp::computeSerializedSizeInWords(builder) * kWordBytes;
        if (bytes > limit)
            return too_large("a " + std::string(name_of(envelope.body)), bytes, limit,
                             ErrorCode::resource_exhausted);
        return serialised(builder);
    } catch (const kj::Exception& problem) {
        return Error{ErrorCode::resource_exhausted,
                     "a " + std::string(name_of(envelope.body)) +
                         " cannot be encoded: " + problem.getDescription().cStr(),
                     "send less at a time"};
    }
}

Body read_body(wire::Envelope::Body::Reader body, codec::Checker& check) {
    switch (body.which()) {
        case wire::Envelope::Body::ERROR:
            return codec::read(body.getError(), check);
        case wire::Envelope::Body::CONTROL:
            return codec::read(body.getControl(), check);
        case wire::Envelope::Body::TOKENIZER:
            return codec::read(body.getTokenizer(), check);
        case wire::Envelope::Body::TRUNK:
            return codec::read(body.getTrunk(), check);
        case wire::Envelope::Body::EXPERTS:
            return codec::read(body.getExperts(), check);
        case wire::Envelope::Body::SAMPLER:
            return codec::read(body.getSampler(), check);
        case wire::Envelope::Body::GATEWAY:
            return codec::read(body.getGateway(), check);
    }
    check.unknown("conversation", body.which());
    return {};
}

Status check_version(std::uint16_t version) {
    if (version == kProtocolVersion) return {};
    if (version == 0) return malformed("it is empty or names no protocol version");
    return Error{ErrorCode::incompatible,
                 "the peer speaks protocol version " + std::to_string(version) +
                     ", this program speaks version " + std::to_string(kProtocolVersion),
                 "use programs of the same release on both sides"};
}

/// `words` holds the frame at an address that Cap'n Proto can read; throws kj::Exception.
Result<Envelope> decode_words(kj::ArrayPtr<const capnp::word> words, std::uint64_t& call_id_hint) {
    capnp::ReaderOptions options;
    // Every pointer access is charged; 8 visits of each word are enough for any honest message.
    options.traversalLimitInWords = words.size() * 8 + 1024;
    options.nestingLimit = 16;
    capnp::FlatArrayMessageReader reader(words, options);
    auto root = reader.getRoot<wire::Envelope>();  // once: each call is charged again
    call_id_hint = root.getCallId();
    RETURN_IF_ERROR(check_version(root.getVersion()));
    const std::size_t limit = codec::max_frame_bytes(root.getBody());
    if (words.size() * kWordBytes > limit)
        return too_large("a message of this kind", words.size() * kWordBytes, limit,
                         ErrorCode::invalid_argument);
    if (reader.getEnd() != words.end())
        return malformed(std::to_string((words.end() - reader.getEnd()) * sizeof(capnp::word)) +
                         " bytes follow its end");
    codec::Checker check;
    Envelope envelope;
    envelope.run_id = root.getRunId();
    envelope.call_id = root.getCallId();
    envelope.body = read_body(root.getBody(), check);
    if (check.error()) return *check.error();
    return envelope;
}

}  // namespace

Body::Body() = default;
Body::Body(const Body&) = default;
Body::Body(Body&&) noexcept = default;
Body& Body::operator=(const Body&) = default;
Body& Body::operator=(Body&&) noexcept = default;
Body::~Body() = default;

std::string_view name_of(const Body& body) noexcept { return kNames[body.index()]; }

Bytes encode(const Envelope& envelope) {
    Result<Bytes> bytes = try_encode(envelope);
    if (bytes.has_value()) return std::move(bytes).value();
    // The receiver would refuse it without knowing why, so it is told the reason instead.
    Envelope refusal{envelope.run_id, envelope.call_id, Failure{std::move(bytes).error(), ""}};
    return try_encode(refusal).value();
}

Result<Envelope> decode(std::span<const std::byte> frame, std::uint64_t& call_id_hint) {
    call_id_hint = 0;
    if (frame.size() < kMinFrameBytes || frame.size() % sizeof(capnp::word) != 0)
        return malformed("its frame has " + std::to_string(frame.size()) +
                         " bytes, not a multiple of 8 from 16 up");
    if (frame.size() > kMaxEnvelopeBytes)
        return malformed("its frame has " + std::to_string(frame.size()) + " bytes, the limit is " +
                         std::to_string(kMaxEnvelopeBytes));
    const std::size_t n_words = frame.size() / sizeof(capnp::word);
    std::vector<std::uint64_t> copy;
    const void* start = frame.data();
    if (reinterpret_cast<std::uintptr_t>(start) % alignof(std::uint64_t) != 0) {
        // ZeroMQ hands out small frames at odd addresses, which Cap'n Proto refuses.
        copy.resize(n_words);
        std::memcpy(copy.data(), frame.data(), frame.size());
        start = copy.data();
    }
    try {
        return decode_words({static_cast<const capnp::word*>(start), n_words}, call_id_hint);
    } catch (const kj::Exception& problem) {
        return malformed(problem.getDescription().cStr());
    } catch (const std::exception& problem) {
        return malformed(problem.what());
    }
}

}  // namespace k3::msg
