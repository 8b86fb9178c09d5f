# The first frame of every message, whoever speaks to whom.
@0x9d5d47e04487f5e5;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("k3::wire");

using Types = import "types.capnp";
using Control = import "control.capnp";
using Tokenizer = import "tokenizer.capnp";
using Trunk = import "trunk.capnp";
using Experts = import "experts.capnp";
using Sampler = import "sampler.capnp";
using Gateway = import "gateway.capnp";

struct Envelope {
  version @0 :UInt16;         # protocol version of the sender (README.md); others are refused
  runId @1 :UInt64;           # of the pipeline run; 0: the sender belongs to none
  callId @2 :UInt64;          # chosen by the caller, repeated in replies; 0: no reply wanted
  body :union {
    error @3 :Types.Error;
    control @4 :Control.ControlMessage;
    tokenizer @5 :Tokenizer.TokenizerMessage;
    trunk @6 :Trunk.TrunkMessage;
    experts @7 :Experts.ExpertsMessage;
    sampler @8 :Sampler.SamplerMessage;
    gateway @9 :Gateway.GatewayMessage;
  }
}
