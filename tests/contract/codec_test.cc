// Messages as bytes: round trips, released bytes, and everything that decoding must refuse.

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <doctest/doctest.h>
#include <kj/io.h>
#include <xxhash.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "common/transport/messages/envelope.h"
#include "envelope.capnp.h"
#include "tests/support/golden.h"
#include "tests/support/sample_messages.h"

using namespace k3;

namespace {

Result<msg::Envelope> decode(std::span<const std::byte> frame) {
    std::uint64_t hint = 0;
    return msg::decode(frame, hint);
}

msg::Bytes read_golden(const std::string& name) {
    std::ifstream file(test::golden_dir() / "messages" / name, std::ios::binary);
    std::string text(std::istreambuf_iterator<char>(file), {});
    const auto* data = reinterpret_cast<const std::byte*>(text.data());
    return {data, data + text.size()};
}

/// A message built with the generated code, as a foreign sender might build it.
msg::Bytes build(const std::function<void(wire::Envelope::Builder)>& fill) {
    capnp::MallocMessageBuilder builder;
    auto root = builder.initRoot<wire::Envelope>();
    root.setVersion(msg::kProtocolVersion);
    root.setCallId(42);
    fill(root);
    kj::Array<capnp::word> words = capnp::messageToFlatArray(builder);
    const auto* data = reinterpret_cast<const std::byte*>(words.begin());
    return {data, data + words.size() * sizeof(capnp::word)};
}

Error refusal(const msg::Bytes& frame, std::uint64_t expected_hint = 42) {
    std::uint64_t hint = 1;
    Result<msg::Envelope> envelope = msg::decode(frame, hint);
    REQUIRE_FALSE(envelope.has_value());
    CHECK(hint == expected_hint);
    return envelope.error();
}

Error refusal_of(const std::function<void(wire::Envelope::Body::Builder)>& fill) {
    return refusal(build([&](wire::Envelope::Builder root) { fill(root.getBody()); }));
}

/// Two fillings that choose different members of one union and are otherwise equal show where its
/// tag lies; there goes a number that this build does not know.
msg::Bytes with_unknown_member(const std::function<void(wire::Envelope::Body::Builder)>& one,
                               const std::function<void(wire::Envelope::Body::Builder)>& other) {
    msg::Bytes bytes = build([&](wire::Envelope::Builder root) { one(root.getBody()); });
    const msg::Bytes second = build([&](wire::Envelope::Builder root) { other(root.getBody()); });
    REQUIRE(bytes.size() == second.size());
    int n_different = 0;
    for (std::size_t at = 0; at < bytes.size(); at += 2) {
        if (std::memcmp(bytes.data() + at, second.data() + at, 2) == 0) continue;
        const std::uint16_t tag = 99;
        std::memcpy(bytes.data() + at, &tag, 2);
        ++n_different;
    }
    REQUIRE(n_different == 1);
    return bytes;
}

bool says(const Error& error, const std::string& word) {
    INFO(error.message);
    return error.message.find(word) != std::string::npos;
}

}  // namespace

TEST_CASE("every kind of message has a sample, and comes back as it was") {
    std::set<std::size_t> kinds;
    for (const test::SampleMessage& sample : test::sample_messages()) {
        CAPTURE(sample.name);
        kinds.insert(sample.envelope.body.index());
        const msg::Bytes bytes = msg::encode(sample.envelope);
        CHECK(bytes == msg::encode(sample.envelope));
        std::uint64_t hint = 0;
        Result<msg::Envelope> back = msg::decode(bytes, hint);
        REQUIRE_MESSAGE(back.has_value(), (back.has_value() ? "" : back.error().message));
        CHECK(hint == sample.envelope.call_id);
        CHECK(*back == sample.envelope);
    }
    CHECK(kinds.size() == std::variant_size_v<msg::BodyVariant>);
}

