// Keys: their file, and who is let in by a server that has them.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include <atomic>
#include <fstream>
#include <mutex>
#include <utility>

#include "common/base/fd.h"
#include "common/base/settings.h"
#include "common/transport/curve_guard.h"
#include "common/transport/curve_keys.h"
#include "common/transport/zmtp_greeting.h"
#include "tests/unit/common/transport/fixtures.h"

using namespace k3;
using namespace k3::transport;
using namespace k3::transport::test;

namespace {

using Keys = std::shared_ptr<const CurveKeys>;

Keys new_keys() { return CurveKeys::generate().value(); }

std::string text_of(const CurveKeys& keys) {
    std::string text(CurveKeys::kFileBytes, '\0');
    keys.write(std::span<char, CurveKeys::kFileBytes>(text.data(), text.size()));
    return text;
}

std::string write_file(const Sockets& folder, const std::string& name, const std::string& text,
                       mode_t mode = 0600) {
    std::string path = folder.path(name);
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
    return path;
}

Error load_error(const std::string& path) {
    auto keys = CurveKeys::load(path);
    REQUIRE_FALSE(keys.has_value());
    return keys.error();
}

/// A server on tcp with `keys`, and the lines that it has for the log.
class GuardedServer {
  public:
    explicit GuardedServer(const Keys& keys) {
        Server::Options options = server_options("tcp://127.0.0.1:*");
        options.keys = keys;
        options.warn = [this](const std::string& line) {
            std::lock_guard lock(mutex_);
            lines_ += line + "\n";
        };
        server = Server::create(std::move(options)).value();
        server->set_ready({});
        worker_.emplace(*server, [this](Request& request) {
            ++n_served;
            echo(request);
        });
    }
    std::string lines() {
        std::lock_guard lock(mutex_);
        return lines_;
    }
    /// Waits until the log has `text`.
    bool tells(const std::string& text) {
        for (Deadline deadline = Deadline::after_ms(10000); !deadline.expired();
             ::poll(nullptr, 0, 5))
            if (lines().find(text) != std::string::npos) return true;
        return false;
    }

    std::unique_ptr<Server> server;
    std::atomic<int> n_served{0};

  private:
    std::mutex mutex_;
    std::string lines_;
    std::optional<Worker> worker_;
};

std::unique_ptr<Channel> channel_with(const std::string& endpoint, const Keys& keys) {
    Channel::Options options;
    options.endpoint = endpoint;
    options.peer = "echo";
    options.keys = keys;
    return std::move(Channel::create(std::move(options))).value();
}

Error hello_error(const std::string& endpoint, const Keys& keys) {
    auto channel = channel_with(endpoint, keys);
    const Deadline deadline = Deadline::after_ms(20000);
    auto answer = channel->hello({}, deadline);
    REQUIRE_FALSE(answer.has_value());
    CHECK_FALSE(deadline.expired());  // a refusal is known at once
    return answer.error();
}

/// A client of libzmq itself, which sends before anyone asked it to.
class Intruder {
  public:
    Intruder() : socket_(context_, ZMQ_DEALER) { socket_.set(ZMQ_LINGER, 0); }
    ZmqSocket& socket() { return socket_; }
    void connect(const std::string& endpoint) {
        REQUIRE(socket_.connect(endpoint) == 0);
        msg::Bytes ping = msg::encode({0, 7, msg::Ping{}});
        std::vector<msg::Bytes> none;
        REQUIRE(socket_.send({}, ping, none) == SendOutcome::sent);
    }
    bool hears_something(int wait_ms) {
        zmq_pollitem_t item{socket_.get(), 0, ZMQ_POLLIN, 0};
        return ::zmq_poll(&item, 1, wait_ms) == 1;
    }

  private:
    ZmqContext context_;
    ZmqSocket socket_;
};

}  // namespace

