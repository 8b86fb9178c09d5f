#include "tests/support/message_mutator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace k3::test {

namespace {

// Values at which length and pointer arithmetic goes wrong first.
constexpr std::array<std::uint64_t, 12> kTelling = {0,
                                                    1,
                                                    0x7F,
                                                    0x80,
                                                    0xFFFF,
                                                    0x7FFFFFFF,
                                                    0x80000000,
                                                    0xFFFFFFFF,
                                                    0x100000000,
                                                    0x7FFFFFFFFFFFFFFF,
                                                    0x8000000000000000,
                                                    0xFFFFFFFFFFFFFFFF};

void spoil(MessageMutator& random, msg::Tensor& tensor) {
    switch (random.below(6)) {
        case 0:
            tensor = {};
            return;
        case 1:
            tensor = {msg::DType::f32, {1, random.below(100000)}, msg::InlinePayload{1}};
            return;
        case 2:
            tensor = {msg::DType::i64, {random.below(9), 64}, msg::InlinePayload{7}};
            return;
        case 3:
            tensor = {msg::DType::f32, {2, 8}, msg::ShmPayload{"/k3-0-nobody-1", 8192, 64, 2}};
            return;
        case 4:
            tensor = {msg::DType::u32,
                      {1, 4},
                      msg::ShmPayload{"/../../etc/passwd", random.next(), 16, random.next()}};
            return;
        default:
            tensor = {msg::DType::f32, {std::uint64_t{1} << 30U, 1024}, msg::InlinePayload{1}};
            return;
    }
}

std::uint32_t odd_number(MessageMutator& random) {
    constexpr std::array<std::uint32_t, 6> kNumbers = {0,       1,          65535,
                                                       1 << 20, 0x7FFFFFFF, 0xFFFFFFFF};
    return random.below(4) == 0 ? static_cast<std::uint32_t>(random.next())
                                : kNumbers[random.below(kNumbers.size())];
}

void spoil_ids(MessageMutator& random, std::vector<std::uint32_t>& ids) {
    ids.resize(random.below(9));
    for (std::uint32_t& id : ids) id = odd_number(random);
}

// One overload per request that carries numbers; everything else stays as it is.
template <typename T>
void spoil(MessageMutator&, T&) {}

void spoil(MessageMutator& random, msg::Decode& message) { spoil_ids(random, message.ids); }

void spoil(MessageMutator& random, msg::Encode& message) {
    message.text.clear();
    for (std::uint64_t n = random.below(200); n > 0; --n)
        message.text += static_cast<char>(random.next());
}

void spoil(MessageMutator& random, msg::RenderChat& message) {
    if (message.json.empty()) return;
    message.json[random.below(message.json.size())] = static_cast<char>(random.next());
    message.json.resize(random.below(message.json.size() + 1));
}

void spoil(MessageMutator& random, msg::OpenSession& message) {
    message.session = random.below(3) == 0 ? 0 : random.next();
    message.max_positions = kTelling[random.below(kTelling.size())];
}

void spoil(MessageMutator& random, msg::ForkSession& message) {
    message.source = random.next();
    message.target = random.below(2) == 0 ? message.source : random.next();
    message.max_positions = kTelling[random.below(kTelling.size())];
}

/// Names that would leave the directory of saved sessions, if they were paths.
std::string odd_name(MessageMutator& random) {
    const std::array<std::string, 6> kNames = {
        "", "..", "../../etc/passwd", "/tmp", std::string(150, 'n'), std::string(1, '\0')};
    return kNames[random.below(kNames.size())];
}

void spoil(MessageMutator& random, msg::SaveSession& message) {
    message.session = random.below(4);
    message.name = odd_name(random);
    spoil_ids(random, message.ids);
}

void spoil(MessageMutator& random, msg::LoadSession& message) {
    message.session = random.below(3) == 0 ? 0 : random.next();
    message.max_positions = kTelling[random.below(kTelling.size())];
    message.name = odd_name(random);
    spoil_ids(random, message.ids);
}

void spoil(MessageMutator& random, msg::Step& message) {
    message.rows.resize(random.below(5));
    for (msg::StepRow& row : message.rows)
        row = {random.below(4), kTelling[random.below(kTelling.size())], odd_number(random)};
    spoil_ids(random, message.want);
    if (random.below(2) == 0) spoil(random, message.hidden);
}

void spoil(MessageMutator& random, msg::ExpertCall& message) {
    message.layer = odd_number(random);
    message.picks.resize(random.below(6));
    for (msg::Pick& pick : message.picks)
        pick = {odd_number(random), odd_number(random), 0.5F, odd_number(random)};
    message.hint = random.below(3);
    if (random.below(2) == 0) spoil(random, message.rows);
}

void spoil(MessageMutator& random, msg::Prefetch& message) {
    message.layer = odd_number(random);
    spoil_ids(random, message.experts);
    message.ranks.assign(message.experts.size(), odd_number(random));
    message.number = random.below(3);
}

void spoil(MessageMutator& random, msg::Sample& message) {
    message.rows.resize(random.below(4));
    for (msg::SampleRow& row : message.rows) {
        row.params.temperature = random.below(2) == 0 ? -1.0F : 1e30F;
        row.params.top_p = random.below(2) == 0 ? -3.0F : 0.0F;
        row.params.top_k = odd_number(random);
        row.params.repetition_penalty = 0.0F;
        spoil_ids(random, row.prompt_ids);
        spoil_ids(random, row.generated_ids);
        spoil_ids(random, row.stop_ids);
    }
    if (random.below(2) == 0) spoil(random, message.logits);
}

void spoil(MessageMutator& random, msg::Submit& message) {
    msg::IdsInput ids;
    spoil_ids(random, ids.ids);
    if (random.below(2) == 0) message.input = std::move(ids);
    message.params.temperature = random.below(2) == 0 ? -1.0F : 0.0F;
    message.params.top_p = 7.0F;
    spoil_ids(random, message.stop_ids);
    message.max_tokens = odd_number(random);
    if (random.below(2) == 0) message.stop_strings = {""};
}

void spoil(MessageMutator& random, msg::Cancel& message) { message.request = random.next(); }

}  // namespace

