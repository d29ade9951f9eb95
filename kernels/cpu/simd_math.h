// exp() on vectors, for any path. A path is a type `S`, in an anonymous namespace of its own file:
//   F                      a vector of kWidth floats
//   Load, Store, Set1, Add, Sub, Mul, Div, Sqrt, Fma(a, b, c) = a * b + c
//   Max, Min (a, b)        b where either is NaN, as the x86 instructions do
//   ZeroBelow(x, limit, y) y, but 0 where x < limit
//   Round(x)               to the nearest integer, for |x| < 2^22
//   Pow2(n)                2^n for integer-valued n in [-126, 127]
//   LoadBf16, StoreBf16    kWidth elements
//   LoadE4M3               kWidth elements, exactly
//   LoadSmallE4M3          kWidth elements, kSmallE4M3 (a power of two) times too small
//   LoadPairs(p, e, o)     2 * kWidth bf16: those at even indices to e, those at odd ones to o
//   Sum(x), Largest(x)     over the lanes, in one fixed order
//   Sum4(v, out)           the sums of four vectors' lanes, each in the same fixed order
//   kLevelHeads            query heads for which four rows are summed in registers at a time
//   TransposeKeys          see simd_attention.h
// Templates over such a type have internal linkage, so the linker cannot give one file's AVX-512
// instance to another file.
#pragma once

#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

// Returns exp(x) with a relative error below 3e-7: 0 below -87.3 and at -inf, NaN for NaN, exactly
// 1 at 0. REQUIRES: x <= 88.
template <class S>
inline typename S::F Exp(typename S::F x) {
  using F = typename S::F;
  constexpr float kLowest = -87.3f;  // exp() of anything less is below the smallest normal float
  const F clamped = S::Max(S::Set1(kLowest), x);
  const F n = S::Round(S::Mul(clamped, S::Set1(1.44269504088896341f)));
  F r = S::Fma(n, S::Set1(-0.693359375f), clamped);
  r = S::Fma(n, S::Set1(2.12194440e-4f), r);
  F e = S::Set1(1.9875691500e-4f);
  e = S::Fma(e, r, S::Set1(1.3981999507e-3f));
  e = S::Fma(e, r, S::Set1(8.3334519073e-3f));
  e = S::Fma(e, r, S::Set1(4.1665795894e-2f));
  e = S::Fma(e, r, S::Set1(1.6666665459e-1f));
  e = S::Fma(e, r, S::Set1(5.0000001201e-1f));
  e = S::Add(S::Fma(S::Mul(r, r), e, r), S::Set1(1.0f));
  return S::ZeroBelow(x, kLowest, S::Mul(e, S::Pow2(n)));
}

}  // namespace
}  // namespace sluice::kernels::cpu