TEST_CASE("released messages keep their bytes and their meaning") {
    std::map<std::string, msg::Envelope> samples;
    for (test::SampleMessage& sample : test::sample_messages())
        samples.emplace(sample.name + ".bin", std::move(sample.envelope));
    std::ifstream manifest(test::golden_dir() / "messages" / "MANIFEST.txt");
    REQUIRE(manifest.good());
    std::size_t n = 0;
    for (std::string line; std::getline(manifest, line);) {
        if (line.starts_with("#")) continue;
        std::istringstream fields(line);
        std::string file;
        std::string message;
        std::size_t size = 0;
        std::string checksum;
        fields >> file >> message >> size >> checksum;
        CAPTURE(file);
        ++n;
        const msg::Bytes bytes = read_golden(file);
        REQUIRE(bytes.size() == size);
        REQUIRE(XXH3_64bits(bytes.data(), bytes.size()) == std::stoull(checksum, nullptr, 16));
        Result<msg::Envelope> back = decode(bytes);
        REQUIRE_MESSAGE(back.has_value(), (back.has_value() ? "" : back.error().message));
        CHECK(msg::name_of(back->body) == message);
        REQUIRE(samples.contains(file));
        CHECK(*back == samples.at(file));
    }
    CHECK(n == samples.size());
}

TEST_CASE("a frame is read at any address") {
    for (const test::SampleMessage& sample : test::sample_messages()) {
        const msg::Bytes bytes = msg::encode(sample.envelope);
        for (std::size_t shift = 1; shift < 8; ++shift) {
            msg::Bytes room(bytes.size() + shift);
            std::copy(bytes.begin(), bytes.end(),
                      room.begin() + static_cast<std::ptrdiff_t>(shift));
            Result<msg::Envelope> back = decode(std::span(room).subspan(shift));
            REQUIRE(back.has_value());
            CHECK(*back == sample.envelope);
        }
    }
}

TEST_CASE("frames that can be no message are refused by their size") {
    const msg::Bytes good = msg::encode({0, 42, msg::Ping{}});
    for (std::size_t n : {0, 1, 7, 8, 15, 17, 20})
        CHECK(says(refusal(msg::Bytes(n), 0), std::to_string(n) + " bytes"));
    CHECK(refusal(msg::Bytes(16), 0).code == ErrorCode::invalid_argument);
    CHECK(says(refusal(msg::Bytes(msg::kMaxEnvelopeBytes + 8), 0), "limit"));
    for (std::size_t n = 16; n < good.size(); n += 8) {
        CAPTURE(n);
        std::uint64_t hint = 0;
        CHECK_FALSE(msg::decode(std::span(good).first(n), hint).has_value());
    }
    msg::Bytes longer = good;
    longer.resize(good.size() + 8);
    CHECK(says(refusal(longer), "8 bytes follow"));
}

TEST_CASE("a small message cannot be a large one, on its way in or out") {
    // Refused before its fields are read: the limit of this text would be 4,096 bytes.
    const msg::Bytes pong = build([](wire::Envelope::Builder root) {
        root.getBody().initControl().initPong().setDetail(std::string(40000, 'x').c_str());
    });
    const Error error = refusal(pong);
    CHECK(error.code == ErrorCode::invalid_argument);
    CHECK(says(error, std::to_string(pong.size()) + " bytes is over the limit of 32768"));
    msg::Step step;
    step.rows.resize(200000);
    std::uint64_t hint = 0;
    const auto sent = msg::decode(msg::encode({0, 9, step}), hint);
    REQUIRE(sent.has_value());
    CHECK(hint == 9);
    const auto& failure = std::get<msg::Failure>(sent->body);
    CHECK(failure.error.code == ErrorCode::resource_exhausted);
    CHECK(failure.error.message.find("Step") != std::string::npos);
}