TEST_CASE("a key file is read as it was written") {
    Sockets folder;
    const Keys keys = new_keys();
    auto read = CurveKeys::load(write_file(folder, "k", text_of(*keys)));
    REQUIRE_MESSAGE(read.has_value(), read.error().message);
    CHECK((*read)->server_public() == keys->server_public());
    CHECK((*read)->server_secret() == keys->server_secret());
    CHECK((*read)->client_public() == keys->client_public());
    CHECK((*read)->client_secret() == keys->client_secret());
    CHECK((*read)->fingerprint() == keys->fingerprint());
}

TEST_CASE("key sets differ, and so do their fingerprints, which hold no key") {
    const Keys a = new_keys();
    const Keys b = new_keys();
    CHECK(a->server_secret() != a->client_secret());
    CHECK(a->server_secret() != b->server_secret());
    CHECK(a->fingerprint() != b->fingerprint());
    CHECK(a->fingerprint().size() == 8 * 4 + 7);
    CHECK(text_of(*a).find(a->fingerprint().substr(0, 4) + a->fingerprint().substr(5, 4)) ==
          std::string::npos);
}

TEST_CASE("keys can be handed over in memory, by descriptor") {
    const std::string text = text_of(*new_keys());
    Fd fd(::memfd_create("keys", 0));
    REQUIRE(::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    for (const char* folder : {"/dev/fd/", "/proc/self/fd/"}) {
        const std::string path = folder + std::to_string(fd.get());
        REQUIRE(::fchmod(fd.get(), 0644) == 0);
        CHECK(load_error(path).code == ErrorCode::invalid_argument);
        REQUIRE(::fchmod(fd.get(), 0600) == 0);
        CHECK(CurveKeys::load(path).has_value());
    }
}

TEST_CASE("a key file that others may open is refused with the command to run") {
    Sockets folder;
    for (mode_t mode : {0640U, 0604U, 0620U, 0660U, 0777U}) {
        const std::string path = write_file(folder, "k", text_of(*new_keys()), mode);
        const Error error = load_error(path);
        CHECK(error.code == ErrorCode::invalid_argument);
        CHECK(error.remedy == "run: chmod 600 " + path);
    }
}

TEST_CASE(
    "a key file that root has handed to a group is accepted by its members, and no other way") {
    if (::geteuid() != 0) {
        MESSAGE("NOT RUN: only root can hand a file to others");
        return;
    }
    constexpr uid_t kSomebody = 65534;
    Sockets folder;
    const std::string path = write_file(folder, "k", text_of(*new_keys()), 0440);
    REQUIRE(::chmod(folder.path("").c_str(), 0711) == 0);
    REQUIRE(::seteuid(kSomebody) == 0);  // our group is still that of the file
    const bool is_accepted = CurveKeys::load(path).has_value();
    REQUIRE(::seteuid(0) == 0);
    CHECK(is_accepted);
    // Nor to ourselves, nor where the group may write, or everybody read.
    CHECK(load_error(path).code == ErrorCode::invalid_argument);
    for (const mode_t mode : {0460U, 0444U}) {
        REQUIRE(::chmod(path.c_str(), mode) == 0);
        REQUIRE(::seteuid(kSomebody) == 0);
        const auto refused = CurveKeys::load(path);
        REQUIRE(::seteuid(0) == 0);
        REQUIRE_FALSE(refused.has_value());
        CHECK(refused.error().remedy == "run: chmod 600 " + path);
    }
}

TEST_CASE("what is no key file, or a damaged one, is refused without a word of its content") {
    Sockets folder;
    const std::string good = text_of(*new_keys());
    const std::string other = text_of(*new_keys());
    std::string version = good;
    version[12] = '2';
    std::string swapped = good;  // the public half of another pair
    swapped.replace(14, 55, other.substr(14, 55));
    std::string flipped = good;
    flipped[14 + 55 + 20] = flipped[14 + 55 + 20] == 'a' ? 'b' : 'a';
    std::string no_z85 = good;
    no_z85[14 + 55 + 20] = '~';
    struct Case {
        std::string text;
        ErrorCode code;
    };
    const std::vector<Case> cases = {{"", ErrorCode::corrupt},
                                     {"[pipeline]\n", ErrorCode::corrupt},
                                     {good.substr(0, good.size() - 1), ErrorCode::corrupt},
                                     {good.substr(0, 100), ErrorCode::corrupt},
                                     {good + "\n", ErrorCode::corrupt},
                                     {swapped, ErrorCode::corrupt},
                                     {flipped, ErrorCode::corrupt},
                                     {no_z85, ErrorCode::corrupt},
                                     {version, ErrorCode::incompatible}};
    for (const Case& c : cases) {
        const std::string path = write_file(folder, "k", c.text);
        const Error error = load_error(path);
        CHECK(error.code == c.code);
        CHECK(error.message.find(path) != std::string::npos);
        CHECK(exit_code(error.code) == 3);
        for (std::size_t at = 28; at + 40 < good.size(); at += 55)
            CHECK(error.sentence().find(good.substr(at, 8)) == std::string::npos);
    }
    CHECK(load_error(folder.path("missing")).code == ErrorCode::invalid_argument);
    CHECK(load_error(folder.path("")).code == ErrorCode::invalid_argument);
    REQUIRE(::mkfifo(folder.path("fifo").c_str(), 0600) == 0);
    CHECK(load_error(folder.path("fifo")).code == ErrorCode::invalid_argument);
}

TEST_CASE("who has the keys is served on tcp") {
    const Keys keys = new_keys();
    GuardedServer guarded(keys);
    auto channel = channel_with(guarded.server->endpoint(), keys);
    greet(*channel);
    for (std::size_t bytes : {0, 100, 300000}) {
        auto reply = channel->call(text("abc"), {msg::Bytes(bytes)}, Deadline::after_ms(10000));
        REQUIRE(reply.has_value());
        CHECK(reply->frames[0].size() == bytes);
    }
    CHECK(guarded.lines() == "");
    CHECK(read_greeting(*parse_endpoint(guarded.server->endpoint()), Deadline::after_ms(10000)) ==
          Greeting::curve);
}

TEST_CASE("a server without keys says so in its greeting, and one that is gone says nothing") {
    auto server = make_server("tcp://127.0.0.1:*");
    const Endpoint endpoint = parse_endpoint(server->endpoint()).value();
    CHECK(read_greeting(endpoint, Deadline::after_ms(10000)) == Greeting::plain);
    server.reset();
    CHECK(read_greeting(endpoint, Deadline::after_ms(10000)) == Greeting::none);
}

TEST_CASE("a caller with the wrong keys, or with none, is told so at once") {
    const Keys keys = new_keys();
    GuardedServer guarded(keys);
    const std::string& endpoint = guarded.server->endpoint();
    const Error none = hello_error(endpoint, nullptr);
    CHECK(none.code == ErrorCode::invalid_argument);
    CHECK(none.message.find("echo (" + endpoint + ")") != std::string::npos);
    CHECK(none.message.find("this process has none") != std::string::npos);
    CHECK(none.remedy.find("--keys") != std::string::npos);
    const Error wrong = hello_error(endpoint, new_keys());
    CHECK(wrong.code == ErrorCode::invalid_argument);
    CHECK(wrong.message.find("another pipeline") != std::string::npos);
    CHECK(guarded.tells("refused a client at 127.0.0.1:"));
    CHECK(guarded.n_served == 0);

    auto plain = make_server("tcp://127.0.0.1:*");
    const Error open = hello_error(plain->endpoint(), keys);
    CHECK(open.code == ErrorCode::invalid_argument);
    CHECK(open.message.find("has no keys") != std::string::npos);
}

TEST_CASE("a client that knows the server's key and has a client key of its own is refused") {
    const Keys keys = new_keys();
    const Keys others = new_keys();
    GuardedServer guarded(keys);
    Intruder intruder;
    ::zmq_setsockopt(intruder.socket().get(), ZMQ_CURVE_SERVERKEY, keys->server_public().data(),
                     41);
    ::zmq_setsockopt(intruder.socket().get(), ZMQ_CURVE_PUBLICKEY, others->client_public().data(),
                     41);
    ::zmq_setsockopt(intruder.socket().get(), ZMQ_CURVE_SECRETKEY, others->client_secret().data(),
                     41);
    intruder.connect(guarded.server->endpoint());
    CHECK(guarded.tells("refused a client at 127.0.0.1: its key is none of this pipeline"));
    CHECK_FALSE(intruder.hears_something(50));
    CHECK(guarded.n_served == 0);
}

TEST_CASE("a flood of refused clients is counted and told in few lines") {
    const Keys keys = new_keys();
    GuardedServer guarded(keys);
    for (int i = 0; i < 20; ++i) hello_error(guarded.server->endpoint(), new_keys());
    auto channel = channel_with(guarded.server->endpoint(), keys);
    greet(*channel);
    auto statistics = expect<msg::Statistics>(
        channel->call(msg::GetStatistics{}, {}, Deadline::after_ms(10000)), "echo");
    REQUIRE(statistics.has_value());
    std::uint64_t n_refused = 0;
    for (const msg::Counter& counter : statistics->counters)
        if (counter.name == "transport_refused_clients") n_refused = counter.value;
    CHECK(n_refused >= 20);
    const std::string lines = guarded.lines();
    CHECK(std::count(lines.begin(), lines.end(), '\n') < 10);
}

TEST_CASE("a server with keys whose handler is gone serves nobody") {
    const Keys keys = new_keys();
    for (bool is_dead : {false, true}) {
        ZmqContext context;
        ZmqSocket server(context, ZMQ_ROUTER);
        auto guard = std::make_unique<CurveGuard>(context, server, keys, nullptr);
        if (is_dead) guard.reset();
        REQUIRE(server.bind("tcp://127.0.0.1:*") == 0);
        Intruder client;
        call_with_keys(client.socket(), *keys);
        client.connect(server.last_endpoint());
        bool has_arrived = false;
        for (Deadline deadline = Deadline::after_ms(is_dead ? 300 : 10000);
             !has_arrived && !deadline.expired(); ::poll(nullptr, 0, 5)) {
            if (guard) guard->attend();
            std::string user_id;
            auto frames = server.receive(user_id);
            has_arrived = frames.has_value();
            if (has_arrived && guard) CHECK(guard->is_accepted(user_id));
        }
        CHECK(has_arrived == !is_dead);
    }
}

TEST_CASE("a message without the user id of an accepted client is not accepted") {
    ZmqContext context;
    ZmqSocket server(context, ZMQ_ROUTER);
    ZmqSocket open(context, ZMQ_ROUTER);  // no keys: nobody asks the handler about its clients
    CurveGuard guard(context, server, new_keys(), nullptr);
    REQUIRE(open.bind("tcp://127.0.0.1:*") == 0);
    Intruder client;
    client.connect(open.last_endpoint());
    std::optional<std::vector<msg::Bytes>> frames;
    std::string user_id = "left over";
    for (Deadline deadline = Deadline::after_ms(10000); !frames && !deadline.expired();
         ::poll(nullptr, 0, 5))
        frames = open.receive(user_id);
    REQUIRE(frames.has_value());
    CHECK(user_id == "");
    CHECK_FALSE(guard.is_accepted(user_id));
}

TEST_CASE("socket files need no keys, with keys at hand or without") {
    Sockets sockets;
    Server::Options options = server_options(sockets.endpoint("s"));
    options.keys = new_keys();
    auto server = Server::create(std::move(options)).value();
    server->set_ready({});
    for (const Keys& keys : {Keys(), new_keys()}) {
        auto channel = channel_with(sockets.endpoint("s"), keys);
        greet(*channel);
    }
}

TEST_CASE("keys open an address of other boxes, and insecure does it with a warning") {
    for (bool has_keys : {true, false}) {
        Server::Options options = server_options("tcp://0.0.0.0:*");
        if (has_keys) options.keys = new_keys();
        options.insecure = !has_keys;
        std::string line;
        options.warn = [&line](const std::string& text) { line = text; };
        CHECK(Server::create(std::move(options)).has_value());
        CHECK((line.find("insecure") != std::string::npos) == !has_keys);
    }
    CHECK_FALSE(Server::create(server_options("tcp://0.0.0.0:*")).has_value());
}
