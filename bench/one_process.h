#pragma once
// The same steps without a pipeline: trunk and experts in this process, by function calls. What
// the real pipeline takes longer is the price of its processes.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "common/base/result.h"

namespace k3::bench {

/// Tokens that any vocabulary has.
std::vector<std::uint32_t> bench_prompt(std::size_t n);

class OneProcess {
  public:
    /// Loads the whole model. `n_threads` compute, first the trunk, then the experts.
    static Result<std::unique_ptr<OneProcess>> create(const std::filesystem::path& model,
                                                      std::uint64_t expert_cache_bytes,
                                                      int n_threads, std::size_t max_step_rows);
    ~OneProcess();
    OneProcess(const OneProcess&) = delete;
    OneProcess& operator=(const OneProcess&) = delete;

    /// Seconds of a prompt of `n_prompt` tokens in steps of max_step_rows and `n_tokens` - 1 steps
    /// of one token after it: the steps that the gateway asks for.
    Result<double> generate(std::size_t n_prompt, std::size_t n_tokens);

  private:
    struct Parts;
    explicit OneProcess(std::unique_ptr<Parts> parts);
    std::unique_ptr<Parts> parts_;
};

}  // namespace k3::bench
