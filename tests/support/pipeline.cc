#include "tests/support/pipeline.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <memory>
#include <set>
#include <thread>
#include <utility>

#include "common/transport/arena.h"
#include "common/transport/channel.h"
#include "common/transport/curve_keys.h"
#include "common/transport/tensor_io.h"

extern char** environ;

namespace k3::test {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kCleanMs = 5000;  // in which everything must be gone

void pause_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

std::vector<fs::path> files_below(const fs::path& path) {
    std::vector<fs::path> found;
    std::error_code code;
    for (fs::recursive_directory_iterator it(path, code), end; !code && it != end;
         it.increment(code))
        if (it->path().extension() != ".toml") found.push_back(it->path());
    return found;
}

/// Segments of launcher runs (their ids have 16 digits) whose process is gone. Pipelines of other
/// test programs may have some for a moment too.
std::set<std::string> dead_segments() {
    std::set<std::string> found;
    std::error_code code;
    for (fs::directory_iterator it("/dev/shm", code), end; !code && it != end; it.increment(code)) {
        std::string name = it->path().filename().string();
        std::size_t dash = name.find('-', 3);
        if (!name.starts_with("k3-") || dash != 3 + 16) continue;
        pid_t pid = std::atoi(name.c_str() + name.rfind('-') + 1);
        if (pid > 0 && ::kill(pid, 0) != 0 && errno == ESRCH) found.insert(name);
    }
    return found;
}

int code_of(int status) {
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

struct Pipe {
    Fd read;
    Fd write;
};

Pipe make_pipe() {
    int ends[2] = {-1, -1};
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    return {Fd(ends[0]), Fd(ends[1])};
}

}  // namespace

fs::path built(const std::string& path) {
    const char* root = std::getenv("K3_BUILD_ROOT");
    REQUIRE_MESSAGE(root != nullptr, "K3_BUILD_ROOT is not set: run through meson test");
    return fs::path(root) / path;
}

bool has(const std::string& text, const std::string& part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) MESSAGE("\"" << part << "\" is not in: " << text);
    return found;
}

std::string Ended::sentence() const {
    std::size_t at = err.rfind("k3pipe: ");
    if (at == std::string::npos) return "";
    return err.substr(at + 8, err.find('\n', at) - at - 8);
}

Program::Program(const std::vector<std::string>& argv,
                 const std::map<std::string, std::string>& env) {
    Pipe out = make_pipe();
    Pipe err = make_pipe();
    std::vector<std::string> variables;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        std::string text = *entry;
        if (!env.contains(text.substr(0, text.find('=')))) variables.push_back(text);
    }
    for (const auto& [name, value] : env) variables.push_back(name + "=" + value);
    std::vector<char*> words;
    std::vector<char*> envp;
    for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
    for (std::string& variable : variables) envp.push_back(variable.data());
    words.push_back(nullptr);
    envp.push_back(nullptr);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
        ::setpgid(0, 0);
        int null = ::open("/dev/null", O_RDONLY);
        ::dup2(null, 0);
        ::dup2(out.write.get(), 1);
        ::dup2(err.write.get(), 2);
        ::execve(words[0], words.data(), envp.data());
        ::_exit(127);
    }
    out_fd_ = std::move(out.read);
    err_fd_ = std::move(err.read);
}

Program::Program(Program&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      out_fd_(std::move(other.out_fd_)),
      err_fd_(std::move(other.err_fd_)),
      out_(std::move(other.out_)),
      err_(std::move(other.err_)),
      started_(other.started_) {}

Program::~Program() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
}

void Program::signal(int number) const { ::kill(pid_, number); }

/// Reads what is there within `ms`; false when both pipes have ended.
bool Program::read_some(std::int64_t ms) {
    pollfd fds[] = {{out_fd_.get(), POLLIN, 0}, {err_fd_.get(), POLLIN, 0}};
    if (!out_fd_.valid() && !err_fd_.valid()) return false;
    ::poll(fds, 2, static_cast<int>(ms));
    char buffer[65536];
    for (int i : {0, 1}) {
        if ((fds[i].revents & (POLLIN | POLLHUP)) == 0) continue;
        Fd& fd = i == 0 ? out_fd_ : err_fd_;
        ssize_t got = ::read(fd.get(), buffer, sizeof buffer);
        if (got > 0)
            (i == 0 ? out_ : err_).append(buffer, static_cast<std::size_t>(got));
        else
            fd.reset();
    }
    return true;
}

bool Program::wait_text(const std::string& stream, const std::string& text, std::int64_t ms) {
    Deadline deadline = Deadline::after_ms(ms);
    while (stream.find(text) == std::string::npos)
        if (deadline.expired() || !read_some(std::min<std::int64_t>(deadline.remaining_ms(), 100)))
            return false;
    return true;
}

bool Program::says(const std::string& text, std::int64_t ms) { return wait_text(err_, text, ms); }
bool Program::prints(const std::string& text, std::int64_t ms) { return wait_text(out_, text, ms); }

