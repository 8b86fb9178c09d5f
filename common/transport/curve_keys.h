#pragma once
// The keys by which the processes of one pipeline know each other on tcp: ZeroMQ's CURVE.
//
// Two pairs: every server of the pipeline answers with the one, every caller calls with the other.
// A pair for each role would protect no more, because trunk and gateway are callers and servers at
// once: who takes their box has keys of either kind anyhow. A pipeline shares nothing with others.
//
// Where they count: on every tcp endpoint, and on no other. A socket file is protected by its
// permissions, and encryption would cost each hop on the box. So both ends know from the endpoint
// alone whether the other one expects keys.
//
// The secret halves are zeroed when the last owner goes, as is every buffer they pass through here;
// ZeroMQ keeps copies of its own in its sockets. docs/formats/keys.md is the file.

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "common/base/result.h"
#include "common/transport/endpoint.h"

namespace k3::transport {

/// 32 bytes as text (Z85), with the closing zero that ZeroMQ wants.
using KeyText = std::array<char, 41>;

class CurveKeys {
  public:
    /// What a key file begins with.
    static constexpr std::string_view kMagic = "k3pipe-keys ";
    /// "k3pipe-keys 1", then four lines of a name and a key.
    static constexpr std::size_t kFileBytes = 14 + 4 * (14 + 40 + 1);

    CurveKeys() = default;
    CurveKeys(const CurveKeys&) = delete;
    CurveKeys& operator=(const CurveKeys&) = delete;
    ~CurveKeys();

    /// New random pairs. Error: unsupported (a ZeroMQ without CURVE).
    /// Shared by the sockets of a process and whoever makes further ones.
    static Result<std::shared_ptr<const CurveKeys>> generate();

    /// Reads a key file; `path` may be a descriptor: "/dev/fd/7" or "/proc/self/fd/7".
    /// Errors: invalid_argument (does not exist, no regular file, others than its owner may open
    /// it: with the chmod to run), io, corrupt (cut off, damaged, halves that do not belong
    /// together), incompatible (another version), unsupported (a ZeroMQ without CURVE).
    static Result<std::shared_ptr<const CurveKeys>> load(const std::string& path);

    /// What load() reads.
    void write(std::span<char, kFileBytes> text) const noexcept;

    /// Tells key sets apart, made from the public halves alone: "5f3a-91c0-...", 8 groups.
    std::string fingerprint() const;

    const KeyText& server_public() const noexcept { return server_public_; }
    const KeyText& server_secret() const noexcept { return server_secret_; }
    const KeyText& client_public() const noexcept { return client_public_; }
    const KeyText& client_secret() const noexcept { return client_secret_; }

  private:
    Status parse(std::string_view text, const std::string& path);

    KeyText server_public_{};
    KeyText server_secret_{};
    KeyText client_public_{};
    KeyText client_secret_{};
};

/// `keys` if they count at `endpoint`, else null.
inline const CurveKeys* keys_at(const Endpoint& endpoint, const CurveKeys* keys) noexcept {
    return endpoint.kind == Endpoint::Kind::tcp ? keys : nullptr;
}

}  // namespace k3::transport
