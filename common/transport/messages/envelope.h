#pragma once
// The first frame of every message, as a plain struct, and its codec.
//
// Decoding is the one place where bytes from outside become values. It validates everything that
// can be judged without knowing the model: version, sizes, union members, text lengths, tensor
// shapes against 64-bit overflow, list lengths against the limits below. What depends on the model
// (layer, expert, row width, position) is validated by the handler.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>

#include "common/base/result.h"
#include "common/transport/messages/control.h"
#include "common/transport/messages/experts.h"
#include "common/transport/messages/gateway.h"
#include "common/transport/messages/sampler.h"
#include "common/transport/messages/tokenizer.h"
#include "common/transport/messages/trunk.h"
#include "common/transport/messages/types.h"

namespace k3::msg {

using BodyVariant =
    std::variant<Failure,
                 // control
                 Hello, Announcement, Ping, Pong, GetStatistics, Statistics, Shutdown, Done,
                 // tokenizer
                 Encode, Encoded, RenderChat, RenderedChat, Decode, Decoded,
                 // trunk
                 OpenSession, ForkSession, DropSession, SaveSession, SavedSession, LoadSession,
                 LoadedSession, Step, StepResult,
                 // experts
                 ExpertCall, PartialSums, Prefetch,
                 // sampler
                 Sample, Sampled,
                 // gateway
                 Submit, Accepted, SessionLoaded, PrefillProgress, TokenEvent, SessionSaved,
                 Finished, Cancel>;

/// One message of any conversation. A class of its own only so that copying, moving and destroying
/// three dozen alternatives is compiled once, in envelope.cc, and not in every file that has a
/// message; std::get_if, std::visit and std::holds_alternative work on it as on the variant.
class Body : public BodyVariant {
  public:
    Body();
    template <typename T,
              typename = std::enable_if_t<!std::is_base_of_v<BodyVariant, std::remove_cvref_t<T>>>>
    Body(T&& message)  // NOLINT(google-explicit-constructor): a message is a body
        : BodyVariant(std::in_place_type<std::remove_cvref_t<T>>, std::forward<T>(message)) {}
    Body(const Body&);
    Body(Body&&) noexcept;
    Body& operator=(const Body&);
    Body& operator=(Body&&) noexcept;
    ~Body();
};

struct Envelope {
    std::uint64_t run_id = 0;
    std::uint64_t call_id = 0;
    Body body;
    bool operator==(const Envelope&) const = default;
};

/// "Step", "ExpertCall", ...: for error sentences and debug logs.
std::string_view name_of(const Body& body) noexcept;

/// The envelope frame, ready to send.
Bytes encode(const Envelope& envelope);

/// Bounds of every message, many kinds have smaller ones (bounds.cc); more is `invalid_argument`
/// with the field, number and limit named.
inline constexpr std::size_t kMaxEnvelopeBytes = std::size_t{64} << 20U;
inline constexpr std::size_t kMaxTextBytes = std::size_t{8} << 20U;
inline constexpr std::size_t kMaxTensorFrames = 4;  // no message has more than one tensor by now
inline constexpr std::size_t kMaxStepRows = 65536;

/// Errors: invalid_argument (not a message, a value out of bounds), incompatible (another protocol
/// version, naming both), unsupported (a union member or enumerant this build does not know).
/// `call_id_hint` receives the call id whenever the envelope was readable that far (else 0), so
/// that even a refused message can be answered. Never throws, never reads outside `frame`.
Result<Envelope> decode(std::span<const std::byte> frame, std::uint64_t& call_id_hint);

}  // namespace k3::msg
