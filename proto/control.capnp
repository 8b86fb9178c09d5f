# Spoken by every service besides its own conversation: who are you, are you alive, how busy.
@0xadf277808eea9fbd;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("k3::wire");

using Types = import "types.capnp";

enum ServiceKind {
  unknown @0;
  gateway @1;
  tokenizer @2;
  trunk @3;
  experts @4;
  sampler @5;
}

enum State {
  loading @0;
  ready @1;
  stopping @2;
  failed @3;
}

struct Hello {
  # First message of a caller on a connection, and again whenever the peer's instance changed.
  probes @0 :List(Types.SegmentProbe);  # segments the caller will point into; at most 64
  laneKey @1 :UInt64;         # not 0: a fast lane is wanted, for ExpertCalls (docs/formats/lane.md);
                              # random, and the same whenever this connection says hello again
}

struct LaneOffer {
  # A fast lane of the server that is the caller's from now on; it need not be used.
  pid @0 :UInt32;             # its shared memory is /proc/<pid>/fd/<fd>; 0: no lane
  fd @1 :UInt32;
  nonce @2 :UInt64;           # at the head of that memory
  index @3 :UInt32;           # of the lane
  token @4 :UInt64;           # repeated in every message of the lane
  computeThreads @5 :UInt32;  # of the server: the caller spins only if there are cores for that too
  cores @6 :Text;             # on which the server may run: "0-7,16"; at most 200 bytes, empty: unknown
}

struct LayerRange {
  first @0 :UInt32;  # zero-based
  count @1 :UInt32;
}

struct TrunkFacts {
  layers @0 :LayerRange;
  totalLayers @1 :UInt32;
  hiddenSize @2 :UInt32;
  vocabSize @3 :UInt32;
  maxPositions @4 :UInt64;    # context limit of one session
  maxStepRows @5 :UInt32;     # more rows in a step are refused
  maxSessions @6 :UInt32;
  inVectors @7 :UInt32;       # vectors a row carries on entry (prefix + snapshots); 0: tokens
  outVectors @8 :UInt32;      # vectors a row carries on exit; 0: logits
  mlaBf16 @9 :Bool;           # MLA latents are kept in bf16, not fp32; all stages must agree
}

struct ExpertHolding {
  layer @0 :UInt32;           # zero-based
  experts @1 :Data;           # bit e of byte e/8 set: expert e is served
}

struct ExpertFacts {
  nExperts @0 :UInt32;
  latentSize @1 :UInt32;
  holdings @2 :List(ExpertHolding);
  maxCallRows @3 :UInt32;
  weight @4 :UInt32 = 1;      # among servers that hold the same expert: one of weight 2 is given twice
                              # as many; at least 1, at most 1,000,000
}

struct TokenizerFacts {
  vocabSize @0 :UInt32;
  nRanks @1 :UInt32;          # ids below are byte-pair tokens, the rest special slots
  stopIds @2 :List(UInt32);
}

struct SamplerFacts {
  maxRows @0 :UInt32;
}

struct GatewayFacts {
  modelName @0 :Text;
  maxPositions @1 :UInt64;
  vocabSize @2 :UInt32;
  maxRequests @3 :UInt32;
  mlaBf16 @4 :Bool;           # the trunk keeps MLA latents in bf16: the output is not that of fp32
}

struct Announcement {
  # Answer to Hello. Compatible peers have the same protocol version and the same fingerprint.
  kind @0 :ServiceKind;
  name @1 :Text;              # as the pipeline calls it: "experts-1"
  version @2 :Text;           # of the program: "0.1.0"
  instance @3 :UInt64;        # random at start: another number means the process was restarted
  state @4 :State;
  fingerprint @5 :Text;       # of the checkpoint, 32 hex digits; empty: serves no checkpoint
  arena @6 :Types.SegmentProbe;  # where its replies may lie; empty segment: it has no arena
  probes @7 :List(Bool);      # answers to Hello.probes, in order
  facts :union {
    none @8 :Void;
    gateway @9 :GatewayFacts;
    tokenizer @10 :TokenizerFacts;
    trunk @11 :TrunkFacts;
    experts @12 :ExpertFacts;
    sampler @13 :SamplerFacts;
  }
  lane @14 :LaneOffer;        # if Hello.laneKey asked for one, and the server reads probes[0]
  build @15 :Text;            # of the program, the same for the same binary; empty: it does not say.
                              # A server must not come back as another one in the middle of a run
}

struct Pong {
  # Answer to Ping, given by the connection thread: it comes even while the service computes.
  instance @0 :UInt64;
  state @1 :State;
  progressPermille @2 :UInt32;  # of loading
  detail @3 :Text;              # what is being loaded, or why it failed
  work @4 :UInt64;              # grows whenever the side that computes gets on: a request taken, a
                                # part of it done. 0: the service does not say
  waitsForReads @5 :Bool;       # that side waits for a disk, which has a deadline of its own
  waitingFor @6 :Text;          # ready, and yet nothing can be computed until these services are
                                # back; empty: nothing is missing
}

struct Counter {
  name @0 :Text;              # snake_case, unit last: "expert_cache_hits", "bytes_read_bytes"
  value @1 :UInt64;
}

struct Statistics {
  # Answer to GetStatistics.
  uptimeMs @0 :UInt64;
  residentBytes @1 :UInt64;
  queued @2 :UInt32;          # requests waiting in the service's queue
  counters @3 :List(Counter);
}

struct ControlMessage {
  union {
    hello @0 :Hello;
    announcement @1 :Announcement;
    ping @2 :Void;
    pong @3 :Pong;
    getStatistics @4 :Void;
    statistics @5 :Statistics;
    shutdown @6 :Void;        # stop cleanly; answered with done before the socket closes
    done @7 :Void;            # the answer of calls that return nothing
  }
}
