#pragma once
// What the codec files share: writers per message, and the checked way to read fields.
//
// Only the codec files include this header: it brings in the generated readers, which nothing else
// may see. Reading never stops half way: a field that is out of bounds is replaced by an empty
// value and the first refusal is kept, so a reading function needs no error path of its own.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/transport/messages/envelope.h"
#include "envelope.capnp.h"

namespace k3::msg::codec {

/// Limits of lists and short texts; proto/README.md lists them for other implementations.
inline constexpr std::size_t kMaxErrorBytes = 4096;
inline constexpr std::size_t kMaxNameBytes = 200;
inline constexpr std::size_t kMaxDimensions = 4;
inline constexpr std::size_t kMaxProbes = 64;
inline constexpr std::size_t kMaxIds = kMaxTextBytes;  // one id per byte of the longest text
inline constexpr std::size_t kMaxStopIds = 4096;
inline constexpr std::size_t kMaxStopStrings = 16;
inline constexpr std::size_t kMaxStopStringBytes = 65536;
inline constexpr std::size_t kMaxLogprobs = 20;
inline constexpr std::size_t kMaxPicks = kMaxStepRows * 32;
inline constexpr std::size_t kMaxPrefetch = 65536;
inline constexpr std::size_t kMaxHoldings = 4096;
inline constexpr std::size_t kMaxHoldingBytes = 8192;
inline constexpr std::size_t kMaxCounters = 4096;
inline constexpr std::size_t kMaxPendingBytes = 3;

/// Collects the first refusal while a message is read.
class Checker {
  public:
    const std::optional<Error>& error() const noexcept { return error_; }

    void refuse(ErrorCode code, std::string message, std::string remedy);
    /// "<what> <number> is not known to this build".
    void unknown(std::string_view what, unsigned number);

    std::string text(capnp::Text::Reader text, std::string_view field, std::size_t limit);
    std::string data(capnp::Data::Reader data, std::string_view field, std::size_t limit);
    std::vector<std::uint32_t> numbers(capnp::List<std::uint32_t>::Reader list,
                                       std::string_view field, std::size_t limit);
    float finite(float value, std::string_view field);

    /// The length of `list`, or 0 with a refusal if it is over the limit.
    template <typename List>
    unsigned count(const List& list, std::string_view field, std::size_t limit) {
        return within(list.size(), field, limit, "elements") ? list.size() : 0;
    }

    /// The wire's number as the enum of the same order whose last member is `last`.
    template <typename To, typename From>
    To enumerant(From value, To last, std::string_view what) {
        auto number = static_cast<std::uint16_t>(value);
        if (number <= static_cast<std::uint16_t>(last)) return static_cast<To>(number);
        unknown(what, number);
        return To{};
    }

  private:
    bool within(std::size_t n, std::string_view field, std::size_t limit, std::string_view unit);

    std::optional<Error> error_;
};

using BodyBuilder = wire::Envelope::Body::Builder;

void write(BodyBuilder body, const Failure& message);
void write(BodyBuilder body, const Hello& message);
void write(BodyBuilder body, const Announcement& message);
void write(BodyBuilder body, const Ping& message);
void write(BodyBuilder body, const Pong& message);
void write(BodyBuilder body, const GetStatistics& message);
void write(BodyBuilder body, const Statistics& message);
void write(BodyBuilder body, const Shutdown& message);
void write(BodyBuilder body, const Done& message);
void write(BodyBuilder body, const Encode& message);
void write(BodyBuilder body, const Encoded& message);
void write(BodyBuilder body, const RenderChat& message);
void write(BodyBuilder body, const RenderedChat& message);
void write(BodyBuilder body, const Decode& message);
void write(BodyBuilder body, const Decoded& message);
void write(BodyBuilder body, const OpenSession& message);
void write(BodyBuilder body, const ForkSession& message);
void write(BodyBuilder body, const DropSession& message);
void write(BodyBuilder body, const SaveSession& message);
void write(BodyBuilder body, const SavedSession& message);
void write(BodyBuilder body, const LoadSession& message);
void write(BodyBuilder body, const LoadedSession& message);
void write(BodyBuilder body, const Step& message);
void write(BodyBuilder body, const StepResult& message);
void write(BodyBuilder body, const ExpertCall& message);
void write(BodyBuilder body, const PartialSums& message);
void write(BodyBuilder body, const Prefetch& message);
void write(BodyBuilder body, const Sample& message);
void write(BodyBuilder body, const Sampled& message);
void write(BodyBuilder body, const Submit& message);
void write(BodyBuilder body, const Accepted& message);
void write(BodyBuilder body, const PrefillProgress& message);
void write(BodyBuilder body, const TokenEvent& message);
void write(BodyBuilder body, const SessionLoaded& message);
void write(BodyBuilder body, const SessionSaved& message);
void write(BodyBuilder body, const Finished& message);
void write(BodyBuilder body, const Cancel& message);

Body read(wire::Error::Reader error, Checker& check);
Body read(wire::ControlMessage::Reader message, Checker& check);
Body read(wire::TokenizerMessage::Reader message, Checker& check);
Body read(wire::TrunkMessage::Reader message, Checker& check);
Body read(wire::ExpertsMessage::Reader message, Checker& check);
Body read(wire::SamplerMessage::Reader message, Checker& check);
Body read(wire::GatewayMessage::Reader message, Checker& check);

/// The most bytes that the frame of such a message may have; bounds.cc.
std::size_t max_frame_bytes(wire::Envelope::Body::Reader body);

// Parts that several conversations use.
void write_failure(wire::Error::Builder out, const Failure& failure);
Failure read_failure(wire::Error::Reader in, Checker& check);
void write_tensor(wire::Tensor::Builder out, const Tensor& tensor);
Tensor read_tensor(wire::Tensor::Reader in, std::string_view field, Checker& check);
void write_probe(wire::SegmentProbe::Builder out, const SegmentProbe& probe);
SegmentProbe read_probe(wire::SegmentProbe::Reader in, Checker& check);
void write_params(wire::SamplingParams::Builder out, const SamplingParams& params);
SamplingParams read_params(wire::SamplingParams::Reader in, Checker& check);
void write_sampled_row(wire::SampledRow::Builder out, const SampledRow& row);
SampledRow read_sampled_row(wire::SampledRow::Reader in, Checker& check);

inline capnp::Text::Reader as_text(const std::string& text) { return {text.c_str(), text.size()}; }
inline capnp::Data::Reader as_data(const std::string& bytes) {
    return {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}
inline kj::ArrayPtr<const std::uint32_t> as_list(const std::vector<std::uint32_t>& numbers) {
    return {numbers.data(), numbers.size()};
}

}  // namespace k3::msg::codec
