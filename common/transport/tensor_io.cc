#include "common/transport/tensor_io.h"

#include <optional>
#include <string>

namespace k3::transport {

namespace {

std::string shape_text(std::span<const std::uint64_t> shape, bool zero_is_any) {
    std::string out = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) {
        if (i > 0) out += ", ";
        out += zero_is_any && shape[i] == 0 ? "any" : std::to_string(shape[i]);
    }
    return out + "]";
}

std::string_view dtype_text(msg::DType dtype) {
    switch (dtype) {
        case msg::DType::f32:
            return "f32";
        case msg::DType::i64:
            return "i64";
        case msg::DType::u32:
            return "u32";
    }
    return "unknown";
}

Error mismatch(std::string_view what, const std::string& detail) {
    return {ErrorCode::invalid_argument, std::string(what) + " " + detail,
            "check that both services belong to the same pipeline"};
}

bool shapes_agree(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> expected) {
    if (shape.size() != expected.size()) return false;
    for (std::size_t i = 0; i < shape.size(); ++i)
        if (expected[i] != 0 && shape[i] != expected[i]) return false;
    return true;
}

/// Nothing when the product does not fit 64 bits.
std::optional<std::uint64_t> bytes_of(const msg::Tensor& tensor) {
    std::uint64_t bytes = msg::size_of(tensor.dtype);
    for (std::uint64_t d : tensor.shape)
        if (__builtin_mul_overflow(bytes, d, &bytes)) return std::nullopt;
    return bytes;
}

}  // namespace

msg::Tensor put_tensor(msg::DType dtype, std::vector<std::uint64_t> shape,
                       std::span<const std::byte> bytes, Arena* arena, bool use_shm,
                       std::vector<msg::Bytes>& frames) {
    msg::Tensor tensor;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    K3_CHECK(bytes_of(tensor) == bytes.size(),
             shape_text(tensor.shape, false) + " with " + std::to_string(bytes.size()) + " bytes");
    if (arena != nullptr && use_shm && bytes.size() <= arena->slot_bytes()) {
        Result<msg::ShmPayload> place = arena->write(bytes);
        if (place.has_value()) {
            tensor.payload = std::move(place).value();
            return tensor;
        }
    }
    frames.emplace_back(bytes.begin(), bytes.end());
    tensor.payload = msg::InlinePayload{static_cast<std::uint32_t>(frames.size())};
    return tensor;
}

Result<msg::Bytes> take_tensor(const msg::Tensor& tensor, std::string_view what, msg::DType dtype,
                               std::span<const std::uint64_t> expected_shape,
                               std::vector<msg::Bytes>& frames, ArenaReader& reader) {
    if (tensor.empty()) return mismatch(what, "is missing");
    if (tensor.dtype != dtype)
        return mismatch(what, "is of type " + std::string(dtype_text(tensor.dtype)) +
                                  ", expected " + std::string(dtype_text(dtype)));
    if (!shapes_agree(tensor.shape, expected_shape))
        return mismatch(what, "has shape " + shape_text(tensor.shape, false) + ", expected " +
                                  shape_text(expected_shape, true));
    const std::optional<std::uint64_t> bytes = bytes_of(tensor);
    if (!bytes) return mismatch(what, "has a shape that is too large for 64 bits");

    if (const auto* shm = std::get_if<msg::ShmPayload>(&tensor.payload)) {
        if (shm->bytes != *bytes)
            return mismatch(what, "points at " + std::to_string(shm->bytes) + " bytes, its shape " +
                                      shape_text(tensor.shape, false) + " needs " +
                                      std::to_string(*bytes));
        Result<msg::Bytes> read = reader.read(*shm);
        if (!read.has_value()) return std::move(read).error().with_context(what);
        return read;
    }
    const std::uint32_t frame = std::get<msg::InlinePayload>(tensor.payload).frame;
    if (frame == 0 || frame > frames.size())
        return mismatch(what, "lies in frame " + std::to_string(frame) + ", the message has " +
                                  std::to_string(frames.size()) + " after its first");
    msg::Bytes& found = frames[frame - 1];
    if (found.size() != *bytes)
        return mismatch(what, "has a frame of " + std::to_string(found.size()) +
                                  " bytes, its shape " + shape_text(tensor.shape, false) +
                                  " needs " + std::to_string(*bytes));
    return std::move(found);
}

}  // namespace k3::transport