std::uint64_t MessageMutator::next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31U);
}

msg::Bytes MessageMutator::damage(msg::Bytes frame) {
    const std::size_t n_words = frame.size() / 8;
    switch (below(8)) {
        case 0:
        case 1:
            for (std::uint64_t n = 1 + below(8); n > 0; --n)
                frame[below(frame.size())] ^= static_cast<std::byte>(1U << below(8));
            return frame;
        case 2:
        case 3: {
            const std::uint64_t value = kTelling[below(kTelling.size())];
            const std::size_t width = std::size_t{1} << below(4);
            std::memcpy(frame.data() + below(frame.size() / width) * width, &value, width);
            return frame;
        }
        case 4:
            frame.resize(below(2) == 0 ? below(frame.size()) : below(n_words) * 8);
            return frame;
        case 5:
            frame.resize(frame.size() + 8 * below(9), static_cast<std::byte>(next()));
            return frame;
        case 6: {
            std::array<std::byte, 8> kept{};
            std::byte* a = frame.data() + 8 * below(n_words);
            std::byte* b = frame.data() + 8 * below(n_words);
            std::memcpy(kept.data(), a, 8);
            std::memmove(a, b, 8);
            std::memcpy(b, kept.data(), 8);
            return frame;
        }
        default:
            if (below(2) == 0 && frame.size() > 18) {
                frame[16] = static_cast<std::byte>(next());  // the version of the envelope
                return frame;
            }
            frame.resize(below(400));
            for (std::byte& b : frame) b = static_cast<std::byte>(next());
            return frame;
    }
}

msg::Envelope MessageMutator::out_of_range(msg::Envelope envelope) {
    std::visit([this](auto& body) { spoil(*this, body); }, envelope.body);
    return envelope;
}

}  // namespace k3::test
