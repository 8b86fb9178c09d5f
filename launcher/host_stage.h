#pragma once
// `k3pipe host-stage`: one stage on this box, for a launcher on another (host_protocol.h).
//
// Started by ssh or srun with the launcher's line as standard input. It is to its service what a
// launcher is: gives it a lifeline, a run directory's lock and a janitor, so that nothing stays
// here however service, launcher, link or this process end.

namespace k3::launcher {

/// Returns the exit status that tells the launcher how the service ended.
int host_stage();

}  // namespace k3::launcher
