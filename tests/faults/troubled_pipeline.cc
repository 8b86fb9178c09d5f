#include "tests/faults/troubled_pipeline.h"

#include <doctest/doctest.h>

#include <chrono>
#include <utility>

#include "tests/support/golden.h"

namespace k3::test {

namespace {

constexpr std::uint32_t kTokens = 48;
constexpr std::int64_t kGenerationMs = 120'000;  // longer is a hang
constexpr std::int64_t kWholeMs = 30'000;
constexpr const char* kNeverSaid = "\x01";

msg::Submit request() {
    msg::Submit submit = submit_ids({387, 486, 344, 495, 13, 7, 8, 9, 10, 11, 12, 300}, kTokens);
    submit.ignore_eos = true;
    submit.want_logits = msg::WantLogits::all;
    return submit;
}

}  // namespace

TroubledPipeline::TroubledPipeline(World& world, int n_replicas) : world_(world) {
    const std::string stages = describe(n_replicas);
    pipeline_ = std::make_unique<Pipeline>(world, "troubled", golden_dir() / "tiny-k3", stages,
                                           "max_restarts = 1000\nrestart_window_s = 1\n");
    transport::Channel::Options options;
    options.endpoint = pipeline_->stage("trunk").endpoint;
    options.peer = "trunk";
    trunk_ = std::move(transport::Channel::create(options)).value();
    REQUIRE(trunk_->hello({}, Deadline::after_ms(kWholeMs)).has_value());
    expected_ = GatewayClient(pipeline_->gateway()).generate(request());
    REQUIRE_MESSAGE(!expected_.error.has_value(), expected_.error->sentence());
    REQUIRE(expected_.ids.size() == kTokens);
    generator_ = std::thread([this] { generate(); });
}

TroubledPipeline::~TroubledPipeline() {
    stop_ = true;
    generator_.join();
}

std::string TroubledPipeline::describe(int n_replicas) {
    std::string stages = "[trunk]\nthreads = 1\n";
    for (int share : {0, 1}) {
        const std::string name = std::to_string(share) + "/2";
        if (n_replicas > 1 || share == 0) {
            stages += "[[experts]]\nname = 'near-" + std::to_string(n_near_++) + "'\nshare = '" +
                      name + "'\nthreads = 1\n";
        }
        if (n_replicas > 1 || share == 1) {
            Far& far = far_.emplace_back();
            far.share = name;
            far.back = "ipc://" + (world_.path() / ("far-" + std::to_string(share))).string();
            start_far(far);
            far.proxy = std::make_unique<SocketProxy>("tcp://127.0.0.1:*", far.back);
            stages += "[[experts]]\nname = 'far-" + std::to_string(far_.size() - 1) +
                      "'\nendpoint = '" + far.proxy->endpoint() + "'\n";
        }
    }
    return stages;
}

void TroubledPipeline::start_far(Far& far) {
    far.program = std::make_unique<Program>(
        world_.start_program({built("services/experts/k3-experts").string(), "--listen", far.back,
                              "--model", (golden_dir() / "tiny-k3").string(), "--share", far.share,
                              "--threads", "1", "--payload", "inline"}));
    REQUIRE_MESSAGE(far.program->says("ready listen="), far.program->err());
}

pid_t TroubledPipeline::near_pid(std::size_t i) const {
    return static_cast<pid_t>(pipeline_->stage("near-" + std::to_string(i)).pid);
}

std::uint64_t TroubledPipeline::counter(const std::string& name) {
    auto statistics = transport::expect<msg::Statistics>(
        trunk_->call(msg::GetStatistics{}, {}, Deadline::after_ms(kWholeMs)), "trunk");
    REQUIRE_MESSAGE(statistics.has_value(), statistics.error().sentence());
    for (const msg::Counter& counter : statistics->counters)
        if (counter.name == name) return counter.value;
    FAIL("the trunk has no counter " << name);
    return 0;
}

bool TroubledPipeline::is_whole() {
    // Reads what was said: a launcher whose pipe is full would stand still.
    pipeline_->program().says(kNeverSaid, 1);
    const Deadline deadline = Deadline::after_ms(kWholeMs);
    while (counter("expert_servers_up") < n_near() + n_far() || near_pid(0) <= 0) {
        if (deadline.expired()) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
}

std::string TroubledPipeline::failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
}

void TroubledPipeline::fail(const std::string& what) {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = what;
}

void TroubledPipeline::generate() {
    GatewayClient client(pipeline_->gateway());
    while (!stop_) {
        Generation got;
        const std::uint64_t before = n_tokens_;
        client.collect_more(client.submit(request()), got, kGenerationMs,
                            [&](const Generation& so_far) {
                                n_tokens_ = before + so_far.ids.size();
                                return false;
                            });
        if (got.error.has_value()) return fail(got.error->sentence());
        if (got.ids != expected_.ids) return fail("another token");
        if (got.token_logits != expected_.token_logits ||
            got.prompt_logits != expected_.prompt_logits)
            return fail("other logits");
    }
}

}  // namespace k3::test
