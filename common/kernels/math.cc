#include "common/kernels/math.h"

#include <cstdint>

namespace k3::kernels {

namespace {
#include "common/kernels/math.inc"
}  // namespace

float exp_f32(float x) noexcept { return exp_poly(x); }
float sigmoid_f32(float x) noexcept { return sigmoid_poly(x); }
float tanh_f32(float x) noexcept { return tanh_poly(x); }
double exp_f64(double x) noexcept { return exp_poly(x); }
double log_f64(double x) noexcept { return log_poly(x); }

}  // namespace k3::kernels
