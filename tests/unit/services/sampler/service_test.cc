#include "services/sampler/service.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/transport/channel.h"
#include "common/transport/tensor_io.h"
#include "tests/support/fake_stages.h"
#include "tests/support/message_fuzzer.h"
#include "tests/support/text.h"

namespace k3::sampler {

namespace {

/// The sampler on a socket, with a thread of its own.
class Fixture {
  public:
    explicit Fixture(std::uint32_t max_rows = 64) : service_(max_rows) {
        transport::Server::Options options;
        options.endpoint = dir_.endpoint("sampler");
        options.announcement.kind = msg::ServiceKind::sampler;
        options.announcement.name = "sampler";
        auto server = transport::Server::create(options);
        REQUIRE(server);
        server_ = std::move(*server);
        msg::Announcement announcement = options.announcement;
        announcement.facts = msg::SamplerFacts{max_rows};
        server_->set_ready(std::move(announcement));
        thread_ = std::thread([this] {
            while (!server_->stopping())
                if (auto request = server_->next(Deadline::after_ms(1000)))
                    service_.handle(std::move(*request));
        });
        transport::Channel::Options channel_options;
        channel_options.endpoint = options.endpoint;
        channel_options.peer = "sampler";
        auto created = transport::Channel::create(channel_options);
        REQUIRE(created);
        channel = std::move(*created);
        auto hello = channel->hello({}, Deadline::after_ms(10000));
        REQUIRE(hello);
        announced = *hello;
    }
    ~Fixture() {
        server_->request_stop();
        thread_.join();
    }

    Result<msg::Sampled> call(msg::Sample sample, std::vector<msg::Bytes> frames) {
        return transport::expect<msg::Sampled>(
            channel->call(std::move(sample), std::move(frames), Deadline::after_ms(10000)),
            "sampler");
    }

    std::string endpoint() const { return dir_.endpoint("sampler"); }

    std::unique_ptr<transport::Channel> channel;
    msg::Announcement announced;