Ended Program::wait(std::int64_t ms) {
    Deadline deadline = Deadline::after_ms(ms);
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) == 0) {
        if (deadline.expired()) {
            FAIL_CHECK("the program did not end within " << ms << " ms; stderr: " << err_);
            ::kill(pid_, SIGKILL);
            ::waitpid(pid_, &status, 0);
            break;
        }
        if (!read_some(20)) pause_a_little();
    }
    pid_ = -1;
    // Whoever inherited a pipe and lives on must not hold us up; what was said is in it already.
    Deadline drained = Deadline::after_ms(200);
    while (!drained.expired() && read_some(drained.remaining_ms())) {
    }
    return {code_of(status), out_, err_,
            std::chrono::duration<double>(Clock::now() - started_).count()};
}

World::World() { REQUIRE(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0); }

World::~World() {
    Deadline deadline = Deadline::after_ms(kCleanMs);
    auto reap = [] {
        while (::waitpid(-1, nullptr, WNOHANG) > 0) {
        }
        return ::waitpid(-1, nullptr, WNOHANG) < 0;
    };
    while (!(reap() && files_below(base()).empty()) && !deadline.expired()) pause_a_little();
    CHECK_MESSAGE(::waitpid(-1, nullptr, WNOHANG) < 0, "a process is left");
    for (const fs::path& file : files_below(base()))
        FAIL_CHECK("a file is left: " << file.string());
    // With the last process gone ours are all there; what appears later is somebody else's.
    std::set<std::string> left = dead_segments();
    while (!left.empty() && !deadline.expired()) {
        pause_a_little();
        std::set<std::string> now = dead_segments();
        std::erase_if(left, [&now](const std::string& name) { return !now.contains(name); });
    }
    for (const std::string& name : left) FAIL_CHECK("a segment is left: " << name);
}

fs::path World::base() const { return path() / ("k3pipe-" + std::to_string(::geteuid())); }

fs::path World::write(const std::string& name, const std::string& text) const {
    write_file(path() / name, text);
    return path() / name;
}

Program World::start_program(const std::vector<std::string>& argv) const {
    return Program(argv, {{"XDG_RUNTIME_DIR", path().string()}});
}

Program World::start(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), built("launcher/k3pipe").string());
    return start_program(arguments);
}

Ended World::k3pipe(std::vector<std::string> arguments, std::int64_t ms) const {
    return start(std::move(arguments)).wait(ms);
}

std::optional<launcher::RunRecord> World::record(const std::string& name) const {
    auto found = launcher::find_run(base(), name);
    if (!found.has_value() || !found->has_value()) return std::nullopt;
    return (*found)->record;
}

namespace {

fs::path write_pipeline(const World& world, const std::string& name, const fs::path& model,
                        const std::string& stages, const std::string& extra) {
    return world.write(name + ".toml", "[pipeline]\nname = '" + name + "'\nmodel = '" +
                                           model.string() + "'\n" + extra + "\n" + stages);
}

std::vector<std::string> up_words(const std::string& file, const std::vector<std::string>& flags) {
    std::vector<std::string> words = {"up", "-c", file};
    words.insert(words.end(), flags.begin(), flags.end());
    return words;
}

}  // namespace

Pipeline::Pipeline(World& world, const std::string& name, const fs::path& model,
                   const std::string& stages, const std::string& extra,
                   const std::vector<std::string>& flags)
    : world_(world),
      name_(name),
      program_(world.start(
          up_words(write_pipeline(world, name, model, stages, extra).string(), flags))) {
    bool ready = program_.says("' is ready after", 60000);
    REQUIRE_MESSAGE(ready, program_.err());
    gateway_ = world.record(name)->gateway;
}

Pipeline::~Pipeline() {
    if (given_up_) return;
    program_.signal(SIGINT);
    Clock::time_point asked = Clock::now();
    Ended ended = program_.wait(10000);
    CHECK_MESSAGE(ended.code == 0, ended.err);
    CHECK(Clock::now() - asked < std::chrono::seconds(5));
}

launcher::StageRecord Pipeline::stage(const std::string& name) const {
    const auto record = world_.record(name_);
    if (!record.has_value()) return {};
    for (const launcher::StageRecord& stage : record->stages)
        if (stage.name == name) return stage;
    FAIL("the pipeline has no stage " << name);
    return {};
}

bool Pipeline::complete_again(const std::string& stage, std::uint32_t restarts) const {
    Deadline deadline = Deadline::after_ms(20000);
    while (!deadline.expired()) {
        auto record = world_.record(name_);
        if (record && record->state == "ready" && this->stage(stage).restarts == restarts)
            return true;
        pause_a_little();
    }
    return false;
}

Answer Pipeline::ask(const msg::Submit& submit) const {
    return ask_all(gateway_, {submit}, 1).front();
}

