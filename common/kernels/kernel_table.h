#pragma once
// The numeric operations of the model, one struct of function pointers per instruction set.
//
// Lane contract (the bits every variant reproduces). A dot product of n elements accumulates in
// sixteen fp32 lanes by fused multiply-add, each lane in increasing order of its elements, and then
// folds by halves (16, 8, 4, 2, 1: lane i += lane i + half). Elements 2j and 2j+1 of each group of
// 32 belong to lane j, for fp32, bf16 and MXFP4 weights alike; in a last group that is not full the
// missing elements are skipped. The product is fma(weight, activation, lane).
// Column contract: an operation that sums over rows (transposed products, weighted sums of vectors)
// keeps one fp32 accumulator per output element and takes the rows in increasing order by fma.
// exp, sigmoid, tanh and friends are this library's own polynomials (math.h), never libm's.
//
// All functions are noexcept, allocate nothing, read unaligned pointers, use one thread and touch
// only what the shapes say. Element-wise operations and norms may write exactly over an input.
// Parallel versions over output rows or heads are in parallel.h.

#include <cstddef>
#include <cstdint>

namespace k3::kernels {

enum class WeightType : std::uint8_t { f32, bf16, mxfp4 };

/// A weight matrix [n_out, n_in] as stored; borrowed bytes.
struct Matrix {
    WeightType type = WeightType::bf16;
    const void* data = nullptr;  // f32/bf16 row-major; mxfp4: packed nibbles [n_out, n_in/2],
                                 // low nibble = even column
    const std::uint8_t* scales = nullptr;  // mxfp4 only: [n_out, n_in/32] E8M0
    std::size_t n_out = 0;
    std::size_t n_in = 0;  // mxfp4: a multiple of 32

    /// Rows [first, first + count) of the same matrix.
    Matrix rows(std::size_t first, std::size_t count) const noexcept;
};

struct KernelTable {
    const char* isa;  // "scalar", "avx2", ...

    /// y[r * y_stride + o] = dot(W[o], x[r]) for n_rows rows of x.
    void (*matmul)(const Matrix& w, const float* x, std::size_t x_stride, std::size_t n_rows,
                   float* y, std::size_t y_stride) noexcept;

    /// y[c] = sum over o of W[o, c] * x[o] (column contract); y has w.n_in elements. bf16 and f32.
    void (*matvec_transposed)(const Matrix& w, const float* x, float* y) noexcept;

    /// Dot product of two fp32 vectors (lane contract).
    float (*dot)(const float* a, const float* b, std::size_t n) noexcept;

    /// y = weight * x / sqrt(mean(x^2) + eps). Spec section 3.1. x and y may be the same.
    void (*rms_norm)(const float* x, const float* weight, std::size_t n, float eps,
                     float* y) noexcept;

    /// y = x * (scale / sqrt(sum(x^2) + eps)): KDA's q and k. Spec section 3.6.2.
    void (*l2_norm)(const float* x, std::size_t n, float eps, float scale, float* y) noexcept;

    /// y = beta*tanh(gate/beta) * sigmoid(gate) * linear_beta*tanh(up/linear_beta). Section 3.8.
    void (*situ_glu)(const float* gate, const float* up, std::size_t n, float beta,
                     float linear_beta, float* y) noexcept;

    /// y = sigmoid(x).
    void (*sigmoid)(const float* x, std::size_t n, float* y) noexcept;

    /// y = a * sigmoid(gate), element-wise. y may be a.
    void (*sigmoid_gate)(const float* a, const float* gate, std::size_t n, float* y) noexcept;

    /// Causal depth-wise convolution and SiLU for one token: history [kernel-1, channels] oldest
    /// first holds the previous projections; taps [channels, kernel] oldest first; x and y
    /// [channels]. Updates history (drops the oldest, appends x). Section 3.6.1. y may be x.
    void (*short_conv)(const float* taps, float* history, const float* x, std::size_t channels,
                       std::size_t kernel, float* y) noexcept;

    /// alpha[c] = exp(lower_bound * sigmoid(exp_a_log * (z[c] + dt_bias[c]))) for one head.
    /// Section 3.6.4; exp_a_log = exp(A_log[head]) computed once at load with math.h.
    void (*kda_decay)(const float* z, const float* dt_bias, std::size_t n, float exp_a_log,
                      float lower_bound, float* alpha) noexcept;