TEST_CASE("the largest messages that their fields allow fit their limits") {
    msg::Step step;
    step.rows.resize(msg::kMaxStepRows);
    msg::Prefetch prefetch;
    prefetch.experts.resize(65536);
    prefetch.ranks.resize(65536);
    msg::Submit submit;
    submit.input = msg::IdsInput{std::vector<std::uint32_t>(msg::kMaxTextBytes)};
    submit.stop_strings.assign(16, std::string(65536, 's'));
    submit.stop_ids.resize(4096);
    msg::Statistics statistics;
    statistics.counters.assign(4096, {std::string(200, 'c'), 1});
    msg::Finished finished;
    finished.stop_string = std::string(65536, 's');
    const std::string text(4096, 'e');
    for (const msg::Body& body :
         {msg::Body(step), msg::Body(prefetch), msg::Body(submit), msg::Body(statistics),
          msg::Body(finished), msg::Body(msg::Encode{std::string(msg::kMaxTextBytes, 't')}),
          msg::Body(msg::Decode{std::vector<std::uint32_t>(msg::kMaxTextBytes), "", true, false}),
          msg::Body(msg::SaveSession{1, std::string(200, 'n'),
                                     std::vector<std::uint32_t>(msg::kMaxTextBytes)}),
          msg::Body(msg::Failure{{ErrorCode::io, text, text}, std::string(200, 'n')})}) {
        CAPTURE(msg::name_of(body));
        const auto back = decode(msg::encode({0, 1, body}));
        REQUIRE(back.has_value());
        CHECK(back->body == body);
    }
}

TEST_CASE("the protocol version decides before anything else is read") {
    auto of_version = [](std::uint16_t version) {
        return build([version](wire::Envelope::Builder root) { root.setVersion(version); });
    };
    Error empty = refusal(of_version(0));
    CHECK(empty.code == ErrorCode::invalid_argument);
    Error newer = refusal(of_version(7));
    CHECK(newer.code == ErrorCode::incompatible);
    CHECK(says(newer, "version 7"));
    CHECK(says(newer, "version " + std::to_string(msg::kProtocolVersion)));
}

TEST_CASE("union members of the future are unsupported, with their number") {
    using Body = wire::Envelope::Body::Builder;
    auto check = [](const std::string& word, const auto& one, const auto& other) {
        CAPTURE(word);
        Error error = refusal(with_unknown_member(one, other));
        CHECK(error.code == ErrorCode::unsupported);
        CHECK(says(error, word + " number 99"));
    };
    check(
        "conversation", [](Body b) { b.adoptControl({}); }, [](Body b) { b.adoptTrunk({}); });
    check(
        "control message", [](Body b) { b.initControl().setPing(); },
        [](Body b) { b.initControl().setDone(); });
    check(
        "kind of facts", [](Body b) { b.initControl().initAnnouncement().initFacts().setNone(); },
        [](Body b) { b.initControl().initAnnouncement().initFacts().adoptTrunk({}); });
    check(
        "tokenizer message", [](Body b) { b.initTokenizer().adoptEncode({}); },
        [](Body b) { b.initTokenizer().adoptDecoded({}); });
    check(
        "trunk message", [](Body b) { b.initTrunk().adoptOpenSession({}); },
        [](Body b) { b.initTrunk().adoptStep({}); });
    check(
        "experts message", [](Body b) { b.initExperts().adoptCall({}); },
        [](Body b) { b.initExperts().adoptPrefetch({}); });
    check(
        "sampler message", [](Body b) { b.initSampler().adoptSample({}); },
        [](Body b) { b.initSampler().adoptSampled({}); });
    check(
        "gateway message", [](Body b) { b.initGateway().adoptSubmit({}); },
        [](Body b) { b.initGateway().adoptCancel({}); });
    check(
        "kind of input", [](Body b) { b.initGateway().initSubmit().getInput().adoptText({}); },
        [](Body b) { b.initGateway().initSubmit().getInput().adoptIds({}); });
    auto rows = [](Body b) {
        auto tensor = b.initExperts().initCall().initRows();
        tensor.initShape(1).set(0, 1);
        return tensor.initPayload();
    };
    check(
        "payload", [&](Body b) { rows(b).setInline(0); }, [&](Body b) { rows(b).initShm(); });
}

