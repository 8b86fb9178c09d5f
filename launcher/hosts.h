#pragma once
// The boxes of a pipeline as addresses: what stages bind and others connect to.

#include "common/base/result.h"
#include "launcher/pipeline_file.h"

namespace k3::launcher {

/// Makes spec->ssh.front() a path, and every address numeric: a host's without one is what ssh
/// would connect to (`ssh -G`), resolved here, because a box may call itself 127.0.1.1; ours
/// without one is that from which the first host is reached. Sends nothing to any box. A pipeline
/// without remote stages is left alone. Errors: invalid_argument (no ssh; a name that nothing
/// resolves: address of [hosts] says where), unavailable (no route).
Status resolve_addresses(PipelineSpec* spec);

}  // namespace k3::launcher
