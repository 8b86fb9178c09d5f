// How large the envelope of each kind of message may be, judged before any of its fields is read.
//
// What a field may hold is checked where it is read; this keeps a Ping from being a vehicle for
// megabytes. The numbers follow from the limits of the fields, with room for fields to come.

#include "common/transport/messages/codec.h"

namespace k3::msg::codec {

namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = kKiB * 1024;

// Numbers, names, an error: nothing that grows with a model or a prompt.
constexpr std::size_t kPlain = 32 * kKiB;
constexpr std::size_t kProbes = 64 * kKiB;      // 64 names
constexpr std::size_t kCounterList = 2 * kMiB;  // 4,096 names and numbers
constexpr std::size_t kText = kMaxTextBytes + kKiB;
constexpr std::size_t kIds = kMaxIds * sizeof(std::uint32_t) + kKiB;
constexpr std::size_t kRows = 4 * kMiB;           // 65,536 rows of 24 bytes
constexpr std::size_t kHints = 1 * kMiB;          // 65,536 experts and ranks
constexpr std::size_t kPrompt = kIds + 2 * kMiB;  // with stop strings and stop ids
constexpr std::size_t kLargest = kMaxEnvelopeBytes;

static_assert(kMaxErrorBytes * 3 < kPlain && kMaxProbes * (kMaxNameBytes + 64) < kProbes);
static_assert(kMaxCounters * (kMaxNameBytes + 32) < kCounterList);
static_assert(kMaxStepRows * 24 + kKiB < kRows && kMaxPrefetch * 8 + kKiB < kHints);
static_assert(kMaxStopStrings * kMaxStopStringBytes + kMaxStopIds * 4 < 2 * kMiB);
static_assert(kPrompt <= kLargest);

// A member that this build does not know may be as large as any: the reader says what it is.

std::size_t bytes_of(wire::ControlMessage::Reader message) {
    switch (message.which()) {
        case wire::ControlMessage::HELLO:
            return kProbes;
        case wire::ControlMessage::ANNOUNCEMENT:
            return kLargest;  // the holdings of an expert server
        case wire::ControlMessage::STATISTICS:
            return kCounterList;
        case wire::ControlMessage::PING:
        case wire::ControlMessage::PONG:
        case wire::ControlMessage::GET_STATISTICS:
        case wire::ControlMessage::SHUTDOWN:
        case wire::ControlMessage::DONE:
            return kPlain;
    }
    return kLargest;
}

std::size_t bytes_of(wire::TokenizerMessage::Reader message) {
    switch (message.which()) {
        case wire::TokenizerMessage::ENCODE:
        case wire::TokenizerMessage::RENDER_CHAT:
            return kText;
        case wire::TokenizerMessage::ENCODED:
        case wire::TokenizerMessage::RENDERED_CHAT:
        case wire::TokenizerMessage::DECODE:
            return kIds;
        case wire::TokenizerMessage::DECODED:
            return kLargest;  // the text of all those ids
    }
    return kLargest;
}

std::size_t bytes_of(wire::TrunkMessage::Reader message) {
    switch (message.which()) {
        case wire::TrunkMessage::OPEN_SESSION:
        case wire::TrunkMessage::FORK_SESSION:
        case wire::TrunkMessage::DROP_SESSION:
        case wire::TrunkMessage::SAVED_SESSION:
        case wire::TrunkMessage::LOADED_SESSION:
        case wire::TrunkMessage::STEP_RESULT:
            return kPlain;
        case wire::TrunkMessage::STEP:
            return kRows;
        case wire::TrunkMessage::SAVE_SESSION:
        case wire::TrunkMessage::LOAD_SESSION:
            return kIds;
    }
    return kLargest;
}

std::size_t bytes_of(wire::ExpertsMessage::Reader message) {
    switch (message.which()) {
        case wire::ExpertsMessage::CALL:
            return kLargest;  // the picks of all its rows
        case wire::ExpertsMessage::PARTIAL_SUMS:
            return kPlain;
        case wire::ExpertsMessage::PREFETCH:
            return kHints;
    }
    return kLargest;
}

std::size_t bytes_of(wire::GatewayMessage::Reader message) {
    switch (message.which()) {
        case wire::GatewayMessage::SUBMIT:
        case wire::GatewayMessage::ACCEPTED:
            return kPrompt;
        case wire::GatewayMessage::TOKENS:
            return kLargest;  // log probabilities of many rows
        case wire::GatewayMessage::PROGRESS:
        case wire::GatewayMessage::CANCEL:
        case wire::GatewayMessage::SESSION_LOADED:
        case wire::GatewayMessage::SESSION_SAVED:
            return kPlain;
        case wire::GatewayMessage::FINISHED:
            return kMaxStopStringBytes + kPlain;
    }
    return kLargest;
}

}  // namespace

std::size_t max_frame_bytes(wire::Envelope::Body::Reader body) {
    switch (body.which()) {
        case wire::Envelope::Body::ERROR:
            return kPlain;
        case wire::Envelope::Body::CONTROL:
            return bytes_of(body.getControl());
        case wire::Envelope::Body::TOKENIZER:
            return bytes_of(body.getTokenizer());
        case wire::Envelope::Body::TRUNK:
            return bytes_of(body.getTrunk());
        case wire::Envelope::Body::EXPERTS:
            return bytes_of(body.getExperts());
        case wire::Envelope::Body::SAMPLER:
            return kLargest;  // the ids that penalties look at, for every row
        case wire::Envelope::Body::GATEWAY:
            return bytes_of(body.getGateway());
    }
    return kLargest;
}

}  // namespace k3::msg::codec
