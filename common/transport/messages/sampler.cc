// Codec of proto/sampler.capnp.

#include "common/transport/messages/sampler.h"

#include "common/transport/messages/codec.h"

namespace k3::msg::codec {

void write_params(wire::SamplingParams::Builder out, const SamplingParams& params) {
    out.setTemperature(params.temperature);
    out.setTopK(params.top_k);
    out.setTopP(params.top_p);
    out.setMinP(params.min_p);
    out.setRepetitionPenalty(params.repetition_penalty);
    out.setPresencePenalty(params.presence_penalty);
    out.setFrequencyPenalty(params.frequency_penalty);
    out.setSeed(params.seed);
}

SamplingParams read_params(wire::SamplingParams::Reader in, Checker& check) {
    SamplingParams params;
    params.temperature = check.finite(in.getTemperature(), "SamplingParams.temperature");
    params.top_k = in.getTopK();
    params.top_p = check.finite(in.getTopP(), "SamplingParams.topP");
    params.min_p = check.finite(in.getMinP(), "SamplingParams.minP");
    params.repetition_penalty =
        check.finite(in.getRepetitionPenalty(), "SamplingParams.repetitionPenalty");
    params.presence_penalty =
        check.finite(in.getPresencePenalty(), "SamplingParams.presencePenalty");
    params.frequency_penalty =
        check.finite(in.getFrequencyPenalty(), "SamplingParams.frequencyPenalty");
    params.seed = in.getSeed();
    return params;
}

void write_sampled_row(wire::SampledRow::Builder out, const SampledRow& row) {
    out.setId(row.id);
    out.setLogprob(row.logprob);
    auto top = out.initTop(static_cast<unsigned>(row.top.size()));
    for (unsigned i = 0; i < top.size(); ++i) {
        top[i].setId(row.top[i].id);
        top[i].setLogprob(row.top[i].logprob);
    }
    out.setIsStop(row.is_stop);
}

SampledRow read_sampled_row(wire::SampledRow::Reader in, Checker& check) {
    SampledRow row;
    row.id = in.getId();
    row.logprob = in.getLogprob();
    auto top = in.getTop();
    unsigned n = check.count(top, "SampledRow.top", kMaxLogprobs);
    for (unsigned i = 0; i < n; ++i) row.top.push_back({top[i].getId(), top[i].getLogprob()});
    row.is_stop = in.getIsStop();
    return row;
}

void write(BodyBuilder body, const Sample& message) {
    auto out = body.initSampler().initSample();
    write_tensor(out.initLogits(), message.logits);
    auto rows = out.initRows(static_cast<unsigned>(message.rows.size()));
    for (unsigned i = 0; i < rows.size(); ++i) {
        auto row = rows[i];
        const SampleRow& from = message.rows[i];
        write_params(row.initParams(), from.params);
        row.setStepIndex(from.step_index);
        row.setPromptIds(as_list(from.prompt_ids));
        row.setGeneratedIds(as_list(from.generated_ids));
        row.setNLogprobs(from.n_logprobs);
        row.setStopIds(as_list(from.stop_ids));
    }
}

void write(BodyBuilder body, const Sampled& message) {
    auto rows =
        body.initSampler().initSampled().initRows(static_cast<unsigned>(message.rows.size()));
    for (unsigned i = 0; i < rows.size(); ++i) write_sampled_row(rows[i], message.rows[i]);
}

namespace {

SampleRow read_sample_row(wire::SampleRow::Reader in, Checker& check) {
    SampleRow row;
    row.params = read_params(in.getParams(), check);
    row.step_index = in.getStepIndex();
    row.prompt_ids = check.numbers(in.getPromptIds(), "SampleRow.promptIds", kMaxIds);
    row.generated_ids = check.numbers(in.getGeneratedIds(), "SampleRow.generatedIds", kMaxIds);
    row.n_logprobs = in.getNLogprobs();
    if (row.n_logprobs > kMaxLogprobs)
        check.refuse(ErrorCode::invalid_argument,
                     "SampleRow.nLogprobs is " + std::to_string(row.n_logprobs) +
                         ", the limit is " + std::to_string(kMaxLogprobs),
                     "ask for fewer alternatives");
    row.stop_ids = check.numbers(in.getStopIds(), "SampleRow.stopIds", kMaxStopIds);
    return row;
}

}  // namespace

Body read(wire::SamplerMessage::Reader message, Checker& check) {
    switch (message.which()) {
        case wire::SamplerMessage::SAMPLE: {
            Sample out;
            out.logits = read_tensor(message.getSample().getLogits(), "Sample.logits", check);
            auto rows = message.getSample().getRows();
            unsigned n = check.count(rows, "Sample.rows", kMaxStepRows);
            for (unsigned i = 0; i < n; ++i) out.rows.push_back(read_sample_row(rows[i], check));
            return out;
        }
        case wire::SamplerMessage::SAMPLED: {
            Sampled out;
            auto rows = message.getSampled().getRows();
            unsigned n = check.count(rows, "Sampled.rows", kMaxStepRows);
            for (unsigned i = 0; i < n; ++i) out.rows.push_back(read_sampled_row(rows[i], check));
            return out;
        }
    }
    check.unknown("sampler message", message.which());
    return {};
}

}  // namespace k3::msg::codec
