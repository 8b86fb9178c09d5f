// The side of a Server that the service's threads use; connection.cc is the other one.

#include "common/transport/server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "common/base/settings.h"
#include "common/transport/server_impl.h"

namespace k3::transport {

namespace {

// What may wait for one slow client before its requests are cut off. One message always may.
constexpr std::size_t kMaxWaitingMessages = 4096;
constexpr std::size_t kMaxWaitingBytes = std::size_t{256} << 20U;

std::uint64_t random_instance() {
    std::random_device device;
    std::uint64_t number = (std::uint64_t{device()} << 32U) | device();
    return number == 0 ? 1 : number;
}

void signal_event(const Fd& event) noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t n = ::write(event.get(), &one, sizeof(one));
}

void clear_event(const Fd& event) noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] ssize_t n = ::read(event.get(), &count, sizeof(count));
}

}  // namespace

ServerImpl::ServerImpl(Server::Options options)
    : options_(std::move(options)),
      instance_(random_instance()),
      wake_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      requests_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      announcement_(options_.announcement) {
    announcement_.instance = instance_;
    announcement_.state = msg::State::loading;
    if (announcement_.version.empty()) announcement_.version = version();
}

Status ServerImpl::start() {
    if (!wake_event_.valid() || !requests_event_.valid())
        return Error{ErrorCode::io, std::string("cannot make an event: ") + std::strerror(errno),
                     "raise the limit of open files (ulimit -n)"};
    if (options_.lifeline_fd >= 0 && ::fcntl(options_.lifeline_fd, F_SETFD, FD_CLOEXEC) != 0)
        return Error{
            ErrorCode::invalid_argument,
            "lifeline_fd " + std::to_string(options_.lifeline_fd) + " is not an open descriptor",
            "leave lifeline_fd out when starting a service by hand"};
    ASSIGN_OR_RETURN(endpoint_, parse_endpoint(options_.endpoint));
    RETURN_IF_ERROR(bind());
    thread_ = std::thread([this] { run(); });
    return {};
}

Status ServerImpl::check_protection() const {
    if (endpoint_.is_local() || options_.keys) return {};
    if (!options_.insecure)
        return Error{ErrorCode::invalid_argument,
                     "endpoint " + endpoint_.text +
                         " can be reached from other boxes, and nothing would protect it",
                     "give it the keys of the pipeline (k3pipe keys makes them), bind 127.0.0.1, "
                     "or set insecure = true if everyone in the network is trusted"};
    if (options_.warn)
        options_.warn("everyone who reaches " + endpoint_.text +
                      " may use this service: it has no keys, and insecure is set");
    return {};
}

Status ServerImpl::bind() {
    RETURN_IF_ERROR(check_protection());
    if (endpoint_.kind == Endpoint::Kind::ipc) {
        ASSIGN_OR_RETURN(listener_, IpcListener::bind(endpoint_.path));
    }
    context_ = std::make_unique<ZmqContext>();
    socket_ = std::make_unique<ZmqSocket>(*context_, ZMQ_ROUTER);
    socket_->set(ZMQ_ROUTER_MANDATORY, 1);  // else replies to clients that left vanish unseen
    if (keys_at(endpoint_, options_.keys.get()) != nullptr)
        guard_ = std::make_unique<CurveGuard>(*context_, *socket_, options_.keys, options_.warn);
    if (endpoint_.host.find(':') != std::string::npos) socket_->set(ZMQ_IPV6, 1);
    socket_->set_max_message_bytes(options_.max_message_bytes);
    std::string address = endpoint_.text;
    if (endpoint_.kind == Endpoint::Kind::ipc)
        socket_->set(ZMQ_USE_FD, listener_->release());
    else if (endpoint_.host == "localhost")
        address = "tcp://127.0.0.1:" + endpoint_.port;  // ZeroMQ resolves no names when binding
    if (int problem = socket_->bind(address); problem != 0) return bind_error(problem);
    bound_endpoint_ =
        endpoint_.kind == Endpoint::Kind::ipc ? endpoint_.text : socket_->last_endpoint();
    return {};
}