namespace {

std::unique_ptr<transport::Channel> connect_to(const std::string& endpoint, const std::string& peer,
                                               const std::string& key_file = "") {
    transport::Channel::Options options;
    if (!key_file.empty()) {
        auto keys = transport::CurveKeys::load(key_file);
        REQUIRE_MESSAGE(keys.has_value(), keys.error().sentence());
        options.keys = *std::move(keys);
    }
    options.endpoint = endpoint;
    options.peer = peer;
    auto made = transport::Channel::create(std::move(options));
    REQUIRE(made.has_value());
    auto hello = (*made)->hello({}, Deadline::after_ms(10000));
    REQUIRE_MESSAGE(hello.has_value(), hello.error().sentence());
    return *std::move(made);
}

}  // namespace

std::uint64_t Pipeline::counter(const std::string& name, const std::string& of) const {
    const std::string endpoint = of == "gateway" ? gateway_ : stage(of).endpoint;
    auto reply = transport::expect<msg::Statistics>(
        connect_to(endpoint, of, world_.record(name_)->keys)
            ->call(msg::GetStatistics{}, {}, Deadline::after_ms(10000)),
        of);
    REQUIRE_MESSAGE(reply.has_value(), reply.error().sentence());
    for (const msg::Counter& counter : reply->counters)
        if (counter.name == name) return counter.value;
    FAIL(of << " has no counter " << name);
    return 0;
}

namespace {

/// Several requests over one channel, each read to its end in turn; the channel keeps what arrives
/// for the others meanwhile.
class Conversation {
  public:
    explicit Conversation(const std::string& gateway) : channel_(connect_to(gateway, "gateway")) {}

    Result<std::uint64_t> send(const msg::Submit& submit) { return channel_->send(submit); }

    void read(std::uint64_t call, Answer& answer) {
        Deadline deadline = Deadline::after_ms(60000);
        for (;;) {
            auto reply = channel_->receive(call, deadline, true);
            if (!reply.has_value()) {
                answer.error = std::move(reply).error();
                return;
            }
            if (auto* accepted = std::get_if<msg::Accepted>(&reply->body)) {
                answer.prompt_ids = accepted->prompt_ids;
            } else if (auto* loaded = std::get_if<msg::SessionLoaded>(&reply->body)) {
                answer.loaded = *loaded;
            } else if (auto* saved = std::get_if<msg::SessionSaved>(&reply->body)) {
                answer.saved = *saved;
            } else if (auto* event = std::get_if<msg::TokenEvent>(&reply->body)) {
                take(*event, reply->frames, answer);
            } else if (auto* finished = std::get_if<msg::Finished>(&reply->body)) {
                answer.finished = *finished;
                channel_->forget(call);
                return;
            }
        }
    }

  private:
    void take(const msg::TokenEvent& event, std::vector<msg::Bytes>& frames, Answer& answer) {
        answer.ids.insert(answer.ids.end(), event.ids.begin(), event.ids.end());
        answer.text += event.text;
        if (event.logits.empty()) return;
        const std::uint64_t shape[] = {0, 0};
        auto bytes =
            transport::take_tensor(event.logits, "logits", msg::DType::f32, shape, frames, reader_);
        REQUIRE_MESSAGE(bytes.has_value(), bytes.error().sentence());
        answer.logits.append(reinterpret_cast<const char*>(bytes->data()), bytes->size());
    }

    std::unique_ptr<transport::Channel> channel_;
    transport::ArenaReader reader_;
};

}  // namespace

std::vector<Answer> ask_all(const std::string& gateway, const std::vector<msg::Submit>& submits,
                            std::size_t at_once) {
    Conversation conversation(gateway);
    std::vector<Answer> answers(submits.size());
    struct Outstanding {
        std::size_t index;
        std::uint64_t call;
        Clock::time_point sent;
    };
    std::deque<Outstanding> outstanding;
    std::size_t next = 0;
    while (next < submits.size() || !outstanding.empty()) {
        while (next < submits.size() && outstanding.size() < at_once) {
            auto call = conversation.send(submits[next]);
            if (call.has_value())
                outstanding.push_back({next, *call, Clock::now()});
            else
                answers[next].error = std::move(call).error();
            ++next;
        }
        if (outstanding.empty()) continue;
        Outstanding first = outstanding.front();
        outstanding.pop_front();
        conversation.read(first.call, answers[first.index]);
        answers[first.index].seconds =
            std::chrono::duration<double>(Clock::now() - first.sent).count();
    }
    return answers;
}

msg::Submit of_text(const std::string& text, std::uint32_t max_tokens) {
    msg::Submit submit;
    submit.input = msg::TextInput{text};
    submit.params.temperature = 0;
    submit.max_tokens = max_tokens;
    return submit;
}

msg::Submit of_ids(std::vector<std::uint32_t> ids, std::uint32_t max_tokens) {
    msg::Submit submit;
    submit.input = msg::IdsInput{std::move(ids)};
    submit.params.temperature = 0;
    submit.max_tokens = max_tokens;
    return submit;
}

}  // namespace k3::test
