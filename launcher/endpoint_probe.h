#pragma once
// Whether somebody listens at an endpoint already, before a stage of ours is started there.

#include <string>

namespace k3::launcher {

/// True if a connection is accepted at `ipc:///path` or `tcp://NUMERIC-ADDRESS:port`. The socket
/// file of a dead process accepts none. Without this a stage that finds its place taken would look
/// ready for a moment, because the owner of the place answers in its name.
bool somebody_listens(const std::string& endpoint);

}  // namespace k3::launcher
