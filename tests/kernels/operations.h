#pragma once
// The list of kernel operations with their shapes: it drives the equality test (every variant gives
// the scalar's bits, for any number of threads) and the benchmark (bench/kernels.cc). A new entry
// of KernelTable needs one entry here.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/kernels/kernel_table.h"

namespace k3::test {

/// What the three sizes mean is the operation's business, see `Operation::sizes`.
struct Shape {
    std::size_t a = 1;
    std::size_t b = 1;
    std::size_t c = 1;
    std::size_t skew = 0;  // elements (bytes for stored weights) by which buffers miss alignment
};

enum class Values {
    ordinary,
    extreme,  // zeros of both signs, subnormals, infinities, huge numbers; every bit pattern in
              // stored weights
};

/// One operation on its own buffers, ready to run again and again.
struct Call {
    double bytes = 0;                                      // read and written
    double flops = 0;                                      // 0 where a count says nothing
    std::function<void(const kernels::KernelTable&)> run;  // on kernels::threads() threads
    std::function<void()> reset;                           // inputs that run() changes
    std::function<std::vector<std::uint32_t>()> result;    // bits of all outputs
    std::function<bool()> guards_intact;                   // nothing written beside the buffers
};

struct Operation {
    std::string name;
    std::string sizes;  // e.g. "n_out x n_in, n_rows"
    std::function<Call(const Shape&, Values)> make;
    std::vector<Shape> test_shapes;   // small, odd and released sizes
    std::vector<Shape> bench_shapes;  // what the released model does per layer
};

std::vector<Operation> operations();

}  // namespace k3::test
