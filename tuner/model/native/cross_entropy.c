/* Cross-entropy of logits, which become their gradient in place: three passes over a row while it is in the cache. */
#include <math.h>
#include "vector.h"

#define LOG2E 1.44269504088896340736f

typedef struct {
  void *logits; /* [rows, columns], bfloat16 or float32, dense */
  const int64_t *targets;
  const float *weights; /* [rows], by which a row's loss and gradient are multiplied; NULL for ones */
  float *losses;        /* [rows], in nats */
  int64_t rows, columns, is_bfloat, wants_gradient, threads;
} CrossEntropy;

/* LANES logits of a row from `at`; the last ones of a row that are not there are minus infinity. */
INLINE vec logits_at(const CrossEntropy *c, const char *row, long at) {
  if (at + LANES <= c->columns)
    return c->is_bfloat ? widen(((const loose_halves *)(row + 2 * at))->v) : load((const float *)row + at);
  vec found;
  for (int i = 0; i < LANES; i++) {
    uint32_t raw = 0xff800000;
    if (at + i < c->columns)
      raw = c->is_bfloat ? (uint32_t)((const uint16_t *)row)[at + i] << 16 : ((const uint32_t *)row)[at + i];
    memcpy((char *)&found + 4 * i, &raw, 4);
  }
  return found;
}

INLINE void put(const CrossEntropy *c, char *row, long at, vec x) {
  halves rounded = narrow(x);
  if (at + LANES <= c->columns) {
    if (c->is_bfloat)
      ((loose_halves *)(row + 2 * at))->v = rounded;
    else
      store((float *)row + at, x);
    return;
  }
  for (long i = 0; at + i < c->columns; i++)
    if (c->is_bfloat)
      ((uint16_t *)row)[at + i] = rounded[i];
    else
      ((float *)row)[at + i] = x[i];
}

static void one_row(const CrossEntropy *c, long number) {
  char *row = (char *)c->logits + number * c->columns * (c->is_bfloat ? 2 : 4);
  long target = c->targets[number], block = target / LANES * LANES;
  vec tops[2] = {all(-INFINITY), all(-INFINITY)}, sums[4] = {{0}};
  for (long at = 0; at < c->columns; at += 2 * LANES) {
    tops[0] = larger(tops[0], logits_at(c, row, at));
    if (at + LANES < c->columns) tops[1] = larger(tops[1], logits_at(c, row, at + LANES));
  }
  float top = max_of(larger(tops[0], tops[1])), wanted = logits_at(c, row, block)[target - block];
  for (long at = 0; at < c->columns; at += 4 * LANES)
    for (int i = 0; i < 4; i++)
      if (at + i * LANES < c->columns) sums[i] += exp2_of((logits_at(c, row, at + i * LANES) - top) * LOG2E);
  float weight = c->weights ? c->weights[number] : 1.0f;
  float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])), share = weight * (1.0f / sum);
  c->losses[number] = weight * (logf(sum) + (top - wanted));
  if (!c->wants_gradient) return;
  for (long at = 0; at < c->columns; at += LANES) {
    vec gradient = exp2_of((logits_at(c, row, at) - top) * LOG2E) * share;
    if (at == block) gradient[target - block] -= weight;
    put(c, row, at, gradient);
  }
}

/* 0, or where a target is no column, its row's number and one more; nothing is changed then. */
int64_t cross_entropy(const CrossEntropy *c) {
  for (long number = 0; number < c->rows; number++)
    if (c->targets[number] < 0 || c->targets[number] >= c->columns) return number + 1;
#pragma omp parallel for schedule(static) num_threads((int)c->threads)
  for (long number = 0; number < c->rows; number++) one_row(c, number);
  return 0;
}