    /// One token of the gated delta rule for one head: state [dk, dv]; q and k normalised (q also
    /// scaled); v [dv]; out [dv]; `scratch` holds dv values. Section 3.6.5.
    void (*kda_step)(float* state, const float* q, const float* k, const float* v,
                     const float* alpha, float beta, std::size_t dk, std::size_t dv, float* scratch,
                     float* out) noexcept;

    /// Absorbed attention of one head and one query over n positions, n >= 1.
    /// score_s = (dot(q_latent, latent_s) + dot(q_rope, rope_s)) * scale; softmax over s;
    /// out [latent] = sum prob_s latent_s. latent rows have stride latent_stride, rope rows
    /// rope_stride. Sums over positions run in blocks of kAttentionBlock that start at absolute
    /// positions. `scores` holds n values of scratch. Section 3.7.
    void (*mla_attend)(const float* q_latent, const float* q_rope, const float* latent,
                       std::size_t latent_stride, const float* rope, std::size_t rope_stride,
                       std::size_t n_positions, std::size_t latent_dim, std::size_t rope_dim,
                       float scale, float* scores, float* out) noexcept;

    /// The same over a cache of bf16 values: the bits of mla_attend() over the widened ones.
    void (*mla_attend_bf16)(const float* q_latent, const float* q_rope, const std::uint16_t* latent,
                            std::size_t latent_stride, const std::uint16_t* rope,
                            std::size_t rope_stride, std::size_t n_positions,
                            std::size_t latent_dim, std::size_t rope_dim, float scale,
                            float* scores, float* out) noexcept;

    /// y = x rounded to bf16, to nearest even: what is beyond its largest becomes an infinity, NaN
    /// stays NaN.
    void (*round_to_bf16)(const float* x, std::size_t n, std::uint16_t* y) noexcept;

    /// Attention-residual mix of n_sources vectors (n <= 32). query = norm weight * projection,
    /// folded at load. out may not alias a source. `weights` receives the n softmax weights.
    /// Section 3.3, plain form.
    void (*attn_res_mix)(const float* const* sources, std::size_t n_sources, std::size_t n,
                         const float* query, float eps, float* weights, float* out) noexcept;

    /// y += x.
    void (*add)(const float* x, std::size_t n, float* y) noexcept;

    /// Adds round(fl32(weight * y[i]) * 2^40), rounded to nearest even, to sums[i].
    /// Returns n, or the first i where the term is not finite or its magnitude is 2^18 or more
    /// (elements before it were added: the caller discards the row). Design section 5.
    std::size_t (*accumulate_fixed)(const float* y, std::size_t n, float weight,
                                    std::int64_t* sums) noexcept;

    /// y[i] = fl32(sums[i] * 2^-40), one rounding.
    void (*fixed_to_float)(const std::int64_t* sums, std::size_t n, float* y) noexcept;
};

inline constexpr std::size_t kAttentionBlock = 64;

/// Highest instruction set allowed: K3_ISA=scalar|avx2|avx512 (x86-64) or scalar|neon (aarch64), or
/// everything this CPU has.
/// The process's table, filled at the first call (call it from main before threads start).
/// Aborts if K3_ISA is unknown or this CPU lacks it: check_isa() of isa.h asks before.
const KernelTable& kernels() noexcept;

/// Every table this CPU can run, scalar first: for bit-equality tests and benchmarks.
struct KernelTables {
    const KernelTable* tables[4];
    std::size_t count;
};
KernelTables available_kernels() noexcept;

/// The first corrupt group of an MXFP4 matrix, or n_groups if there is none: scale byte 255, or a
/// scale and code whose product fp32 cannot hold (254 with a code magnitude of 2 or more, 253 with
/// 4 or more). scales [n_groups], packed [n_groups * 16].
std::size_t find_corrupt_group(const std::uint8_t* packed, const std::uint8_t* scales,
                               std::size_t n_groups) noexcept;

/// Decodes n_groups groups of 32 weights exactly (for tests and tools).
void decode_mxfp4(const std::uint8_t* packed, const std::uint8_t* scales, std::size_t n_groups,
                  float* out) noexcept;

}  // namespace k3::kernels
