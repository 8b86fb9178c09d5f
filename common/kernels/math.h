#pragma once
// exp, log and friends with the same bits on every machine and in every variant.
//
// libm picks an implementation by CPU at run time and its results differ in the last bit, which
// attention residuals amplify into other text. These are polynomials evaluated by explicit fma.
// Stated bounds are the largest error against double over the whole range, in units in the last
// place (ulp) of the fp32 result; tests/kernels measures them.

namespace k3::kernels {

/// Within 1 ulp (worst seen over all floats: 0.992). Subnormal results included; 0 below about
/// -103.98, infinity above about 88.72.
float exp_f32(float x) noexcept;
/// 1 / (1 + exp(-x)) within 2.5 ulp (2.41), also where it is tiny.
float sigmoid_f32(float x) noexcept;
/// Within 1.5 ulp (1.47); odd, keeps the sign of zero.
float tanh_f32(float x) noexcept;

/// Double versions for the sampler, whose sums run over 163,840 terms. Within 2 ulp of a double.
double exp_f64(double x) noexcept;
/// -infinity for 0, NaN for negative x.
double log_f64(double x) noexcept;

}  // namespace k3::kernels