  private:
    test::SocketDir dir_;
    Service service_;
    std::unique_ptr<transport::Server> server_;
    std::thread thread_;
};

struct Batch {
    std::vector<float> logits;
    std::size_t vocab_size = 0;
    std::vector<msg::SampleRow> rows;
};

/// `n_rows` rows of different logits and parameters.
Batch batch(std::size_t n_rows, std::size_t vocab_size) {
    Batch out;
    out.vocab_size = vocab_size;
    std::uint32_t x = 1;
    for (std::size_t i = 0; i < n_rows * vocab_size; ++i) {
        x = x * 1664525U + 1013904223U;
        out.logits.push_back(static_cast<float>(x >> 8U) / 16777216.0F * 8.0F - 4.0F);
    }
    for (std::size_t i = 0; i < n_rows; ++i) {
        msg::SampleRow row;
        row.params.seed = i * 77;
        row.step_index = i;
        row.params.temperature = static_cast<float>(i % 3) * 0.7F;
        row.params.top_p = i % 2 == 0 ? 1.0F : 0.9F;
        row.params.repetition_penalty = i % 4 == 3 ? 1.3F : 1.0F;
        row.generated_ids = {static_cast<std::uint32_t>(i)};
        row.n_logprobs = static_cast<std::uint32_t>(i % 5);
        out.rows.push_back(std::move(row));
    }
    return out;
}

msg::Sample message(const Batch& b, transport::Arena* arena, std::vector<msg::Bytes>& frames) {
    msg::Sample sample;
    sample.logits =
        transport::put_tensor(msg::DType::f32, {b.rows.size(), b.vocab_size},
                              std::as_bytes(std::span(b.logits)), arena, arena != nullptr, frames);
    sample.rows = b.rows;
    return sample;
}

Result<msg::Sampled> ask(Fixture& fixture, const Batch& b) {
    std::vector<msg::Bytes> frames;
    msg::Sample sample = message(b, nullptr, frames);
    return fixture.call(std::move(sample), std::move(frames));
}

bool same(const msg::SampledRow& a, const msg::SampledRow& b) {
    if (a.id != b.id || a.logprob != b.logprob || a.is_stop != b.is_stop ||
        a.top.size() != b.top.size())
        return false;
    for (std::size_t i = 0; i < a.top.size(); ++i)
        if (a.top[i].id != b.top[i].id || a.top[i].logprob != b.top[i].logprob) return false;
    return true;
}

}  // namespace

TEST_CASE("the sampler announces what it takes") {
    Fixture fixture(17);
    CHECK(fixture.announced.kind == msg::ServiceKind::sampler);
    CHECK(std::get<msg::SamplerFacts>(fixture.announced.facts).max_rows == 17);
    CHECK(fixture.announced.fingerprint.empty());
}

TEST_CASE("a row gives the same token alone and in any batch") {
    Fixture fixture;
    const Batch all = batch(12, 300);
    const auto together = ask(fixture, all);
    REQUIRE(together);
    REQUIRE(together->rows.size() == 12);
    for (std::size_t i = 0; i < 12; ++i) {
        Batch alone;
        alone.vocab_size = 300;
        alone.rows = {all.rows[i]};
        alone.logits.assign(all.logits.begin() + static_cast<std::ptrdiff_t>(i * 300),
                            all.logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * 300));
        const auto one = ask(fixture, alone);
        REQUIRE(one);
        CHECK(same(one->rows[0], together->rows[i]));
    }
    Batch reversed;
    reversed.vocab_size = 300;
    for (std::size_t i = 12; i-- > 0;) {
        reversed.rows.push_back(all.rows[i]);
        reversed.logits.insert(reversed.logits.end(),
                               all.logits.begin() + static_cast<std::ptrdiff_t>(i * 300),
                               all.logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * 300));
    }
    const auto backwards = ask(fixture, reversed);
    REQUIRE(backwards);
    for (std::size_t i = 0; i < 12; ++i) CHECK(same(backwards->rows[11 - i], together->rows[i]));
}

TEST_CASE("logits inline and in shared memory give the same answer") {
    Fixture fixture;
    const Batch b = batch(5, 700);
    transport::Arena::Options options;
    options.name = transport::segment_name(0, "sampler-test");
    options.slot_bytes = b.logits.size() * sizeof(float);
    options.n_slots = 2;
    auto arena = transport::Arena::create(options);
    REQUIRE(arena);
    const auto hello = fixture.channel->hello({(*arena)->probe()}, Deadline::after_ms(10000));
    REQUIRE(hello);
    REQUIRE(hello->probes == std::vector<bool>{true});

    std::vector<msg::Bytes> frames;
    msg::Sample by_reference = message(b, arena->get(), frames);
    REQUIRE(frames.empty());
    REQUIRE(std::holds_alternative<msg::ShmPayload>(by_reference.logits.payload));
    const auto first = fixture.call(by_reference, {});
    const auto second = ask(fixture, b);
    REQUIRE(first);
    REQUIRE(second);
    for (std::size_t i = 0; i < b.rows.size(); ++i) CHECK(same(first->rows[i], second->rows[i]));

    // The slot is written anew: the old reference must not be believed.
    for (int i = 0; i < 2; ++i) {
        std::vector<msg::Bytes> none;
        (void)message(b, arena->get(), none);
    }
    const auto late = fixture.call(by_reference, {});
    REQUIRE_FALSE(late);
    CHECK(late.error().code == ErrorCode::stale);
}

