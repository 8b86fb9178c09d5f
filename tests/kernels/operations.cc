#include "tests/kernels/operations.h"

#include <memory>
#include <type_traits>
#include <utility>

#include "common/kernels/parallel.h"
#include "tests/kernels/buffers.h"

namespace k3::test {

namespace {

using kernels::KernelTable;
using kernels::Matrix;
using kernels::WeightType;

/// A weight matrix and its storage.
struct Weights {
    Buffer<std::uint8_t> data;
    Buffer<std::uint8_t> scales;
    Matrix matrix;
};

Weights random_weights(WeightType type, std::size_t n_out, std::size_t n_in, std::size_t skew,
                       Values values, Random& random) {
    const std::size_t bits = type == WeightType::f32 ? 32 : type == WeightType::bf16 ? 16 : 4;
    const std::size_t n_scales = type == WeightType::mxfp4 ? n_out * n_in / 32 : 0;
    Weights w{{n_out * n_in * bits / 8, skew}, {n_scales, skew}, {}};
    const bool ordinary = values == Values::ordinary;
    if (type == WeightType::f32) {
        for (std::size_t i = 0; i < n_out * n_in; ++i) {
            const auto word = std::bit_cast<std::uint32_t>(random.value(values));
            for (std::size_t b = 0; b < 4; ++b)
                w.data[i * 4 + b] = static_cast<std::uint8_t>(word >> (8 * b));
        }
    } else {
        // Eight bytes at a time. Ordinary bf16: sign and mantissa at random, magnitude in [0.5, 2).
        const bool bound = ordinary && type == WeightType::bf16;
        const std::size_t n = w.data.size();
        for (std::size_t i = 0; i < n; i += 8) {
            std::uint64_t word = random.next();
            if (bound) word = (word & 0x80FF80FF80FF80FFU) | 0x3F003F003F003F00U;
            for (std::size_t b = 0; b < std::min<std::size_t>(8, n - i); ++b)
                w.data[i + b] = static_cast<std::uint8_t>(word >> (8 * b));
        }
    }
    for (std::uint8_t& scale : w.scales.all())
        scale = static_cast<std::uint8_t>(ordinary ? 117 + random.below(14) : random.below(256));
    w.matrix = {type, w.data.data(), n_scales > 0 ? w.scales.data() : nullptr, n_out, n_in};
    return w;
}

/// A call whose only outputs are `y` (floats) and whose inputs never change.
template <typename State>
Call pure_call(std::shared_ptr<State> state, double bytes, double flops,
               void (*run)(State&, const KernelTable&)) {
    Call call;
    call.bytes = bytes;
    call.flops = flops;
    call.run = [state, run](const KernelTable& table) { run(*state, table); };
    call.reset = [state] { std::fill(state->y.all().begin(), state->y.all().end(), -77.0F); };
    call.result = [state] {
        std::vector<std::uint32_t> bits;
        append_bits(state->y.all(), bits);
        return bits;
    };
    call.guards_intact = [state] { return state->y.guards_intact(); };
    call.reset();
    return call;
}

// ---- products with matrices: a = n_out, b = n_in, c = n_rows ----

constexpr std::size_t kStrideGap = 3;  // rows of x and y lie a little apart

Call make_matmul(WeightType type, const Shape& shape, Values values) {
    struct State {
        Weights w;
        Buffer<float> x;
        Buffer<float> y;
        std::size_t n_rows;
    };
    Random random(shape.a * 1000003 + shape.b * 1009 + shape.c);
    const auto [n_out, n_in, n_rows, skew] = shape;
    auto state = std::make_shared<State>(
        State{random_weights(type, n_out, n_in, skew, values, random),
              random_floats(n_rows * (n_in + kStrideGap), skew, values, random),
              Buffer<float>(n_rows * (n_out + kStrideGap), skew), n_rows});
    const double products = static_cast<double>(n_out) * static_cast<double>(n_in);
    const double bytes = static_cast<double>(state->w.data.size() + state->w.scales.size());
    return pure_call<State>(state, bytes, 2 * products * static_cast<double>(n_rows),
                            [](State& s, const KernelTable& table) {
                                kernels::matmul(table, s.w.matrix, s.x.data(),
                                                s.w.matrix.n_in + kStrideGap, s.n_rows, s.y.data(),
                                                s.w.matrix.n_out + kStrideGap);
                            });
}

/// c matrices of the same shape, one per head.
Call make_transposed(WeightType type, const Shape& shape, Values values) {
    struct State {
        Weights w;
        Buffer<float> x;
        Buffer<float> y;
        std::size_t heads;
    };
    Random random(shape.a * 1000003 + shape.b * 1009 + shape.c);
    const auto [n_out, n_in, heads, skew] = shape;
    auto state = std::make_shared<State>(
        State{random_weights(type, heads * n_out, n_in, skew, values, random),
              random_floats(heads * n_out, skew, values, random), Buffer<float>(heads * n_in, skew),
              heads});
    const double products = static_cast<double>(heads * n_out * n_in);
    const double bytes = static_cast<double>(state->w.data.size());
    return pure_call<State>(state, bytes, 2 * products, [](State& s, const KernelTable& table) {
        kernels::parallel_for(s.heads, [&](std::size_t head) {
            const std::size_t rows = s.w.matrix.n_out / s.heads;
            table.matvec_transposed(s.w.matrix.rows(head * rows, rows), s.x.data() + head * rows,
                                    s.y.data() + head * s.w.matrix.n_in);
        });
    });
}

// ---- element-wise operations and norms: a = n ----

struct VectorState {
    Buffer<float> x;
    Buffer<float> second;
    Buffer<float> y;
    std::size_t n;
};

/// `vectors`: how many vectors of n floats the operation reads and writes.
Call make_vector(const Shape& shape, Values values, double vectors, std::size_t n_results,
                 void (*run)(VectorState&, const KernelTable&)) {
    Random random(shape.a);
    const std::size_t n = shape.a;
    auto state = std::make_shared<VectorState>(VectorState{
        random_floats(n, shape.skew, values, random), random_floats(n, shape.skew, values, random),
        Buffer<float>(n_results == 0 ? n : n_results, shape.skew), n});
    return pure_call(state, vectors * 4 * static_cast<double>(n), 0, run);
}

/// y += x, and the fixed-point sums: outputs that are inputs as well.
Call make_add(const Shape& shape, Values values) {
    Call call = make_vector(shape, values, 3, 0, [](VectorState& s, const KernelTable& table) {
        table.add(s.x.data(), s.n, s.y.data());
    });
    return call;
}

Call make_accumulate(const Shape& shape, Values values) {
    struct State {
        Buffer<float> x;
        Buffer<std::int64_t> sums;
        std::size_t stopped_at = 0;
    };
    Random random(shape.a);
    auto state = std::make_shared<State>(State{random_floats(shape.a, shape.skew, values, random),
                                               Buffer<std::int64_t>(shape.a, shape.skew)});
    Call call;
    call.bytes = 20 * static_cast<double>(shape.a);
    call.run = [state](const KernelTable& table) {
        state->stopped_at =
            table.accumulate_fixed(state->x.data(), state->x.size(), 0.37F, state->sums.data());
    };
    call.reset = [state] { std::fill(state->sums.all().begin(), state->sums.all().end(), 12345); };
    call.result = [state] {
        std::vector<std::uint32_t> bits{static_cast<std::uint32_t>(state->stopped_at)};
        for (std::int64_t sum : state->sums.all()) {
            bits.push_back(static_cast<std::uint32_t>(sum));
            bits.push_back(static_cast<std::uint32_t>(static_cast<std::uint64_t>(sum) >> 32U));
        }
        return bits;
    };
    call.guards_intact = [state] { return state->sums.guards_intact(); };
    call.reset();
    return call;
}

Call make_fixed_to_float(const Shape& shape, Values values) {
    struct State {
        Buffer<std::int64_t> sums;
        Buffer<float> y;
    };
    Random random(shape.a);
    auto state = std::make_shared<State>(
        State{Buffer<std::int64_t>(shape.a, shape.skew), Buffer<float>(shape.a, shape.skew)});
    for (std::int64_t& sum : state->sums.all()) {
        const std::size_t shift = values == Values::ordinary ? 20 : random.below(63);
        sum = static_cast<std::int64_t>(random.next()) >> shift;
    }
    return pure_call<State>(state, 12 * static_cast<double>(shape.a), 0,
                            [](State& s, const KernelTable& table) {
                                table.fixed_to_float(s.sums.data(), s.sums.size(), s.y.data());
                            });
}

Call make_round_to_bf16(const Shape& shape, Values values) {
    struct State {
        Buffer<float> x;
        Buffer<std::uint16_t> y;
    };
    Random random(shape.a);
    auto state = std::make_shared<State>(State{random_floats(shape.a, shape.skew, values, random),
                                               Buffer<std::uint16_t>(shape.a, shape.skew)});
    Call call;
    call.bytes = 6 * static_cast<double>(shape.a);
    call.run = [state](const KernelTable& table) {
        table.round_to_bf16(state->x.data(), state->x.size(), state->y.data());
    };
    call.reset = [state] { std::fill(state->y.all().begin(), state->y.all().end(), 0xABCD); };
    call.result = [state] {
        return std::vector<std::uint32_t>(state->y.all().begin(), state->y.all().end());
    };
    call.guards_intact = [state] { return state->y.guards_intact(); };
    call.reset();
    return call;
}

/// a = channels, b = kernel.
Call make_short_conv(const Shape& shape, Values values) {
    struct State {
        Buffer<float> taps;
        Buffer<float> x;
        Buffer<float> first_history;
        Buffer<float> history;
        Buffer<float> y;
        std::size_t kernel;
    };
    Random random(shape.a * 31 + shape.b);
    const auto [channels, kernel, unused, skew] = shape;
    Buffer<float> history = random_floats(channels * (kernel - 1), skew, values, random);
    auto state =
        std::make_shared<State>(State{random_floats(channels * kernel, skew, values, random),
                                      random_floats(channels, skew, values, random), history,
                                      history, Buffer<float>(channels, skew), kernel});
    Call call =
        pure_call<State>(state, 4 * static_cast<double>(channels * (kernel + 2 * (kernel - 1) + 2)),
                         0, [](State& s, const KernelTable& table) {
                             table.short_conv(s.taps.data(), s.history.data(), s.x.data(),
                                              s.x.size(), s.kernel, s.y.data());
                         });
    call.reset = [state] { state->history = state->first_history; };
    call.result = [state] {
        std::vector<std::uint32_t> bits;
        append_bits(state->y.all(), bits);
        append_bits(state->history.all(), bits);
        return bits;
    };
    call.guards_intact = [state] {
        return state->y.guards_intact() && state->history.guards_intact();
    };
    return call;
}

// ---- attention ----

/// a = dk, b = dv, c = heads.
Call make_kda_step(const Shape& shape, Values values) {
    struct State {
        Buffer<float> first_state;
        Buffer<float> state;
        Buffer<float> q, k, v, alpha, beta;
        Buffer<float> scratch;
        Buffer<float> y;
        std::size_t dk, dv, heads;
    };
    Random random(shape.a * 31 + shape.b);
    const auto [dk, dv, heads, skew] = shape;
    Buffer<float> first = random_floats(heads * dk * dv, skew, values, random);
    auto state = std::make_shared<State>(State{
        first, first, random_floats(heads * dk, skew, values, random),
        random_floats(heads * dk, skew, values, random),
        random_floats(heads * dv, skew, values, random),
        random_floats(heads * dk, skew, values, random), random_floats(heads, skew, values, random),
        Buffer<float>(heads * dv, skew), Buffer<float>(heads * dv, skew), dk, dv, heads});
    for (float& a : state->alpha.all()) a = a * 0.25F + 0.49F;  // a benchmark must not overflow
    for (float& k : state->k.all()) k *= 0.05F;
    const double size = static_cast<double>(heads * dk * dv);
    Call call = pure_call<State>(state, 8 * size, 7 * size, [](State& s, const KernelTable& table) {
        kernels::parallel_for(s.heads, [&](std::size_t h) {
            table.kda_step(&s.state[h * s.dk * s.dv], &s.q[h * s.dk], &s.k[h * s.dk],
                           &s.v[h * s.dv], &s.alpha[h * s.dk], s.beta[h], s.dk, s.dv,
                           &s.scratch[h * s.dv], &s.y[h * s.dv]);
        });
    });
    call.reset = [state] { state->state = state->first_state; };
    call.result = [state] {
        std::vector<std::uint32_t> bits;
        append_bits(state->y.all(), bits);
        append_bits(state->state.all(), bits);
        return bits;
    };
    call.guards_intact = [state] {
        return state->y.guards_intact() && state->state.guards_intact() &&
               state->scratch.guards_intact();
    };
    return call;
}

/// Values of a latent cache; of bf16 the upper halves of floats.
template <typename Value>
Buffer<Value> random_cache(std::size_t n, std::size_t skew, Values values, Random& random) {
    Buffer<Value> cache(n, skew);
    for (Value& value : cache.all()) {
        const float drawn = random.value(values);
        if constexpr (std::is_same_v<Value, float>)
            value = drawn;
        else
            value = static_cast<Value>(std::bit_cast<std::uint32_t>(drawn) >> 16U);
    }
    return cache;
}

/// a = positions, b = latent width (the shared key has an eighth of it), c = heads.
template <typename Value>
Call make_mla_attend(const Shape& shape, Values values) {
    struct State {
        Buffer<Value> latent, rope;
        Buffer<float> q_latent, q_rope, scores, y;
        std::size_t positions, latent_dim, rope_dim, heads;
    };
    Random random(shape.a * 31 + shape.b);
    const auto [positions, latent_dim, heads, skew] = shape;
    const std::size_t rope_dim = (latent_dim + 7) / 8;
    auto state = std::make_shared<State>(
        State{random_cache<Value>(positions * (latent_dim + kStrideGap), skew, values, random),
              random_cache<Value>(positions * (rope_dim + kStrideGap), skew, values, random),
              random_floats(heads * latent_dim, skew, values, random),
              random_floats(heads * rope_dim, skew, values, random),
              Buffer<float>(heads * positions, skew), Buffer<float>(heads * latent_dim, skew),
              positions, latent_dim, rope_dim, heads});
    const double width = static_cast<double>(latent_dim + rope_dim);
    const double work = static_cast<double>(heads * positions);
    return pure_call<State>(state, static_cast<double>(positions) * width * sizeof(Value),
                            work * 2 * (width + static_cast<double>(latent_dim)),
                            [](State& s, const KernelTable& table) {
                                kernels::parallel_for(s.heads, [&](std::size_t h) {
                                    const auto attend = [&] {
                                        if constexpr (std::is_same_v<Value, float>)
                                            return table.mla_attend;
                                        else
                                            return table.mla_attend_bf16;
                                    }();
                                    attend(&s.q_latent[h * s.latent_dim], &s.q_rope[h * s.rope_dim],
                                           s.latent.data(), s.latent_dim + kStrideGap,
                                           s.rope.data(), s.rope_dim + kStrideGap, s.positions,
                                           s.latent_dim, s.rope_dim, 0.07F,
                                           &s.scores[h * s.positions], &s.y[h * s.latent_dim]);
                                });
                            });
}

/// a = sources, b = n.
Call make_attn_res(const Shape& shape, Values values) {
    struct State {
        std::vector<Buffer<float>> sources;
        std::vector<const float*> pointers;
        Buffer<float> query;
        Buffer<float> weights;
        Buffer<float> y;
    };
    Random random(shape.a * 31 + shape.b);
    const auto [n_sources, n, unused, skew] = shape;
    auto state = std::make_shared<State>(State{{},
                                               {},
                                               random_floats(n, skew, values, random),
                                               Buffer<float>(n_sources, skew),
                                               Buffer<float>(n, skew)});
    for (std::size_t i = 0; i < n_sources; ++i)
        state->sources.push_back(random_floats(n, skew, values, random));
    for (const Buffer<float>& source : state->sources) state->pointers.push_back(source.data());
    const double size = static_cast<double>(n_sources * n);
    Call call = pure_call<State>(state, 8 * size, 6 * size, [](State& s, const KernelTable& table) {
        table.attn_res_mix(s.pointers.data(), s.pointers.size(), s.query.size(), s.query.data(),
                           1e-5F, s.weights.data(), s.y.data());
    });
    call.result = [state] {
        std::vector<std::uint32_t> bits;
        append_bits(state->y.all(), bits);
        append_bits(state->weights.all(), bits);
        return bits;
    };
    call.guards_intact = [state] {
        return state->y.guards_intact() && state->weights.guards_intact();
    };
    return call;
}

// ---- shapes ----

constexpr std::size_t kRowCounts[] = {1, 2, 3, 7, 8, 31, 64};

std::vector<Shape> matmul_test_shapes(WeightType type) {
    const std::size_t step = type == WeightType::mxfp4 ? 32 : 1;
    std::vector<Shape> shapes;
    for (std::size_t n_in = step; n_in <= 97; n_in += step)
        for (std::size_t n_rows : kRowCounts)
            shapes.push_back({1 + (n_in + n_rows) % 23, n_in, n_rows, n_in % 4});
    // Released widths; the number of output rows only decides how blocks end.
    for (std::size_t n_in : {512, 1536, 3072, 3584, 6144, 7168, 12288, 33792})
        for (std::size_t n_rows : kRowCounts)
            if (n_in * n_rows <= 500'000) shapes.push_back({n_rows == 1 ? 33U : 19U, n_in, n_rows});
    // Beyond every block that a variant works in (64 rows, 512 columns, 6144 products): weight
    // rows, columns and rows.
    shapes.push_back({211, 1568, 67});
    shapes.push_back({157, 800, 131});
    return shapes;
}

std::vector<Shape> vector_test_shapes() {
    std::vector<Shape> shapes;
    for (std::size_t n = 1; n <= 97; ++n) shapes.push_back({n, 1, 1, n % 5});
    for (std::size_t n : {128, 512, 1536, 3072, 3584, 7168, 12288}) shapes.push_back({n});
    return shapes;
}

std::vector<Shape> square_test_shapes(std::initializer_list<Shape> released) {
    std::vector<Shape> shapes;
    for (std::size_t n = 1; n <= 97; ++n) {
        shapes.push_back({n, 1 + (n * 7) % 97, 1 + n % 3, n % 4});
        shapes.push_back({1 + (n * 5) % 97, n, 1, n % 3});
    }
    shapes.insert(shapes.end(), released);
    return shapes;
}

std::vector<Shape> conv_test_shapes() {
    std::vector<Shape> shapes;
    for (std::size_t n = 1; n <= 97; ++n)
        for (std::size_t kernel : {1, 2, 3, 4, 5}) shapes.push_back({n, kernel, 1, n % 4});
    shapes.push_back({12288, 4});
    return shapes;
}

std::vector<Shape> attn_res_test_shapes() {
    std::vector<Shape> shapes;
    for (std::size_t n = 1; n <= 97; ++n) shapes.push_back({1 + n % 32, n, 1, n % 4});
    for (std::size_t n_sources : {1, 2, 5, 8, 9}) shapes.push_back({n_sources, 7168});
    return shapes;
}

void add_matrix_operations(std::vector<Operation>& list) {
    const std::string sizes = "n_out x n_in, rows";
    // With few rows the benchmark reads more than a cache holds: half a projection of a KDA layer
    // (88 MB), the w1 of sixteen experts (88 MB). With many rows the arithmetic decides.
    list.push_back(
        {"matmul bf16",
         sizes,
         [](const Shape& s, Values v) { return make_matmul(WeightType::bf16, s, v); },
         matmul_test_shapes(WeightType::bf16),
         {{6144, 7168, 1}, {6144, 7168, 4}, {768, 7168, 16}, {768, 7168, 32}, {768, 7168, 64}}});
    list.push_back({"matmul mxfp4",
                    sizes,
                    [](const Shape& s, Values v) { return make_matmul(WeightType::mxfp4, s, v); },
                    matmul_test_shapes(WeightType::mxfp4),
                    {{16 * 3072, 3584, 1},
                     {16 * 3072, 3584, 4},
                     {1536, 3584, 16},
                     {1536, 3584, 32},
                     {1536, 3584, 64}}});
    list.push_back({"matmul f32",
                    sizes,
                    [](const Shape& s, Values v) { return make_matmul(WeightType::f32, s, v); },
                    matmul_test_shapes(WeightType::f32),
                    {{8192, 3584, 1}}});
    list.push_back(
        {"matvec_transposed bf16",
         "n_out x n_in, heads",
         [](const Shape& s, Values v) { return make_transposed(WeightType::bf16, s, v); },
         square_test_shapes({{128, 512, 3}}),
         {{128, 512, 96}}});
    list.push_back({"matvec_transposed f32",
                    "n_out x n_in, heads",
                    [](const Shape& s, Values v) { return make_transposed(WeightType::f32, s, v); },
                    square_test_shapes({{128, 512, 3}}),
                    {}});
}

void add_vector_operations(std::vector<Operation>& list) {
    const auto add = [&list](const char* name, std::size_t bench_n, auto make) {
        list.push_back({name, "n", make, vector_test_shapes(), {{bench_n}}});
    };
    add("dot", 7168, [](const Shape& s, Values v) {
        return make_vector(s, v, 2, 1, [](VectorState& b, const KernelTable& table) {
            b.y[0] = table.dot(b.x.data(), b.second.data(), b.n);
        });
    });
    add("rms_norm", 7168, [](const Shape& s, Values v) {
        return make_vector(s, v, 4, 0, [](VectorState& b, const KernelTable& table) {
            table.rms_norm(b.x.data(), b.second.data(), b.n, 1e-5F, b.y.data());
        });
    });
    add("l2_norm", 128, [](const Shape& s, Values v) {
        return make_vector(s, v, 3, 0, [](VectorState& b, const KernelTable& table) {
            table.l2_norm(b.x.data(), b.n, 1e-6F, 0.088388346F, b.y.data());
        });
    });
    add("situ_glu", 3072, [](const Shape& s, Values v) {
        return make_vector(s, v, 3, 0, [](VectorState& b, const KernelTable& table) {
            table.situ_glu(b.x.data(), b.second.data(), b.n, 4.0F, 25.0F, b.y.data());
        });
    });
    add("sigmoid", 896, [](const Shape& s, Values v) {
        return make_vector(s, v, 2, 0, [](VectorState& b, const KernelTable& table) {
            table.sigmoid(b.x.data(), b.n, b.y.data());
        });
    });
    add("sigmoid_gate", 12288, [](const Shape& s, Values v) {
        return make_vector(s, v, 3, 0, [](VectorState& b, const KernelTable& table) {
            table.sigmoid_gate(b.x.data(), b.second.data(), b.n, b.y.data());
        });
    });
    add("kda_decay", 128, [](const Shape& s, Values v) {
        return make_vector(s, v, 3, 0, [](VectorState& b, const KernelTable& table) {
            table.kda_decay(b.x.data(), b.second.data(), b.n, 1.7F, -5.0F, b.y.data());
        });
    });
    add("add", 7168, make_add);
    add("accumulate_fixed", 3584, make_accumulate);
    add("fixed_to_float", 3584, make_fixed_to_float);
    add("round_to_bf16", 512, make_round_to_bf16);
}

void add_attention_operations(std::vector<Operation>& list) {
    list.push_back(
        {"short_conv", "channels, kernel", make_short_conv, conv_test_shapes(), {{12288, 4}}});
    list.push_back({"kda_step",
                    "dk x dv, heads",
                    make_kda_step,
                    square_test_shapes({{128, 128, 3}}),
                    {{128, 128, 96}}});
    for (const bool is_bf16 : {false, true})
        list.push_back(
            {is_bf16 ? "mla_attend_bf16" : "mla_attend",
             "positions x latent, heads",
             is_bf16 ? make_mla_attend<std::uint16_t> : make_mla_attend<float>,
             square_test_shapes({{1, 512, 2}, {63, 512, 2}, {64, 512}, {65, 512}, {300, 512}}),
             {{1024, 512, 8}, {8192, 512, 2}}});
    list.push_back(
        {"attn_res_mix", "sources x n", make_attn_res, attn_res_test_shapes(), {{9, 7168}}});
}

}  // namespace

std::vector<Operation> operations() {
    std::vector<Operation> list;
    add_matrix_operations(list);
    add_vector_operations(list);
    add_attention_operations(list);
    return list;
}

}  // namespace k3::test
