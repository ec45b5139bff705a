/* SwiGLU (Shazeer 2020): a gate's SiLU times the other branch, number by number, and its gradients. */
#include "vector.h"

#define SPAN 4096

typedef struct {
  const void *gate; /* [count], bfloat16 or float32, dense, like all that follow */
  const void *up;
  const void *upstream;
  void *output;
  void *grad_gate;
  void *grad_up;
  int64_t count, is_bfloat, threads;
} SwiGlu;

/* 1 / (1 + e^-x); the bound keeps the power finite, where the result is below every number's resolution. */
INLINE vec logistic(vec x) {
  vec power = x * -1.44269504f;
  return 1.0f / (1.0f + exp2_of(pick(power > 126.0f, all(126.0f), power)));
}

/* In the type of the branches, as transformers rounds it before the product. */
INLINE vec rounded(vec x, int is_bfloat) { return is_bfloat ? widen(narrow(x)) : x; }

INLINE void forward_of(const SwiGlu *s, long first, long last, int is_bfloat) {
  for (long at = first; at < last; at += LANES) {
    vec gate = numbers_at(s->gate, at, last, is_bfloat), up = numbers_at(s->up, at, last, is_bfloat);
    put_at(s->output, at, last, is_bfloat, rounded(gate * logistic(gate), is_bfloat) * up);
  }
}

INLINE void backward_of(const SwiGlu *s, long first, long last, int is_bfloat) {
  for (long at = first; at < last; at += LANES) {
    vec gate = numbers_at(s->gate, at, last, is_bfloat), up = numbers_at(s->up, at, last, is_bfloat);
    vec upstream = numbers_at(s->upstream, at, last, is_bfloat), share = logistic(gate);
    put_at(s->grad_up, at, last, is_bfloat, upstream * rounded(gate * share, is_bfloat));
    put_at(s->grad_gate, at, last, is_bfloat, upstream * up * share * (1.0f + gate * (1.0f - share)));
  }
}

#define OVER_SPANS(name, body)                                                        \
  void name(const SwiGlu *s) {                                                        \
    _Pragma("omp parallel for schedule(static) num_threads((int)s->threads)")         \
    for (long first = 0; first < s->count; first += SPAN) {                           \
      long last = first + SPAN < s->count ? first + SPAN : s->count;                  \
      if (s->is_bfloat)                                                               \
        body(s, first, last, 1);                                                      \
      else                                                                            \
        body(s, first, last, 0);                                                      \
    }                                                                                 \
  }
OVER_SPANS(swiglu_forward, forward_of)
OVER_SPANS(swiglu_backward, backward_of)