TEST_CASE("enumerants of the future are unsupported, with their number") {
    auto code_and = [](const Error& error, const std::string& word) {
        CHECK(error.code == ErrorCode::unsupported);
        CHECK(says(error, word));
    };
    code_and(refusal_of([](auto body) {
                 body.initControl().initAnnouncement().setKind(static_cast<wire::ServiceKind>(6));
             }),
             "service kind number 6");
    code_and(refusal_of([](auto body) {
                 body.initControl().initPong().setState(static_cast<wire::State>(4));
             }),
             "service state number 4");
    code_and(refusal_of([](auto body) {
                 body.initGateway().initFinished().setReason(static_cast<wire::FinishReason>(5));
             }),
             "finish reason number 5");
    code_and(refusal_of([](auto body) {
                 body.initGateway().initSubmit().setWantLogits(static_cast<wire::WantLogits>(3));
             }),
             "choice of logits number 3");
    code_and(refusal_of([](auto body) {
                 auto rows = body.initExperts().initCall().initRows();
                 rows.initShape(1).set(0, 1);
                 rows.initPayload().setInline(1);
                 rows.setDtype(static_cast<wire::DType>(3));
             }),
             "data type number 3");
}

TEST_CASE("an unknown error code of the future is read as internal") {
    const msg::Bytes bytes = build([](wire::Envelope::Builder root) {
        auto error = root.getBody().initError();
        error.setCode(200);
        error.setMessage("what");
    });
    Result<msg::Envelope> back = decode(bytes);
    REQUIRE(back.has_value());
    CHECK(std::get<msg::Failure>(back->body).error.code == ErrorCode::internal);
}

TEST_CASE("texts and lists over their limits are refused with number and limit") {
    const std::string long_text(5000, 'x');
    CHECK(says(refusal_of([&](auto body) { body.initError().setMessage(long_text.c_str()); }),
               "Error.message has 5000 bytes, the limit is 4096"));
    CHECK(says(refusal_of([](auto body) { body.initControl().initHello().initProbes(65); }),
               "Hello.probes has 65 elements, the limit is 64"));
    CHECK(says(refusal_of([&](auto body) {
                   body.initControl().initAnnouncement().setName(long_text.c_str());
               }),
               "Announcement.name"));
    CHECK(says(refusal_of([](auto body) {
                   body.initTokenizer().initEncode().initText(msg::kMaxTextBytes + 1);
               }),
               "Encode.text has 8388609 bytes, the limit is 8388608"));
    CHECK(says(refusal_of([](auto body) { body.initTokenizer().initDecode().initPending(4); }),
               "Decode.pending has 4 bytes"));
    CHECK(says(
        refusal_of([](auto body) { body.initTrunk().initStep().initRows(msg::kMaxStepRows + 1); }),
        "Step.rows has 65537 elements, the limit is 65536"));
    CHECK(says(refusal_of([](auto body) { body.initGateway().initSubmit().initStopStrings(17); }),
               "Submit.stopStrings has 17 elements"));
    CHECK(says(refusal_of([](auto body) { body.initGateway().initSubmit().setNLogprobs(21); }),
               "Submit.nLogprobs is 21, the limit is 20"));
    CHECK(says(refusal_of([](auto body) {
                   body.initSampler().initSample().initRows(1)[0].setNLogprobs(21);
               }),
               "SampleRow.nLogprobs is 21, the limit is 20"));
    CHECK(says(refusal_of([](auto body) { body.initExperts().initPrefetch().initExperts(3); }),
               "3 experts and 0 ranks"));
}

TEST_CASE("numbers that are not finite are refused by name") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float inf = std::numeric_limits<float>::infinity();
    CHECK(says(refusal_of([&](auto body) {
                   body.initGateway().initSubmit().initParams().setTemperature(nan);
               }),
               "SamplingParams.temperature"));
    CHECK(says(refusal_of([&](auto body) {
                   body.initExperts().initCall().initPicks(1)[0].setWeight(inf);
               }),
               "ExpertCall.picks.weight"));
}

