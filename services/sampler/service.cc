#include "services/sampler/service.h"

#include <fmt/format.h>

#include <array>
#include <chrono>

#include "common/base/log.h"
#include "common/transport/tensor_io.h"

namespace k3::sampler {

Service::Service(std::uint32_t max_rows)
    : max_rows_(max_rows),
      calls_(counters_.add("calls")),
      refused_calls_(counters_.add("refused_calls")),
      tokens_(counters_.add("tokens")),
      compute_ns_(counters_.add("compute_ns")) {}

void Service::handle(transport::Request request) {
    const auto* call = std::get_if<msg::Sample>(&request.envelope.body);
    if (call == nullptr) {
        ++refused_calls_;
        request.responder.send_error(
            {ErrorCode::unsupported,
             fmt::format("the sampler does not answer {}", msg::name_of(request.envelope.body)),
             "send it Sample; check which endpoint belongs to which service"});
        return;
    }
    const auto started = Clock::now();
    Result<msg::Sampled> sampled = sample(*call, request.frames);
    compute_ns_ += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started).count());
    ++calls_;
    if (!sampled.has_value()) {
        ++refused_calls_;
        log::debug("refused " + sampled.error().message);
        request.responder.send_error(sampled.error());
        return;
    }
    tokens_ += sampled->rows.size();
    request.responder.send(std::move(*sampled));
}

Result<msg::Sampled> Service::sample(const msg::Sample& call, std::vector<msg::Bytes>& frames) {
    const std::size_t n_rows = call.rows.size();
    if (n_rows == 0 || n_rows > max_rows_)
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("Sample has {} rows, the sampler takes 1 to {}", n_rows, max_rows_),
            "split the call, or start the sampler with a larger --max-rows"};
    if (call.logits.shape.size() != 2 || call.logits.shape[0] != n_rows ||
        call.logits.shape[1] == 0)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("Sample has {} rows, but logits of shape [{}]", n_rows,
                                 fmt::join(call.logits.shape, ", ")),
                     "send logits of shape [rows, vocabulary size]"};
    const std::uint64_t vocab_size = call.logits.shape[1];
    for (std::size_t row = 0; row < n_rows; ++row)
        RETURN_IF_ERROR(check_row(call.rows[row], row, vocab_size));

    const std::array<std::uint64_t, 2> shape{n_rows, vocab_size};
    ASSIGN_OR_RETURN(
        const msg::Bytes bytes,
        transport::take_tensor(call.logits, "logits", msg::DType::f32, shape, frames, reader_));
    const std::span<const float> logits = transport::view_as<float>(bytes);
    msg::Sampled out;
    out.rows.reserve(n_rows);
    for (std::size_t row = 0; row < n_rows; ++row) {
        ASSIGN_OR_RETURN(msg::SampledRow sampled,
                         sample_row(logits.subspan(row * vocab_size, vocab_size), call.rows[row],
                                    row, workspace_));
        out.rows.push_back(std::move(sampled));
    }
    return out;
}

}  // namespace k3::sampler
