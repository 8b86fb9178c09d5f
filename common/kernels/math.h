#pragma once
// exp, log and friends with the same bits on every machine and in every variant.
//
// libm picks an implementation by CPU at run time and its results differ in the last bit, which
// attention residuals amplify into other text. These are polynomials evaluated by explicit fma.
// Stated bounds are the largest error against double over the whole range, in units in the last
// place (ulp) of the fp32 result; tests/kernels measures them.

namespace k3::kernels {

float exp_f32(float x) noexcept;      // 0 below about -103.98, +inf above about 88.72
float sigmoid_f32(float x) noexcept;  // 1 / (1 + exp(-x))
float tanh_f32(float x) noexcept;
/// Double versions for the sampler, whose sums run over 163,840 terms.
double exp_f64(double x) noexcept;
double log_f64(double x) noexcept;  // x > 0

}  // namespace k3::kernels