TEST_CASE("tensors that cannot be are refused before anything is taken for them") {
    using Fill = std::function<void(wire::Tensor::Builder)>;
    auto tensor = [](const Fill& fill) {
        return refusal_of([&](auto body) { fill(body.initTrunk().initStep().initHidden()); });
    };
    CHECK(says(tensor([](auto t) { t.initShape(5); }), "Step.hidden.shape has 5 elements"));
    CHECK(says(tensor([](auto t) {
                   t.setShape({std::uint64_t{1} << 40U, std::uint64_t{1} << 40U});
                   t.initPayload().setInline(1);
               }),
               "too large for 64 bits"));
    CHECK(says(tensor([](auto t) {
                   t.setShape({0, ~std::uint64_t{0}});
                   t.initPayload().setInline(1);
               }),
               "too large for 64 bits"));
    CHECK(says(tensor([](auto t) {
                   t.setShape({1, 2});
                   t.initPayload().setInline(0);
               }),
               "frame 0"));
    CHECK(says(tensor([](auto t) {
                   t.setShape({1, 2});
                   auto shm = t.initPayload().initShm();
                   shm.setSegment("/k3-1-a-1");
                   shm.setBytes(9);
               }),
               "9 bytes, but its shape needs 8"));
    CHECK(says(tensor([](auto t) {
                   t.setShape({1, 2});
                   auto shm = t.initPayload().initShm();
                   shm.setSegment(std::string(201, 'x').c_str());
                   shm.setBytes(8);
               }),
               "Step.hidden.segment has 201 bytes"));
}

TEST_CASE("an absent tensor is empty, and a tensor of no rows is not") {
    Result<msg::Envelope> absent =
        decode(build([](wire::Envelope::Builder root) { root.getBody().initTrunk().initStep(); }));
    REQUIRE(absent.has_value());
    CHECK(std::get<msg::Step>(absent->body).hidden.empty());
    msg::StepResult none;
    none.output = {msg::DType::f32, {0, 163840}, msg::InlinePayload{1}};
    Result<msg::Envelope> back = decode(msg::encode({0, 1, none}));
    REQUIRE(back.has_value());
    CHECK(std::get<msg::StepResult>(back->body) == none);
}

TEST_CASE("long error texts are cut between characters on the way out") {
    msg::Failure failure;
    failure.error.message = std::string(4095, 'x') + "\xE5\x8C\x97";
    failure.service = "trunk";
    Result<msg::Envelope> back = decode(msg::encode({0, 1, failure}));
    REQUIRE(back.has_value());
    CHECK(std::get<msg::Failure>(back->body).error.message == std::string(4095, 'x'));
}

TEST_CASE("a message over the size limit is replaced by an error that says so") {
    msg::Encoded large;
    large.ids.resize(msg::kMaxEnvelopeBytes / 4 + 1);
    Result<msg::Envelope> back = decode(msg::encode({3, 4, large}));
    REQUIRE(back.has_value());
    CHECK(back->call_id == 4);
    const auto& failure = std::get<msg::Failure>(back->body);
    CHECK(failure.error.code == ErrorCode::resource_exhausted);
    CHECK(failure.error.message.find("Encoded") != std::string::npos);
}

TEST_CASE("a list of elements without size cannot make its reader allocate") {
    // 2^28 structs of zero words take no bytes in the message; reading them is charged all the
    // same.
    const msg::Bytes bytes = build([](wire::Envelope::Builder root) {
        auto control = root.getBody().initControl();
        control.initHello();
    });
    msg::Bytes bomb = bytes;
    // The last word of this message is Hello's only pointer: null. Make it a list pointer of
    // composite elements, followed by a tag word that claims 2^28 elements of no size.
    const std::uint64_t list_pointer = 1U | (std::uint64_t{7} << 32U);
    const std::uint64_t tag = std::uint64_t{1} << 30U;
    std::memcpy(bomb.data() + bomb.size() - 8, &list_pointer, 8);
    bomb.resize(bomb.size() + 8);
    std::memcpy(bomb.data() + bomb.size() - 8, &tag, 8);
    std::uint32_t n_words = static_cast<std::uint32_t>(bomb.size() / 8 - 1);
    std::memcpy(bomb.data() + 4, &n_words, 4);
    CHECK_FALSE(decode(bomb).has_value());
}
