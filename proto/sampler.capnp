# Gateway -> sampler: a token from logits. Every call is pure: the request carries the history.
@0xa97aea3c9ed6c08b;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("k3::wire");

using Types = import "types.capnp";

struct SamplingParams {
  temperature @0 :Float32 = 1.0;  # 0: the largest logit, ties to the lowest id
  topK @1 :UInt32;                # 0: off
  topP @2 :Float32 = 1.0;         # 1: off
  minP @3 :Float32;               # 0: off; share of the largest probability
  repetitionPenalty @4 :Float32 = 1.0;  # divides positive, multiplies negative logits of seen ids
  presencePenalty @5 :Float32;    # subtracted once for each id already generated
  frequencyPenalty @6 :Float32;   # subtracted for each time an id was generated
  seed @7 :UInt64;                # of the request's random stream
}

struct SampleRow {
  params @0 :SamplingParams;
  stepIndex @1 :UInt64;           # how many tokens the request has generated: the stream's counter
  promptIds @2 :List(UInt32);     # only needed (and sent) when repetitionPenalty is not 1
  generatedIds @3 :List(UInt32);  # only needed when any penalty is on
  nLogprobs @4 :UInt32;           # how many alternatives to return, at most 20
  stopIds @5 :List(UInt32);
}

struct Sample {
  logits @0 :Types.Tensor;        # [n_rows, vocab_size] f32
  rows @1 :List(SampleRow);
}

struct TokenLogprob {
  id @0 :UInt32;
  logprob @1 :Float32;            # of the raw distribution: before temperature, filters, penalties
}

struct SampledRow {
  id @0 :UInt32;
  logprob @1 :Float32;
  top @2 :List(TokenLogprob);     # largest first
  isStop @3 :Bool;                # id is one of the row's stopIds
}

struct Sampled {
  rows @0 :List(SampledRow);
}

struct SamplerMessage {
  union {
    sample @0 :Sample;
    sampled @1 :Sampled;
  }
}