TEST_CASE("a call is refused with the name of what is wrong") {
    Fixture fixture(8);
    const auto refusal = [&](const msg::Sample& sample, std::vector<msg::Bytes> frames) {
        const auto answer = fixture.call(sample, std::move(frames));
        REQUIRE_FALSE(answer);
        CHECK_FALSE(answer.error().remedy.empty());
        return answer.error();
    };
    const Batch good = batch(3, 50);
    std::vector<msg::Bytes> frames;
    const msg::Sample sample = message(good, nullptr, frames);

    msg::Sample bad = sample;
    bad.rows.pop_back();
    CHECK(test::contains(refusal(bad, frames).message, "2 rows, but logits of shape [3, 50]"));
    bad = sample;
    bad.rows.clear();
    CHECK(test::contains(refusal(bad, frames).message, "0 rows"));
    CHECK(test::contains(ask(fixture, batch(9, 10)).error().message,
                         "9 rows, the sampler takes 1 to 8"));
    bad = sample;
    bad.logits = {};
    CHECK(test::contains(refusal(bad, {}).message, "logits of shape []"));
    bad = sample;
    bad.logits.shape = {3, 10, 5};
    CHECK(test::contains(refusal(bad, frames).message, "[3, 10, 5]"));
    bad = sample;
    bad.logits.shape = {3, 51};
    CHECK(refusal(bad, frames).code == ErrorCode::invalid_argument);
    bad = sample;
    bad.logits.dtype = msg::DType::i64;
    CHECK(test::contains(refusal(bad, frames).message, "logits"));
    bad = sample;
    CHECK(refusal(bad, {}).code == ErrorCode::invalid_argument);  // the frame is missing
    bad = sample;
    bad.logits.payload = msg::ShmPayload{"/k3-0-nobody-1", 0, 600, 2};
    CHECK(refusal(bad, {}).code == ErrorCode::not_found);
    bad = sample;
    bad.rows[1].params.min_p = 1.5F;
    CHECK(test::contains(refusal(bad, frames).message, "row 1: min_p 1.5"));
    bad = sample;
    bad.rows[2].stop_ids = {50};
    CHECK(test::contains(refusal(bad, frames).message, "row 2: stop_ids[0] is 50"));

    Batch damaged = good;
    damaged.logits[2 * 50 + 13] = std::nanf("");
    const auto answer = ask(fixture, damaged);
    REQUIRE_FALSE(answer);
    CHECK(answer.error().code == ErrorCode::corrupt);
    CHECK(test::contains(answer.error().message, "row 2 of the logits holds nan at id 13"));

    const auto other = fixture.channel->call(msg::Decode{}, {}, Deadline::after_ms(10000));
    REQUIRE_FALSE(other);
    CHECK(other.error().code == ErrorCode::unsupported);
    CHECK(test::contains(other.error().message, "Decode"));
    CHECK(ask(fixture, good));
}

TEST_CASE("thousands of damaged messages do not stop the sampler") {
    Fixture fixture;
    const Batch b = batch(4, 40);
    const auto before = ask(fixture, b);
    REQUIRE(before);

    test::FuzzOptions options;
    options.endpoint = fixture.endpoint();
    std::vector<msg::Bytes> frames;
    const msg::Sample sample = message(b, nullptr, frames);
    options.requests.push_back({sample, frames});
    msg::Sample by_reference = sample;
    by_reference.logits.payload = msg::ShmPayload{"/k3-0-nobody-1", 4096, 640, 2};
    options.requests.push_back({by_reference, {}});
    const test::FuzzReport report = test::fuzz_service(options);
    CHECK_MESSAGE(report.alive, report.problem);
    CHECK(report.n_sent == 2000);
    CHECK(report.n_malformed > 500);
    CHECK(report.n_failures > 0);

    const auto after = ask(fixture, b);
    REQUIRE(after);
    for (std::size_t i = 0; i < b.rows.size(); ++i) CHECK(same(before->rows[i], after->rows[i]));
}

TEST_CASE("a vocabulary of the released size is sampled") {
    Fixture fixture;
    CHECK(ask(fixture, batch(2, 163840)));
}

}  // namespace k3::sampler
