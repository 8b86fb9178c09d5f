# Trunk -> expert server: run picked experts on latent rows. Calls are pure: repeating one is safe.
@0xd854d2c7be88a7bf;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("k3::wire");

using Types = import "types.capnp";

struct Pick {
  row @0 :UInt32;             # index into the call's rows
  expert @1 :UInt32;
  weight @2 :Float32;         # final router weight
  rank @3 :UInt32;            # place in the router's order, 0 = highest score: the cache policy
                              # needs it, and a server that sees only its share cannot derive it
}

struct ExpertCall {
  layer @0 :UInt32;           # zero-based
  rows @1 :Types.Tensor;      # [n_rows, latent_size] f32
  picks @2 :List(Pick);       # every (row, expert) at most once
  replyShm @3 :Bool;          # the caller can read the server's arena
  hint @4 :UInt64;            # number of the Prefetch that told of these picks; 0: none did
}

struct PartialSums {
  sums @0 :Types.Tensor;      # [n_rows, latent_size] i64: sum over picks of round(w * y * 2^40)
  computeNs @1 :UInt64;
  readNs @2 :UInt64;          # waiting for expert bytes
}

struct Prefetch {
  # A hint without a reply, sent as soon as the router has spoken: reads may start.
  layer @0 :UInt32;
  experts @1 :List(UInt32);   # most useful first
  ranks @2 :List(UInt32);     # best rank of each over the step's rows, same length
  number @3 :UInt64;          # of the sender's hints, counted from a random one, so that no two
                              # senders use the same; 0: none. The calls it is for repeat it: one
                              # that overtakes its hint, through a fast lane, makes that useless
}

struct ExpertsMessage {
  union {
    call @0 :ExpertCall;
    partialSums @1 :PartialSums;
    prefetch @2 :Prefetch;
  }
}