Error ServerImpl::bind_error(int problem) const {
    if (problem == EADDRINUSE)
        return {ErrorCode::resource_exhausted, endpoint_.text + " is taken by another process",
                "stop that process or choose another port"};
    if (problem == ENODEV || problem == EADDRNOTAVAIL)
        return {ErrorCode::invalid_argument,
                "endpoint " + endpoint_.text + " names an address that this box does not have",
                "use an address of this box, or 127.0.0.1"};
    return {ErrorCode::io, "cannot listen on " + endpoint_.text + ": " + ::zmq_strerror(problem),
            ""};
}

void ServerImpl::finish() {
    request_stop();
    finish_.store(true);
    signal_event(wake_event_);
    if (thread_.joinable()) thread_.join();
}

void ServerImpl::set_progress(std::uint32_t permille, std::string detail) {
    std::lock_guard lock(mutex_);
    progress_permille_ = std::min(permille, std::uint32_t{1000});
    progress_detail_ = std::move(detail);
    manager_.loading(progress_permille_, progress_detail_);
}

void ServerImpl::set_ready(msg::Announcement announcement) {
    std::lock_guard lock(mutex_);
    if (announcement.kind == msg::ServiceKind::unknown) announcement.kind = announcement_.kind;
    if (announcement.name.empty()) announcement.name = announcement_.name;
    if (announcement.version.empty()) announcement.version = announcement_.version;
    if (announcement.build.empty()) announcement.build = announcement_.build;
    announcement.instance = instance_;
    announcement.state = msg::State::ready;
    announcement.probes.clear();
    announcement_ = std::move(announcement);
    progress_permille_ = 1000;
    progress_detail_.clear();
    manager_.ready();
}

void ServerImpl::set_failed(Error error) {
    std::lock_guard lock(mutex_);
    announcement_.state = msg::State::failed;
    progress_detail_ = error.sentence();
    manager_.failed(progress_detail_);
    failure_ = std::move(error);
}

void ServerImpl::set_waiting_for(std::string services) {
    std::lock_guard lock(mutex_);
    waiting_for_ = std::move(services);
}

void ServerImpl::set_statistics(std::function<std::vector<msg::Counter>()> counters) {
    std::lock_guard lock(statistics_mutex_);
    statistics_ = std::move(counters);
}

std::optional<Request> ServerImpl::pop() {
    std::lock_guard lock(mutex_);
    if (stopping_.load() || requests_.empty()) return std::nullopt;
    Request request = std::move(requests_.front());
    requests_.pop_front();
    if (requests_.empty()) {
        clear_event(requests_event_);
        if (stopping_.load()) signal_event(requests_event_);  // a stop came in between
    }
    return request;
}

std::optional<Request> ServerImpl::next(Deadline deadline) {
    while (true) {
        if (std::optional<Request> request = try_next()) return request;
        if (stopping() || deadline.expired()) return std::nullopt;
        wait_for_request(deadline);
    }
}

/// The socket first: a hint that was sent before its call should not arrive after it.
std::optional<Request> ServerImpl::try_next() {
    if (options_.lanes) options_.lanes->listen();
    std::optional<Request> request = pop();
    if (!request && options_.lanes) request = pop_lane();
    if (request) work_.advance();
    return request;
}

bool ServerImpl::stopping() const noexcept {
    if (!stopping_.load()) return false;
    // The connection thread starts no reading of the service's counters after the flag is set;
    // wait for one that it has begun.
    std::lock_guard lock(statistics_mutex_);
    return true;
}

void ServerImpl::request_stop() noexcept {
    stopping_.store(true);
    wake_service();
    signal_event(wake_event_);
}

Outgoing ServerImpl::outgoing(const std::shared_ptr<ServerClient>& client, std::uint64_t call_id,
                              const msg::Body& body, std::vector<msg::Bytes> frames) const {
    Outgoing out{client, msg::encode({options_.run_id, call_id, body}), std::move(frames), 0};
    out.bytes = out.envelope.size();
    for (const msg::Bytes& frame : out.frames) out.bytes += frame.size();
    return out;
}

