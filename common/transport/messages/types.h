#pragma once
// Plain forms of proto/types.capnp: what handlers see instead of generated readers.

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "common/base/error.h"

namespace k3::msg {

/// The protocol version this build speaks; proto/README.md has the table.
inline constexpr std::uint16_t kProtocolVersion = 1;

/// Owned bytes of one frame. Aligned for any scalar type.
using Bytes = std::vector<std::byte>;

enum class DType : std::uint16_t { f32 = 0, i64 = 1, u32 = 2 };

std::size_t size_of(DType dtype) noexcept;  // bytes of one value

/// The bytes are frame `frame` of the same multipart message (1 is the first after the envelope).
struct InlinePayload {
    std::uint32_t frame = 0;
    bool operator==(const InlinePayload&) const = default;
};

/// The bytes lie in a slot of a shared-memory arena; see common/transport/arena.h.
struct ShmPayload {
    std::string segment;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t generation = 0;
    bool operator==(const ShmPayload&) const = default;
};

struct Tensor {
    DType dtype = DType::f32;
    std::vector<std::uint64_t> shape;  // slowest first; empty: no tensor
    std::variant<InlinePayload, ShmPayload> payload;

    bool empty() const noexcept { return shape.empty(); }
    bool operator==(const Tensor&) const = default;
};

struct SegmentProbe {
    std::string segment;
    std::uint64_t nonce = 0;
    bool operator==(const SegmentProbe&) const = default;
};

/// A reply instead of a result.
struct Failure {
    Error error;
    std::string service;  // which service first said it; empty: the one that replies
    bool operator==(const Failure&) const = default;
};

}  // namespace k3::msg
