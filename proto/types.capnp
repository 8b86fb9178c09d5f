# Words that every conversation uses: errors, tensors, and where a tensor's bytes lie.
@0xdb7bf8159a6c04d7;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("k3::wire");

struct Error {
  # A reply instead of a result. `common/base/error.h` is the same thing in C++.
  code @0 :UInt8;       # ErrorCode; an unknown number is read as internal
  message @1 :Text;     # one sentence with names and numbers, at most 4 KiB
  remedy @2 :Text;      # what to do next; empty: nothing to do
  service @3 :Text;     # which service first said it ("experts-1"); empty: the one that replies
}

enum DType {
  f32 @0;
  i64 @1;
  u32 @2;
}

struct Payload {
  # Where the bytes of one tensor lie. Both places hold the same little-endian bytes, and every
  # stage works with either: that is what makes a stage swappable.
  union {
    inline @0 :UInt32;       # index of the multipart frame that is the bytes; 0 is the message itself
    shm :group {             # a slot of a shared-memory arena on this box (docs/formats/arena.md)
      segment @1 :Text;      # name for shm_open, at most 200 bytes
      offset @2 :UInt64;     # of the slot's data in the segment, bytes
      bytes @3 :UInt64;      # used bytes of the slot
      generation @4 :UInt64; # the slot's generation when it was written; another one is `stale`
    }
  }
}

struct Tensor {
  dtype @0 :DType;
  shape @1 :List(UInt64);  # slowest first, at most 4 dimensions; product x dtype size = bytes
  payload @2 :Payload;
}

struct SegmentProbe {
  # "Can you open this segment and read this nonce at its head?" Shared memory is used between two
  # processes only after the reader has said yes.
  segment @0 :Text;
  nonce @1 :UInt64;
}
