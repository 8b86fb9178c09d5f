# Gateway -> tokenizer: text and chat messages to ids and back. Every call is pure.
@0xd57e540118804dbe;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("k3::wire");

struct Encode {
  text @0 :Data;              # at most 8 MiB
  recogniseSpecials @1 :Bool; # text that spells a special token becomes that token
  keepInvalidBytes @2 :Bool;  # false: bytes that are not UTF-8 are refused, naming the offset
}

struct Encoded {
  ids @0 :List(UInt32);
}

struct RenderChat {
  json @0 :Data;              # object: messages, tools, tool_choice, thinking_effort,
                              # response_format, add_generation_prompt (docs/chat.md)
}

struct RenderedChat {
  ids @0 :List(UInt32);
  channel @1 :Text;           # the channel the generation prompt opened: "think", "response" or ""
}

struct Decode {
  ids @0 :List(UInt32);
  pending @1 :Data;           # bytes held back by the previous call of this stream
  final @2 :Bool;             # no more ids follow: held bytes come out as U+FFFD
  skipSpecials @3 :Bool;      # leave out special tokens marked "special" by the vocabulary
}

struct Decoded {
  text @0 :Data;              # whole UTF-8 characters only
  pending @1 :Data;           # incomplete tail, at most 3 bytes: hand it to the next call
}

struct TokenizerMessage {
  union {
    encode @0 :Encode;
    encoded @1 :Encoded;
    renderChat @2 :RenderChat;
    renderedChat @3 :RenderedChat;
    decode @4 :Decode;
    decoded @5 :Decoded;
  }
}
