// Codec of proto/types.capnp, and the checked reading of fields.

#include "common/transport/messages/types.h"

#include <cmath>

#include "common/transport/messages/codec.h"

namespace k3::msg {

std::size_t size_of(DType dtype) noexcept {
    switch (dtype) {
        case DType::f32:
        case DType::u32:
            return 4;
        case DType::i64:
            return 8;
    }
    return 1;
}

namespace codec {

namespace {

/// At most `limit` bytes of `text`, cut between UTF-8 characters.
std::string shortened(const std::string& text, std::size_t limit) {
    if (text.size() <= limit) return text;
    std::size_t end = limit;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
    return text.substr(0, end);
}

/// Product of the dimensions times `value_bytes`. Zeros count as ones towards the overflow, so that
/// no stride computed from an accepted shape can wrap.
std::optional<std::uint64_t> tensor_bytes(const std::vector<std::uint64_t>& shape,
                                          std::uint64_t value_bytes) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 62U;
    std::uint64_t product = value_bytes;
    bool empty = false;
    for (std::uint64_t d : shape) {
        if (d == 0) empty = true;
        if (d > 1 && product > kMost / d) return std::nullopt;
        product *= d == 0 ? 1 : d;
    }
    return empty ? 0 : product;
}

Tensor refused_tensor(Checker& check, std::string message) {
    check.refuse(ErrorCode::invalid_argument, std::move(message), "");
    return {};
}

}  // namespace

void Checker::refuse(ErrorCode code, std::string message, std::string remedy) {
    if (!error_) error_ = Error{code, std::move(message), std::move(remedy)};
}

void Checker::unknown(std::string_view what, unsigned number) {
    refuse(ErrorCode::unsupported,
           std::string(what) + " number " + std::to_string(number) + " is not known to this build",
           "use programs of the same release on both sides");
}

bool Checker::within(std::size_t n, std::string_view field, std::size_t limit,
                     std::string_view unit) {
    if (n <= limit) return true;
    refuse(ErrorCode::invalid_argument,
           std::string(field) + " has " + std::to_string(n) + " " + std::string(unit) +
               ", the limit is " + std::to_string(limit),
           "send less at a time");
    return false;
}

std::string Checker::text(capnp::Text::Reader text, std::string_view field, std::size_t limit) {
    if (!within(text.size(), field, limit, "bytes")) return {};
    return {text.begin(), text.size()};
}

std::string Checker::data(capnp::Data::Reader data, std::string_view field, std::size_t limit) {
    if (!within(data.size(), field, limit, "bytes")) return {};
    return {reinterpret_cast<const char*>(data.begin()), data.size()};
}

std::vector<std::uint32_t> Checker::numbers(capnp::List<std::uint32_t>::Reader list,
                                            std::string_view field, std::size_t limit) {
    unsigned n = count(list, field, limit);
    std::vector<std::uint32_t> out(n);
    for (unsigned i = 0; i < n; ++i) out[i] = list[i];
    return out;
}

float Checker::finite(float value, std::string_view field) {
    if (std::isfinite(value)) return value;
    refuse(ErrorCode::invalid_argument, std::string(field) + " is not a finite number", "");
    return 0;
}

void write_tensor(wire::Tensor::Builder out, const Tensor& tensor) {
    if (tensor.empty()) return;
    out.setDtype(static_cast<wire::DType>(tensor.dtype));
    out.setShape(kj::ArrayPtr<const std::uint64_t>(tensor.shape.data(), tensor.shape.size()));
    auto payload = out.initPayload();
    if (const auto* place = std::get_if<InlinePayload>(&tensor.payload)) {
        payload.setInline(place->frame);
        return;
    }
    const auto& place = std::get<ShmPayload>(tensor.payload);
    auto shm = payload.initShm();
    shm.setSegment(as_text(place.segment));
    shm.setOffset(place.offset);
    shm.setBytes(place.bytes);
    shm.setGeneration(place.generation);
}

Tensor read_tensor(wire::Tensor::Reader in, std::string_view field, Checker& check) {
    Tensor tensor;
    const std::string name(field);
    auto shape = in.getShape();
    unsigned n_dimensions = check.count(shape, name + ".shape", kMaxDimensions);
    if (n_dimensions == 0) return tensor;
    for (unsigned i = 0; i < n_dimensions; ++i) tensor.shape.push_back(shape[i]);
    tensor.dtype = check.enumerant(in.getDtype(), DType::u32, "data type");
    auto bytes = tensor_bytes(tensor.shape, size_of(tensor.dtype));
    if (!bytes) return refused_tensor(check, name + ".shape is too large for 64 bits");

    auto payload = in.getPayload();
    switch (payload.which()) {
        case wire::Payload::INLINE: {
            std::uint32_t frame = payload.getInline();
            if (frame == 0)
                return refused_tensor(check, name + " names frame 0, which is the message itself");
            tensor.payload = InlinePayload{frame};
            return tensor;
        }
        case wire::Payload::SHM: {
            auto shm = payload.getShm();
            ShmPayload place;
            place.segment = check.text(shm.getSegment(), name + ".segment", kMaxNameBytes);
            place.offset = shm.getOffset();
            place.bytes = shm.getBytes();
            place.generation = shm.getGeneration();
            if (place.bytes != *bytes)
                return refused_tensor(check, name + " points at " + std::to_string(place.bytes) +
                                                 " bytes, but its shape needs " +
                                                 std::to_string(*bytes));
            tensor.payload = std::move(place);
            return tensor;
        }
    }
    check.unknown("payload", payload.which());
    return {};
}

void write_probe(wire::SegmentProbe::Builder out, const SegmentProbe& probe) {
    out.setSegment(as_text(probe.segment));
    out.setNonce(probe.nonce);
}

SegmentProbe read_probe(wire::SegmentProbe::Reader in, Checker& check) {
    return {check.text(in.getSegment(), "SegmentProbe.segment", kMaxNameBytes), in.getNonce()};
}

void write_failure(wire::Error::Builder out, const Failure& message) {
    out.setCode(static_cast<std::uint8_t>(message.error.code));
    out.setMessage(as_text(shortened(message.error.message, kMaxErrorBytes)));
    out.setRemedy(as_text(shortened(message.error.remedy, kMaxErrorBytes)));
    out.setService(as_text(shortened(message.service, kMaxNameBytes)));
}

void write(BodyBuilder body, const Failure& message) { write_failure(body.initError(), message); }

Failure read_failure(wire::Error::Reader in, Checker& check) {
    Failure failure;
    std::uint8_t code = in.getCode();
    failure.error.code =
        code < kErrorCodeCount ? static_cast<ErrorCode>(code) : ErrorCode::internal;
    failure.error.message = check.text(in.getMessage(), "Error.message", kMaxErrorBytes);
    failure.error.remedy = check.text(in.getRemedy(), "Error.remedy", kMaxErrorBytes);
    failure.service = check.text(in.getService(), "Error.service", kMaxNameBytes);
    return failure;
}

Body read(wire::Error::Reader in, Checker& check) { return read_failure(in, check); }

}  // namespace codec
}  // namespace k3::msg
