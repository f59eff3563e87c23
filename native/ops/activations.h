// Activations of float32. The same code wherever they are computed, so that bits agree.
#pragma once
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// 1 / x, to within 1 unit in the last place, for what is neither zero nor denormal.
OCTAVO_INLINE F one_over(F x) {
#if defined(__AVX512F__)
  const F rough = _mm512_rcp14_ps(x);  // a division takes as long as all the rest of an activation
  return fma(rough, fma(sub(zero(), x), rough, all(1.f)), rough);
#else
  return div(all(1.f), x);
#endif
}

struct Silu {
  OCTAVO_INLINE F of(F x) { return mul(x, one_over(add(all(1.f), exp(sub(zero(), x))))); }
};

// The error function to 1.5e-7: Abramowitz and Stegun, 7.1.26. x (1 + erf(x / sqrt 2)) / 2 is x - x tail / 2 above zero
// and x tail / 2 below, with tail = 1 - erf(|x| / sqrt 2), so that nothing cancels far below zero.
struct Gelu {
  OCTAVO_INLINE F of(F x) {
    const F size = max(x, sub(zero(), x));
    const F z = mul(size, all(0.70710678118654752f));
    const F t = div(all(1.f), fma(z, all(0.3275911f), all(1.f)));
    F p = all(1.061405429f);
    p = fma(p, t, all(-1.453152027f));
    p = fma(p, t, all(1.421413741f));
    p = fma(p, t, all(-0.284496736f));
    p = fma(p, t, all(0.254829592f));
    const F tail = mul(mul(p, t), exp(sub(zero(), mul(z, z))));
    // max(x, 0) - |x| tail / 2
    return sub(max(x, zero()), mul(mul(size, all(0.5f)), tail));
  }
};

// (1 + tanh u) / 2 is 1 / (1 + e^-2u).
struct GeluTanh {
  OCTAVO_INLINE F of(F x) {
    const F cube = mul(mul(x, x), x);
    const F u = mul(fma(cube, all(0.044715f), x), all(-1.5957691216057308f));  // -2 sqrt(2 / pi)
    return div(x, add(all(1.f), exp(u)));
  }
};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
