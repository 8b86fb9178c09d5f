# Gateway -> trunk stage: sessions, and steps of rows through a range of layers.
@0xe166e43d722c2f93;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("k3::wire");

using Types = import "types.capnp";

struct OpenSession {
  session @0 :UInt64;         # chosen by the caller, not 0; an open one is refused
  maxPositions @1 :UInt64;    # memory is reserved for so many positions
  saveAs @2 :Text;            # it will be saved under this name, and is refused at once if that
                              # cannot be; empty: it will not be saved
}

struct ForkSession {
  source @0 :UInt64;          # stays as it is
  target @1 :UInt64;          # becomes a copy of it
  maxPositions @2 :UInt64;
}

struct DropSession {
  session @0 :UInt64;         # unknown ones are fine: dropping twice is safe
}

struct SaveSession {
  # The state of the session becomes a file in the stage's session directory
  # (docs/formats/session.md). Answered with savedSession when the file is complete and on the disk;
  # until then requests that name the session are refused, except DropSession. A save that fails
  # leaves a file that was there before as it was, and the session too.
  session @0 :UInt64;
  name @1 :Text;              # 1 to 100 letters, digits, - _ and ., the first one not a dot
  ids @2 :List(UInt32);       # the token of every position of the session, in order
}

struct SavedSession {
  bytes @0 :UInt64;           # of this stage's file
}

struct LoadSession {
  # OpenSession, and the state of a file if that can go on: a session cannot be taken back to an
  # earlier position, so the state is used only if all ids of the file begin the prompt and the
  # prompt has at least one more. Otherwise the session is open and empty. Answered with
  # loadedSession.
  session @0 :UInt64;
  maxPositions @1 :UInt64;
  name @2 :Text;              # as in SaveSession
  ids @3 :List(UInt32);       # the prompt
  saveAs @4 :Text;            # as in OpenSession
}

struct LoadedSession {
  nIds @0 :UInt64;            # the file holds the state after so many ids
  nAgreed @1 :UInt64;         # so many of them, from the first on, are those of the prompt
  position @2 :UInt64;        # of the session: nIds, or 0 if it is empty
}

struct StepRow {
  session @0 :UInt64;
  position @1 :UInt64;        # must be the session's next position, else `stale`
  token @2 :UInt32;           # ignored when the step carries hidden rows
}

struct Step {
  # Rows of several sessions, prefill and decode mixed. Rows of one session stand in order of
  # position. A step that fails leaves every session it names unusable until dropped.
  rows @0 :List(StepRow);
  hidden @1 :Types.Tensor;    # absent in the first stage: [n_rows, in_vectors, hidden_size] f32,
                              # per row the attention-residual snapshots, oldest first, and last
                              # the prefix sum as the previous layer left it
  want @2 :List(UInt32);      # last stage: indices into rows whose logits are wanted, ascending
  replyShm @3 :Bool;          # the caller can read the stage's arena
}

struct StepResult {
  output @0 :Types.Tensor;    # last stage: [n_want, vocab_size] f32 logits;
                              # others: [n_rows, out_vectors, hidden_size] f32
  computeNs @1 :UInt64;       # time in this stage, waiting included
  expertWaitNs @2 :UInt64;    # of it: waiting for expert servers
}

struct TrunkMessage {
  union {
    openSession @0 :OpenSession;
    forkSession @1 :ForkSession;
    dropSession @2 :DropSession;
    step @3 :Step;
    stepResult @4 :StepResult;
    saveSession @5 :SaveSession;
    savedSession @6 :SavedSession;
    loadSession @7 :LoadSession;
    loadedSession @8 :LoadedSession;
  }
}
