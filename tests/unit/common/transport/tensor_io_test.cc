#include "common/transport/tensor_io.h"

#include <doctest/doctest.h>

#include <array>

using namespace k3;
using namespace k3::transport;

namespace {

const std::vector<std::uint64_t> kShape = {3, 5};

std::vector<float> values() {
    std::vector<float> out(15);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = 0.5F * static_cast<float>(i) - 2.0F;
    return out;
}

std::unique_ptr<Arena> make_arena(const std::string& what) {
    Result<std::unique_ptr<Arena>> arena = Arena::create({segment_name(0x7E57, what), 4096, 2});
    REQUIRE(arena.has_value());
    return std::move(arena).value();
}

Error refusal(const msg::Tensor& tensor, std::span<const std::uint64_t> shape,
              std::vector<msg::Bytes> frames, msg::DType dtype = msg::DType::f32) {
    ArenaReader reader;
    Result<msg::Bytes> bytes = take_tensor(tensor, "Step.hidden", dtype, shape, frames, reader);
    REQUIRE_FALSE(bytes.has_value());
    CHECK(bytes.error().message.starts_with("Step.hidden"));
    return bytes.error();
}

}  // namespace

TEST_CASE("inline and shared memory carry the same bytes") {
    auto arena = make_arena("same");
    const std::vector<float> data = values();
    ArenaReader reader;
    std::array<msg::Bytes, 3> taken;
    int i = 0;
    for (bool use_shm : {true, false, true}) {
        std::vector<msg::Bytes> frames;
        Arena* target = i == 2 ? nullptr : arena.get();
        msg::Tensor tensor = put_tensor(msg::DType::f32, kShape, std::as_bytes(std::span(data)),
                                        target, use_shm, frames);
        const bool in_arena = std::holds_alternative<msg::ShmPayload>(tensor.payload);
        CHECK(in_arena == (i == 0));
        CHECK(frames.size() == (in_arena ? 0 : 1));
        auto bytes = take_tensor(tensor, "hidden", msg::DType::f32, kShape, frames, reader);
        REQUIRE(bytes.has_value());
        taken[i++] = *bytes;
    }
    CHECK(taken[0] == taken[1]);
    CHECK(taken[0] == taken[2]);
    std::span<const float> view = view_as<float>(taken[0]);
    CHECK(std::vector<float>(view.begin(), view.end()) == data);
}

TEST_CASE("a tensor that fits no slot goes inline by itself") {
    auto arena = make_arena("inline");
    std::vector<msg::Bytes> frames;
    const std::vector<float> data(2000);
    msg::Tensor tensor = put_tensor(msg::DType::f32, {2000}, std::as_bytes(std::span(data)),
                                    arena.get(), true, frames);
    CHECK(std::get<msg::InlinePayload>(tensor.payload).frame == 1);
    CHECK(frames.size() == 1);
}

TEST_CASE("two inline tensors take two frames") {
    std::vector<msg::Bytes> frames;
    const std::vector<float> data = values();
    put_tensor(msg::DType::f32, kShape, std::as_bytes(std::span(data)), nullptr, false, frames);
    msg::Tensor second = put_tensor(msg::DType::f32, {0, 5}, {}, nullptr, false, frames);
    CHECK(std::get<msg::InlinePayload>(second.payload).frame == 2);
    ArenaReader reader;
    const std::array<std::uint64_t, 2> any = {0, 5};
    auto bytes = take_tensor(second, "rows", msg::DType::f32, any, frames, reader);
    REQUIRE(bytes.has_value());
    CHECK(bytes->empty());
}

TEST_CASE("a zero in the expected shape matches any length") {
    std::vector<msg::Bytes> frames;
    const std::vector<float> data = values();
    msg::Tensor tensor =
        put_tensor(msg::DType::f32, kShape, std::as_bytes(std::span(data)), nullptr, false, frames);
    ArenaReader reader;
    const std::array<std::uint64_t, 2> any = {0, 5};
    CHECK(take_tensor(tensor, "rows", msg::DType::f32, any, frames, reader).has_value());
}

TEST_CASE("what does not fit is refused with both sides named") {
    std::vector<msg::Bytes> frames;
    const std::vector<float> data = values();
    const msg::Tensor good =
        put_tensor(msg::DType::f32, kShape, std::as_bytes(std::span(data)), nullptr, false, frames);
    SUBCASE("missing") {
        CHECK(refusal({}, kShape, frames).message.find("missing") != std::string::npos);
    }
    SUBCASE("data type") {
        Error error = refusal(good, kShape, frames, msg::DType::i64);
        CHECK(error.message.find("f32") != std::string::npos);
        CHECK(error.message.find("i64") != std::string::npos);
    }
    SUBCASE("shape") {
        const std::array<std::uint64_t, 2> other = {0, 7};
        Error error = refusal(good, other, frames);
        CHECK(error.message.find("[3, 5]") != std::string::npos);
        CHECK(error.message.find("[any, 7]") != std::string::npos);
        const std::array<std::uint64_t, 1> flat = {15};
        CHECK(refusal(good, flat, frames).code == ErrorCode::invalid_argument);
    }
    SUBCASE("frame that is not there") {
        msg::Tensor bad = good;
        bad.payload = msg::InlinePayload{2};
        CHECK(refusal(bad, kShape, frames).message.find("frame 2") != std::string::npos);
        bad.payload = msg::InlinePayload{0};
        CHECK(refusal(bad, kShape, frames).code == ErrorCode::invalid_argument);
        CHECK(refusal(good, kShape, {}).code == ErrorCode::invalid_argument);
    }
    SUBCASE("frame of another size") {
        frames[0].pop_back();
        Error error = refusal(good, kShape, frames);
        CHECK(error.message.find("59") != std::string::npos);
        CHECK(error.message.find("60") != std::string::npos);
    }
    SUBCASE("shape over 64 bits") {
        msg::Tensor bad = good;
        bad.shape = {std::uint64_t{1} << 62U, 5};
        const std::array<std::uint64_t, 2> any = {0, 5};
        CHECK(refusal(bad, any, frames).message.find("64 bits") != std::string::npos);
    }
}

TEST_CASE("a stale slot is told with the tensor's name") {
    auto arena = make_arena("stale");
    std::vector<msg::Bytes> frames;
    const std::vector<float> data = values();
    msg::Tensor tensor = put_tensor(msg::DType::f32, kShape, std::as_bytes(std::span(data)),
                                    arena.get(), true, frames);
    for (int i = 0; i < 2; ++i) REQUIRE(arena->write(std::as_bytes(std::span(data))).has_value());
    CHECK(refusal(tensor, kShape, frames).code == ErrorCode::stale);
}
