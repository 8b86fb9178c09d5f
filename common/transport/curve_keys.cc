#include "common/transport/curve_keys.h"

#include <fcntl.h>
#include <sodium.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "common/base/check.h"
#include "common/base/fd.h"

namespace k3::transport {

namespace {

constexpr std::string_view kVersion = "1";
// All of one length, as kFileBytes counts them.
constexpr std::string_view kServerPublic = "server-public ";
constexpr std::string_view kServerSecret = "server-secret ";
constexpr std::string_view kClientPublic = "client-public ";
constexpr std::string_view kClientSecret = "client-secret ";
static_assert(CurveKeys::kMagic.size() + kVersion.size() + 1 == 14 && kServerPublic.size() == 14);

constexpr std::size_t kFingerprintBytes = 16;

/// Bytes that must not stay in memory.
template <std::size_t n>
struct Wiped {
    std::array<char, n> bytes{};
    Wiped() = default;
    Wiped(const Wiped&) = delete;
    Wiped& operator=(const Wiped&) = delete;
    ~Wiped() { ::explicit_bzero(bytes.data(), n); }
};

Status check_supported() {
    if (::zmq_has("curve") != 0) return {};
    return Error{ErrorCode::unsupported,
                 "this ZeroMQ was built without CURVE, so there are no keys",
                 "install a ZeroMQ with libsodium, as Debian's"};
}

Error unreadable(const std::string& path, int problem) {
    if (problem == ENOENT || problem == ENOTDIR)
        return {ErrorCode::invalid_argument, "key file " + path + " does not exist",
                "make it with `k3pipe keys`, or correct the path"};
    return {ErrorCode::io, "cannot read key file " + path + ": " + ::strerror(problem),
            "check its owner and permissions"};
}

Error damaged(const std::string& path, const std::string& why) {
    return {ErrorCode::corrupt, "key file " + path + " " + why,
            "copy it again from another box of the pipeline, or make new keys for all of them with "
            "`k3pipe keys --replace`"};
}

/// Without blocking, whatever lies at the path.
Result<Fd> open_key_file(const std::string& path) {
    Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
    if (!fd.valid()) return unreadable(path, errno);
    struct stat facts = {};
    if (::fstat(fd.get(), &facts) != 0) return unreadable(path, errno);
    if (!S_ISREG(facts.st_mode))
        return Error{ErrorCode::invalid_argument, "key file " + path + " is not a regular file",
                     "give the file that `k3pipe keys` made"};
    // systemd (LoadCredential) and Kubernetes hand over files of root that one group may read:
    // ours, as root has chosen it.
    const bool is_handed = facts.st_uid == 0 && ::geteuid() != 0;
    if ((facts.st_mode & (is_handed ? 037U : 077U)) != 0) {
        std::array<char, 8> mode{};
        std::snprintf(mode.data(), mode.size(), "%04o", facts.st_mode & 07777U);
        return Error{ErrorCode::invalid_argument,
                     "key file " + path + " is open to other users (mode " + mode.data() + ")",
                     "run: chmod 600 " + path};
    }
    return fd;
}

/// As much as fits into `text`; returns the bytes read.
Result<std::size_t> read_key_file(int fd, const std::string& path, std::span<char> text) {
    std::size_t n = 0;
    while (n < text.size()) {
        const ssize_t got = ::pread(fd, text.data() + n, text.size() - n, static_cast<off_t>(n));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return unreadable(path, errno);
        if (got == 0) break;
        n += static_cast<std::size_t>(got);
    }
    return n;
}

bool belong_together(const KeyText& public_half, const KeyText& secret_half) {
    KeyText derived{};
    return ::zmq_curve_public(derived.data(), secret_half.data()) == 0 && derived == public_half;
}

}  // namespace

CurveKeys::~CurveKeys() {
    ::explicit_bzero(server_secret_.data(), server_secret_.size());
    ::explicit_bzero(client_secret_.data(), client_secret_.size());
}

Result<std::shared_ptr<const CurveKeys>> CurveKeys::generate() {
    RETURN_IF_ERROR(check_supported());
    auto keys = std::make_shared<CurveKeys>();
    const bool made =
        ::zmq_curve_keypair(keys->server_public_.data(), keys->server_secret_.data()) == 0 &&
        ::zmq_curve_keypair(keys->client_public_.data(), keys->client_secret_.data()) == 0;
    K3_CHECK(made, "zmq_curve_keypair");
    return std::shared_ptr<const CurveKeys>(std::move(keys));
}

Result<std::shared_ptr<const CurveKeys>> CurveKeys::load(const std::string& path) {
    RETURN_IF_ERROR(check_supported());
    ASSIGN_OR_RETURN(const Fd fd, open_key_file(path));
    Wiped<kFileBytes + 1> text;  // one more shows that the file is too long
    ASSIGN_OR_RETURN(const std::size_t n, read_key_file(fd.get(), path, text.bytes));
    auto keys = std::make_shared<CurveKeys>();
    RETURN_IF_ERROR(keys->parse({text.bytes.data(), n}, path));
    return std::shared_ptr<const CurveKeys>(std::move(keys));
}

Status CurveKeys::parse(std::string_view text, const std::string& path) {
    if (!text.starts_with(CurveKeys::kMagic)) return damaged(path, "is no key file of k3pipe");
    std::string_view rest = text.substr(CurveKeys::kMagic.size());
    const std::string_view version = rest.substr(0, rest.find('\n'));
    if (version != kVersion && version.size() < rest.size())
        return Error{ErrorCode::incompatible,
                     "key file " + path + " has version " + std::string(version.substr(0, 20)) +
                         ", this program reads version " + std::string(kVersion),
                     "use programs of the same release everywhere, or make new keys"};
    if (text.size() != kFileBytes)
        return damaged(path, "does not have the " + std::to_string(kFileBytes) +
                                 " bytes of a key file: it is cut off or was changed");
    rest.remove_prefix(version.size() + 1);
    const auto take = [&rest](std::string_view name, KeyText& key) {
        if (!rest.starts_with(name) || rest[name.size() + 40] != '\n') return false;
        std::copy_n(rest.data() + name.size(), 40, key.data());
        rest.remove_prefix(name.size() + 40 + 1);
        return true;
    };
    if (!take(kServerPublic, server_public_) || !take(kServerSecret, server_secret_) ||
        !take(kClientPublic, client_public_) || !take(kClientSecret, client_secret_))
        return damaged(path, "is damaged: its lines are not those of a key file");
    if (!belong_together(server_public_, server_secret_) ||
        !belong_together(client_public_, client_secret_))
        return damaged(path, "is damaged: a public key does not belong to its secret one");
    return {};
}

void CurveKeys::write(std::span<char, kFileBytes> text) const noexcept {
    auto at = text.begin();
    const auto put = [&at](std::string_view part) { at = std::copy(part.begin(), part.end(), at); };
    const auto line = [&put](std::string_view name, const KeyText& key) {
        put(name);
        put({key.data(), 40});
        put("\n");
    };
    put(CurveKeys::kMagic);
    put(kVersion);
    put("\n");
    line(kServerPublic, server_public_);
    line(kServerSecret, server_secret_);
    line(kClientPublic, client_public_);
    line(kClientSecret, client_secret_);
}

std::string CurveKeys::fingerprint() const {
    std::array<unsigned char, 2 * sizeof(KeyText)> both{};
    const auto end = std::copy(server_public_.begin(), server_public_.end(), both.begin());
    std::copy(client_public_.begin(), client_public_.end(), end);
    std::array<unsigned char, kFingerprintBytes> hash{};
    ::crypto_generichash(hash.data(), hash.size(), both.data(), both.size(), nullptr, 0);
    std::string out;
    for (std::size_t i = 0; i < hash.size(); ++i) {
        if (i > 0 && i % 2 == 0) out += '-';
        constexpr std::string_view kDigits = "0123456789abcdef";
        out += kDigits[hash[i] >> 4U];
        out += kDigits[hash[i] & 15U];
    }
    return out;
}

}  // namespace k3::transport
