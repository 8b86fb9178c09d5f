#pragma once
// Tensors into and out of messages, inline or through shared memory, with the same bytes.

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/transport/arena.h"
#include "common/transport/messages/types.h"

namespace k3::transport {

/// Places a tensor of `shape` in `arena` if there is one, the peer can read it (`use_shm`) and it
/// fits a slot; otherwise appends it to `frames` as an inline frame.
msg::Tensor put_tensor(msg::DType dtype, std::vector<std::uint64_t> shape,
                       std::span<const std::byte> bytes, Arena* arena, bool use_shm,
                       std::vector<msg::Bytes>& frames);

/// The bytes of `tensor`, moved out of `frames` or copied out of shared memory.
/// `expected_shape`: what the caller can accept; 0 matches any length in that place.
/// Errors: invalid_argument (dtype, shape or byte count differs, naming `what` and both), and those
/// of ArenaReader::read.
Result<msg::Bytes> take_tensor(const msg::Tensor& tensor, std::string_view what, msg::DType dtype,
                               std::span<const std::uint64_t> expected_shape,
                               std::vector<msg::Bytes>& frames, ArenaReader& reader);

template <typename T>
std::span<const T> view_as(const msg::Bytes& bytes) noexcept {
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

}  // namespace k3::transport
