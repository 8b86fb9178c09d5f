# Client -> gateway: submit a prompt, receive tokens as they come, cancel.
@0xb2aa83a978489fc2;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("k3::wire");

using Types = import "types.capnp";
using Sampler = import "sampler.capnp";

enum WantLogits {
  none @0;
  generated @1;     # the logits each generated token was chosen from
  all @2;           # also those of every prompt position
}

struct Submit {
  input :union {
    text @0 :Data;            # UTF-8, at most 8 MiB
    ids @1 :List(UInt32);
    chatJson @2 :Data;        # tokenizer.capnp, RenderChat
  }
  recogniseSpecials @3 :Bool; # text only
  params @4 :Sampler.SamplingParams;
  maxTokens @5 :UInt32;       # 0: until a stop or the end of the context
  stopStrings @6 :List(Text); # at most 16; the text ends before the first of them
  stopIds @7 :List(UInt32);   # besides the model's own
  ignoreEos @8 :Bool;         # the model's own stop ids do not stop
  nLogprobs @9 :UInt32;
  wantLogits @10 :WantLogits; # for tests and comparison of stages
  skipSpecials @11 :Bool;     # leave special tokens out of the text
  loadSession @12 :Text;      # name of a saved session that the prompt continues; empty: none. With
                              # wantLogits all, positions that it holds have none
  saveSession @13 :Text;      # save the session under this name at the end; empty: do not
}

struct Accepted {
  request @0 :UInt64;         # handle for Cancel
  promptIds @1 :List(UInt32);
}

struct Progress {
  promptDone @0 :UInt32;      # prompt rows computed so far
  promptTotal @1 :UInt32;
}

struct TokenEvent {
  ids @0 :List(UInt32);       # usually one
  text @1 :Data;              # whole characters that became certain; may be empty
  logprobs @2 :List(Sampler.SampledRow);  # one per id when nLogprobs > 0
  logits @3 :Types.Tensor;    # [n, vocab_size] f32, always inline, as asked by wantLogits: events
                              # without ids carry the rows of the prompt, chunk after chunk in
                              # order of position, later events one row per id
}

enum FinishReason {
  stopId @0;
  stopString @1;
  maxTokens @2;
  contextFull @3;
  cancelled @4;
}

struct Finished {
  reason @0 :FinishReason;
  nPrompt @1 :UInt32;
  nGenerated @2 :UInt32;
  stopId @3 :UInt32;          # with reason stopId
  stopString @4 :Text;        # with reason stopString
  prefillNs @5 :UInt64;
  decodeNs @6 :UInt64;
}

struct SessionLoaded {
  # Comes after accepted when loadSession was given, before any row is computed. The result is the
  # same whether the saved state can be used or not, only the time differs.
  nIds @0 :UInt32;            # the saved session stands for so many ids
  nAgreed @1 :UInt32;         # so many of them, from the first on, are those of the prompt
  nReused @2 :UInt32;         # prompt ids that need not be computed: nIds, or 0 unless all agree
                              # and the prompt has at least one more
}

struct SessionSaved {
  # Comes before finished when saveSession was given, also when that failed: the text is not lost.
  # A request that is cancelled or fails saves nothing.
  nIds @0 :UInt32;            # the state after so many ids of prompt and answer; the last id of an
                              # answer has not been computed, so it is not among them
  bytes @1 :UInt64;           # of the files of all trunk stages
  error @2 :Types.Error;      # absent: it is saved
}

struct Cancel {
  request @0 :UInt64;         # unknown ones are fine: it may just have finished
}

struct GatewayMessage {
  # The replies to one Submit share its call id: accepted, sessionLoaded if asked for, progress and
  # tokens any number of times, sessionSaved if asked for, then finished or an Error, the last.
  union {
    submit @0 :Submit;
    accepted @1 :Accepted;
    progress @2 :Progress;
    tokens @3 :TokenEvent;
    finished @4 :Finished;
    cancel @5 :Cancel;
    sessionLoaded @6 :SessionLoaded;
    sessionSaved @7 :SessionSaved;
  }
}
