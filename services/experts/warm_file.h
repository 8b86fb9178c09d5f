#pragma once
// Carries what the RAM cache kept over a restart.
//
// Read once at the start, when its experts begin to be read in the background; written every minute
// and at a clean end. Only a help: a file that is damaged or of another checkpoint is told and
// ignored, and replaced at the next save.

#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>

#include "services/experts/expert_cache.h"

namespace k3::experts {

class WarmFile {
  public:
    struct Options {
        std::filesystem::path path;
        std::string fingerprint;  // of the checkpoint
        std::string policy;
    };
    /// Borrows `cache`.
    WarmFile(const Options& options, ExpertCache& cache);
    /// Saves.
    ~WarmFile();
    WarmFile(const WarmFile&) = delete;
    WarmFile& operator=(const WarmFile&) = delete;

  private:
    void load();
    void save();
    void save_until_stopped();

    const Options options_;
    ExpertCache& cache_;
    bool trouble_ = false;  // the last save failed; told once
    std::mutex mutex_;
    std::condition_variable stop_wanted_;
    bool stopping_ = false;
    std::jthread saver_;
};

}  // namespace k3::experts