void ServerImpl::enqueue(Outgoing out) {
    ++out.client->waiting_messages;
    out.client->waiting_bytes += out.bytes;
    outgoing_.push_back(std::move(out));
}

bool ServerImpl::reply(const Responder& to, msg::Body body, std::vector<msg::Bytes> frames) {
    const std::shared_ptr<ServerClient>& client = to.client_;
    const std::uint64_t call_id = to.call_id_;
    if (auto* failure = std::get_if<msg::Failure>(&body); failure && failure->service.empty())
        failure->service = options_.announcement.name;
    Outgoing out = outgoing(client, call_id, body, std::move(frames));
    if (answer_lane(to, out.envelope, out.frames)) return true;
    std::lock_guard lock(mutex_);
    if (finish_.load() || client->gone || client->cut_calls.contains(call_id)) {
        ++counts_.replies_dropped;
        return false;
    }
    const bool too_slow =
        client->waiting_messages >= kMaxWaitingMessages ||
        (client->waiting_messages > 0 && client->waiting_bytes >= kMaxWaitingBytes);
    if (too_slow) {
        ++counts_.replies_dropped;
        client->cut_calls.insert(call_id);
        // One that lets even the errors pile up is given up, or they would grow without bound.
        if (client->cut_calls.size() > kMaxWaitingMessages) client->gone = true;
        Error error{
            ErrorCode::resource_exhausted,
            "the client does not read its replies: " + std::to_string(client->waiting_messages) +
                " messages of " + std::to_string(client->waiting_bytes) + " bytes wait for it",
            "read replies as they come, or ask for less"};
        out = outgoing(client, call_id, msg::Failure{std::move(error), options_.announcement.name},
                       {});
    }
    enqueue(std::move(out));
    signal_event(wake_event_);
    if (to.lane_.number != 0) options_.lanes->answer_by_socket(to.lane_);
    return !too_slow;
}

bool Responder::send(msg::Body body, std::vector<msg::Bytes> frames) const {
    std::shared_ptr<ServerImpl> server = server_.lock();
    if (!server || call_id_ == 0) return server != nullptr;
    return server->reply(*this, std::move(body), std::move(frames));
}

bool Responder::send_error(const Error& error) const { return send(msg::Failure{error, ""}); }
bool Responder::send_failure(msg::Failure failure) const { return send(std::move(failure)); }

Server::Server(std::shared_ptr<ServerImpl> impl) : impl_(std::move(impl)) {}
Server::~Server() { impl_->finish(); }

Result<std::unique_ptr<Server>> Server::create(Options options) {
    if (options.refused) return *options.refused;
    auto impl = std::make_shared<ServerImpl>(std::move(options));
    RETURN_IF_ERROR(impl->start());
    return std::unique_ptr<Server>(new Server(std::move(impl)));
}

void Server::set_progress(std::uint32_t permille, std::string detail) {
    impl_->set_progress(permille, std::move(detail));
}
void Server::set_ready(msg::Announcement announcement) {
    impl_->set_ready(std::move(announcement));
}
void Server::set_failed(Error error) { impl_->set_failed(std::move(error)); }
void Server::set_waiting_for(std::string services) { impl_->set_waiting_for(std::move(services)); }
WorkProgress& Server::work() noexcept { return impl_->work(); }
void Server::set_statistics(std::function<std::vector<msg::Counter>()> counters) {
    impl_->set_statistics(std::move(counters));
}
std::optional<Request> Server::next(Deadline deadline) { return impl_->next(deadline); }
std::optional<Request> Server::try_next() { return impl_->try_next(); }
int Server::wait_fd() const noexcept { return impl_->wait_fd(); }
bool Server::stopping() const noexcept { return impl_->stopping(); }
void Server::request_stop() noexcept { impl_->request_stop(); }
std::uint64_t Server::instance() const noexcept { return impl_->instance(); }
const std::string& Server::endpoint() const noexcept { return impl_->endpoint(); }

}  // namespace k3::transport
